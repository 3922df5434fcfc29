"""One training function for ranks of a pool and of horovodrun: ``same.py FILE RULE...`` writes what rank 0 got into FILE."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RULES = ("bsp", "bsp:accumulate=2", "local_sgd:steps=3", "cocod:steps=2")


def train(rules: tuple[str, ...]) -> dict[str, Any]:
    """By rule: the model as text that keeps every bit, the collectives as they were called, and what was agreed."""
    import horovod.torch as hvd
    import torch

    import slackring as sr
    from slackring.ring.horovod import HorovodRing

    hvd.init()
    called: list[tuple[str, int, str]] = []

    class Noting(HorovodRing):
        def sum(self, tensor: torch.Tensor, name: str, index: int) -> int:
            called.append((name, index, str(tensor.dtype), tensor.numel()))
            return super().sum(tensor, name, index)

    found = {}
    for rule in rules:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        optimizer = sr.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            rule=rule,
            named_parameters=model.named_parameters(),
            ring=Noting(),
        )
        generator = torch.Generator().manual_seed(100 + hvd.rank())
        for _ in range(12):
            x = torch.randn(4 + hvd.rank(), 8, generator=generator)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), x.sum(1).gt(0).long()).backward()
            optimizer.step(samples=len(x))
        optimizer.join()
        bits = [float(value).hex() for parameter in model.parameters() for value in parameter.detach().reshape(-1)]
        found[rule] = {
            "model": bits,
            "collectives": [list(call) for call in called],
            "progress": [optimizer.progress.rounds, optimizer.progress.samples],
            "threads": torch.get_num_threads(),
        }
        called.clear()
    return found


if __name__ == "__main__":
    import horovod.torch as hvd

    results = train(tuple(sys.argv[2:]))
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    hvd.shutdown()
