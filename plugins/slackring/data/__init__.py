"""Which rank trains on which sample, when ranks take different numbers of steps and have different batch sizes.

Examples
--------
>>> import torch, slackring as sr
>>> data = torch.utils.data.TensorDataset(torch.randn(100, 2))
>>> def train():
...     model = torch.nn.Linear(2, 1)
...     torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
...     optimizer = sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule="losp")
...     sampler = sr.data.RoundSampler(data, batch_size=4, optimizer=optimizer)
...     mine = 0
...     for (x,) in torch.utils.data.DataLoader(data, batch_sampler=sampler):
...         optimizer.zero_grad()
...         model(x).square().mean().backward()
...         optimizer.step(samples=len(x))
...         mine += len(x)
...     optimizer.join()
...     return mine
>>> mine = sr.VirtualCluster(2, straggler="persistent:ranks=1,factor=4").run(train)
>>> sum(mine), mine[0] > 2 * mine[1]
(100, True)
"""

from __future__ import annotations

from slackring.data.dealer import Dealer, Remainder, Windows
from slackring.data.sampler import RoundSampler

__all__ = ["Dealer", "Remainder", "RoundSampler", "Windows"]
