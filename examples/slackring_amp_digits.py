"""Mixed precision and clipping on any number of ranks: amp_digits.py after migration; compare the two with diff.

Start it with

    horovodrun --gloo -np 2 python examples/slackring_amp_digits.py
"""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slackring as sr

hvd.init()
torch.manual_seed(1)

# 1,797 digits of 8x8 pixels that come with scikit-learn, shuffled; the last 297 are the test set.
digits, order = load_digits(), torch.randperm(1797)
pixels, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
train = TensorDataset(pixels[:1500], labels[:1500])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
# The lr of a single rank is the one that "losp" takes on any number of them.
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = sr.DistributedOptimizer(optimizer, rule="losp:k_max=8", max_grad_norm=1.0)
# Deals each epoch's samples to the ranks by the steps they take.
loader = DataLoader(train, batch_sampler=sr.data.RoundSampler(train, batch_size=16, optimizer=optimizer))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
scaler = torch.amp.GradScaler("cpu")

for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer, samples=len(x))
        scaler.update()
    optimizer.join()  # afterwards every rank has the same model
    schedule.step()

correct = (model(pixels[1500:]).argmax(1) == labels[1500:]).sum()
if hvd.rank() == 0:
    print(f"accuracy on the test set: {int(correct) / 297:.3f}")
