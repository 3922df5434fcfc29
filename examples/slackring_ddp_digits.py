"""Relaxed data-parallel training with Slackring: ddp_digits.py after migration; compare the two with diff.

Start it with

    torchrun --nproc-per-node 2 examples/slackring_ddp_digits.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import slackring as sr

dist.init_process_group("gloo")
torch.manual_seed(1)

# 1,797 digits of 8x8 pixels that come with scikit-learn, shuffled alike on every rank; the last 297 are the test set.
digits, order = load_digits(), torch.randperm(1797)
pixels, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
train = TensorDataset(pixels[:1500], labels[:1500])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
# DistributedDataParallel has rank 0's model sent to all; here the script does.
for tensor in model.state_dict().values():
    tensor.copy_(sr.broadcast(tensor))
# Under "losp" each rank steps alone in between, so the lr is that of a single rank ("bsp" keeps the one before).
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# The averaged statistics of BatchNorm come with the model that all ranks agree on.
optimizer = sr.DistributedOptimizer(optimizer, rule="losp:k_max=8", named_buffers=model.named_buffers())

for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step(samples=len(x))
optimizer.join()  # out of data; afterwards every rank has the same model, and collectives of one's own are safe

# Every rank tests its share, and what they found is added up.
model.eval()
share = slice(1500 + dist.get_rank(), None, dist.get_world_size())
correct = (model(pixels[share]).argmax(1) == labels[share]).sum()
dist.all_reduce(correct)
if dist.get_rank() == 0:
    print(f"accuracy on the test set: {int(correct) / 297:.3f}")
dist.destroy_process_group()
