"""How soon Anytime Minibatch by gossip comes to a target, waiting and stale, beside a fixed minibatch; in virtual time.

    python benchmarks/gossip.py

Linear regression of a few thousand unknowns on the ten nodes of "Anytime Minibatch" (ICLR 2019), five rounds of averaging an
epoch. The time for 60 samples is 1 s and an exponential draw of mean 1.5 s; the compute time is what the paper's rule gives for
as many samples. The error is the worst node's ||w - w*||^2 / ||w*||^2. Each method runs at its own learning rate, tuned with
a seed of its own. As in the paper, whose regression is larger, a batch has fewer samples than there are unknowns: steps must
be small then, and staleness does little harm.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slackring import gossip
from slackring.rules.timing import compute_time_for

Array = NDArray[np.float64]

SHARE, NODES, MEAN_SECONDS = 60, 10, 2.5
RATES = (0.05, 0.07, 0.1, 0.14, 0.2, 0.28)
TUNING_SEED = 1000


class _Reached(Exception):
    """Ends a run at its target, or where it is given up."""


def seconds_to(nodes: Any, truth: Array, lr: float, target: float, limit: float) -> float:
    """Virtual seconds until the worst node's error is at most `target`; infinite if it is not by `limit`."""
    found = math.inf

    def gradient(node: int, w: Array, samples: int, rng: np.random.Generator) -> Array:
        x = rng.normal(size=(samples, len(w)))
        noise = rng.normal(scale=math.sqrt(1e-3), size=samples)
        slope: Array = x.T @ (x @ (w - truth) + noise) / samples
        return slope

    def watch(epoch: gossip.Epoch, models: Array) -> None:
        nonlocal found
        error = float((np.square(models - truth).sum(axis=1) / np.square(truth).sum()).max())
        if error <= target:
            found = epoch.seconds
        if error <= target or error > 1e3 or epoch.seconds > limit:
            raise _Reached

    with contextlib.suppress(_Reached):
        nodes.run(gradient, np.zeros_like(truth), 10_000, lr=lr, on_epoch=watch)
    return found


def measure(make: Callable[..., Any], truth: Array, target: float, seeds: int, limit: float) -> dict[str, Any]:
    """Tune a method's learning rate, and run it with other seeds."""
    tuned = {lr: seconds_to(make(seed=TUNING_SEED), truth, lr, target, limit) for lr in RATES}
    lr = min(RATES, key=tuned.__getitem__)
    times = sorted(seconds_to(make(seed=seed), truth, lr, target, limit) for seed in range(seeds))
    return {"lr": lr, "at_the_edge": lr in (RATES[0], RATES[-1]), "median": statistics.median(times), "times": times}


def main() -> None:
    """Print a row for each method and communication time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unknowns", type=int, default=2000)
    parser.add_argument("--target", type=float, default=0.1)
    parser.add_argument("--communication-times", type=float, nargs="+", default=[0.5, 10.0], metavar="SECONDS")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=400.0, help="virtual seconds after which a run is given up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    truth = np.random.default_rng(TUNING_SEED).normal(size=options.unknowns)
    compute_time = compute_time_for(NODES * SHARE, NODES, 1, MEAN_SECONDS)
    rows = []
    for communication_time in options.communication_times:
        settings: dict[str, Any] = {
            "graph": gossip.AMB_ICLR_10,
            "share": SHARE,
            "rounds": 5,
            "communication_time": communication_time,
            "straggler": "shifted_exponential:mean=1.5,shift=1,unit=seconds",
        }

        anytime = functools.partial(gossip.AnytimeMinibatch, compute_time=compute_time, **settings)
        methods: dict[str, Callable[..., Any]] = {
            "fixed": functools.partial(gossip.FixedMinibatch, **settings),
            "anytime": anytime,
            "stale": functools.partial(anytime, stale=True),
        }
        for name, make in methods.items():
            row = measure(make, truth, options.target, options.seeds, options.limit)
            rows.append({"communication_time": communication_time, "method": name, **row})
            if not options.json:
                print(
                    f"communication {communication_time:4g} s  {name:7}  lr {row['lr']:<4g}"
                    f"{' (edge)' if row['at_the_edge'] else '':7}  {row['median']:6.1f} s "
                    f"({row['times'][0]:.1f} to {row['times'][-1]:.1f})",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
