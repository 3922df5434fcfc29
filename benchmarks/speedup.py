"""Linear speed-up: rounds to a fixed gradient norm, by the number of ranks P and of local steps K, and the slopes.

    python benchmarks/speedup.py --rule losp

A quadratic in ten dimensions (curvatures from 0.3 to 1) whose gradients carry unit noise, so that averaging is what helps.
Each (P, K) takes the learning rate of a grid that needs the fewest rounds with tuning seeds; other seeds are then counted.
A method with linear speed-up needs rounds in proportion to 1 / (P K): slopes of -1 in the logarithms. The last column is
the local steps of all ranks over those of sequential SGD, which is 1 for a method that loses nothing. Virtual ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import slackring as sr

DIMENSION = 10
CURVATURES = torch.linspace(0.3, 1.0, DIMENSION, dtype=torch.float64)
NOISE_FLOOR = 0.05  # squared norm of the gradient to reach, averaged over the last rounds
AVERAGED = 5
RATES = [0.01 * 2**power for power in range(6)]
TUNING_SEEDS = (1000, 1001)
MOST_STEPS = 3000


def with_steps(rule: str, steps: int) -> str:
    """The rule with a fixed number of local steps a window."""
    name, _, options = rule.partition(":")
    fixed = {
        "bsp": f"accumulate={steps}",
        "losp": f"k_min={steps},k_max={steps}",
        "osp": f"k_min={steps},k_max={steps}",
    }
    return f"{name}:{fixed.get(name, f'steps={steps}')}{',' + options if options else ''}"


def rounds_to_floor(rule: str, ranks: int, lr: float, seed: int) -> float:
    """Rounds until the anchor's squared gradient norm stays below the floor; infinite if it does not get there."""

    def rank() -> float:
        ring = sr.ring()
        noise = torch.Generator().manual_seed(1_000_003 * seed + ring.rank)
        x = torch.nn.Parameter(torch.full((DIMENSION,), 2.0, dtype=torch.float64))
        optimizer = sr.DistributedOptimizer(torch.optim.SGD([x], lr=lr), rule)
        seen, norms = 0, [math.inf] * AVERAGED
        for _ in range(MOST_STEPS // ring.size):
            x.grad = CURVATURES * x.detach() + torch.randn(DIMENSION, generator=noise, dtype=torch.float64)
            optimizer.step()
            if optimizer.progress.rounds > seen:
                seen = optimizer.progress.rounds
                with optimizer.consensus():
                    norms[seen % AVERAGED] = float((CURVATURES * x.detach()).square().sum())
                if not math.isfinite(norms[seen % AVERAGED]):
                    return math.inf
                if sum(norms) / AVERAGED < NOISE_FLOOR:
                    return float(seen)
            if optimizer.progress.stop:
                break
        return math.inf

    # All ranks see the same anchors, and so return after the same round.
    return sr.VirtualCluster(ranks, seed=seed).run(rank)[0]


def measure(rule: str, ranks: int, steps: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Tune the learning rate of one (P, K), and count the rounds of the seeds that matter."""
    text = with_steps(rule, steps)

    def judged(lr: float) -> float:
        return statistics.mean(rounds_to_floor(text, ranks, lr, seed) for seed in TUNING_SEEDS)

    lr = min(RATES, key=judged)
    return {
        "ranks": ranks,
        "steps": steps,
        "lr": lr,
        "at_edge": lr in (RATES[0], RATES[-1]),
        "rounds": [rounds_to_floor(text, ranks, lr, seed) for seed in seeds],
    }


def slopes(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Least-squares slopes of log(rounds) over log(P) and log(K), one a seed."""
    places = np.array([[math.log(row["ranks"]), math.log(row["steps"]), 1.0] for row in rows])
    found = [
        np.linalg.lstsq(places, np.log([row["rounds"][number] for row in rows]), rcond=None)[0]
        for number in range(len(seeds))
    ]
    return {"ranks": [float(f[0]) for f in found], "steps": [float(f[1]) for f in found]}


def study(rule: str, ranks: Sequence[int], steps: Sequence[int], seeds: Sequence[int]) -> dict[str, Any]:
    """All of it, as plain values."""
    sequential = statistics.median(measure("bsp", 1, 1, seeds)["rounds"])
    rows = [measure(rule, p, k, seeds) for p, k in itertools.product(ranks, steps)]
    for row in rows:
        row["work"] = statistics.median(row["rounds"]) * row["ranks"] * row["steps"] / sequential
    return {"rule": rule, "sequential": sequential, "rows": rows, "slopes": slopes(rows, seeds)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="losp", help="rule whose windows can be given a number of steps")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = study(options.rule, options.ranks, options.steps, range(options.seeds))
    if options.json:
        print(json.dumps(found))
        return
    print(f"{options.rule}; sequential SGD needs {found['sequential']:g} steps (median of {options.seeds} seeds)")
    print("  P   K      lr   rounds (range)          local steps over sequential SGD's")
    for row in found["rows"]:
        counted = row["rounds"]
        edge = "*" if row["at_edge"] else " "
        print(
            f"{row['ranks']:3d} {row['steps']:3d} {row['lr']:7.3f}{edge} {statistics.median(counted):7g} "
            f"({min(counted):g} to {max(counted):g}){'':8s} {row['work']:.2f}"
        )
    for what, values in found["slopes"].items():
        print(f"slope over {what}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
