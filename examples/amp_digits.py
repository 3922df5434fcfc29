"""A plain loop with mixed precision and clipping, on one rank: the script before migration (slackring_amp_digits.py is after).

Start it with

    python examples/amp_digits.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)

# 1,797 digits of 8x8 pixels that come with scikit-learn, shuffled; the last 297 are the test set.
digits, order = load_digits(), torch.randperm(1797)
pixels, labels = torch.tensor(digits.data, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]
train = TensorDataset(pixels[:1500], labels[:1500])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train, batch_size=16, shuffle=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
scaler = torch.amp.GradScaler("cpu")

for _ in range(10):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
    schedule.step()

correct = (model(pixels[1500:]).argmax(1) == labels[1500:]).sum()
print(f"accuracy on the test set: {int(correct) / 297:.3f}")
