"""A task of one's own for `slackring train` and `slackring compare`: data, model, loss and metric, and no training loop.

Start it from the folder above with

    horovodrun --gloo -np 2 slackring train --task examples.own_task:shifted_digits --rule losp --samples 20000
    slackring compare --task examples.own_task:shifted_digits --rules bsp,losp --virtual --target 0.9
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from slackring.lab.dealt import Dealt
from slackring.lab.tasks import Task, accuracy


class ShiftedDigits(Dataset):
    """Digits of 8x8 pixels, moved by up to one pixel each time they are loaded."""

    def __init__(self, pixels, labels):
        self.pixels, self.labels = pixels, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.pixels[index].roll((down, right), (1, 2)), self.labels[index]


def make_model():
    """A small convolutional network; it starts from rank 0's weights on all ranks."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def make_loaders(batch_size, rank, size, seed):
    """What to train on and what to evaluate on, as this rank sees them."""
    digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(digits.target)[order]
    # Each epoch is all of it once over all ranks, more of it on fast ones; no rank has a shard of its own.
    train = Dealt(ShiftedDigits(pixels[:1500], labels[:1500]), batch_size, seed=seed)
    return train, [(pixels[1500:], labels[1500:])]


def shifted_digits():
    """What --task names: a function that takes nothing and returns a Task."""
    return Task("shifted digits", make_model, nn.functional.cross_entropy, make_loaders, accuracy)
