"""Synchronous data-parallel training with plain Horovod: the script before migration (slackring_digits.py is the one after).

Start it with

    horovodrun --gloo -np 2 python examples/horovod_digits.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.manual_seed(1)

# 1,797 digits of 8x8 pixels that come with scikit-learn, shuffled alike on every rank; the last 297 are the test set.
digits, order = load_digits(), torch.randperm(1797)
pixels, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
train = TensorDataset(pixels[:1500], labels[:1500])
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
# An average over more ranks is less noisy, so Horovod's users multiply the lr by their number.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

for epoch in range(15):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

# Every rank tests its share, and Horovod adds up what they found.
share = slice(1500 + hvd.rank(), None, hvd.size())
correct = (model(pixels[share]).argmax(1) == labels[share]).sum()
correct = hvd.allreduce(correct, op=hvd.Sum)
if hvd.rank() == 0:
    print(f"accuracy on the test set: {int(correct) / 297:.3f}")
