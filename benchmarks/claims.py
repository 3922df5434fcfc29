"""What the three papers claim, and what came out here: writes docs/claims.md.

    python benchmarks/claims.py --out docs/claims.md          # all of it, on virtual ranks: about half an hour on two idle cores
    python benchmarks/claims.py --only elastic                # one paper: elastic, anytime or losp

Every comparison tunes each rule's learning rate by itself with other seeds than those that count (slackring.lab.compare). Medians
are followed by the range over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speedup import study

from slackring.lab.compare import compare
from slackring.lab.comparison import CompareConfig, Comparison, Row
from slackring.lab.config import TrainConfig

SEEDS = (0, 1, 2, 3, 4)
GRID = (0.1, 0.2, 0.4, 0.8, 1.6)
UNEVEN = "persistent:ranks=2+3,factor=1.3+4"
ANYTIME = "anytime:compute_time=0.4"


@dataclass(frozen=True)
class Finding:
    """A row of the page."""

    claim: str
    paper: str
    here: str
    found: str


def on_mnist(
    rules: Sequence[str],
    straggler: str = UNEVEN,
    network: str = "none",
    seconds: float = 40.0,
    batch_size: int = 32,
    grid: tuple[float, ...] = GRID,
) -> Comparison:
    """Compare rules on four virtual ranks."""
    base = TrainConfig(straggler=straggler, network=network, step_time=0.1, seconds=seconds, batch_size=batch_size)
    config = CompareConfig(base, tuple(rules), lr_grid=grid, seeds=SEEDS, virtual=True)
    with tempfile.TemporaryDirectory() as folder:
        return compare(config, Path(folder), say=lambda line: print(line, file=sys.stderr, flush=True))


def spread(values: Sequence[float | None], digits: int, unit: str = "") -> str:
    """Median and range; "not reached" where most have no value.

    >>> spread([1.0, 3.0, 2.0], 1, " s")
    '2.0 s (1.0 to 3.0)'
    """
    known = [value for value in values if value is not None]
    if 2 * len(known) <= len(values):
        return f"not reached in {len(values) - len(known)} of {len(values)} runs"
    missing = f", not in {len(values) - len(known)} runs" if len(known) < len(values) else ""
    middle = statistics.median([*known, *[float("inf")] * (len(values) - len(known))])
    return f"{middle:.{digits}f}{unit} ({min(known):.{digits}f} to {max(known):.{digits}f}{missing})"


def told(
    comparison: Comparison, rules: Sequence[str], what: Callable[[Row], float | None], digits: int, unit: str = ""
) -> str:
    """One figure of several rules; a star marks a learning rate at the edge of the grid."""
    parts = []
    for rule in rules:
        rows = comparison.of(TrainConfig(rule=rule, seconds=1).rule)
        edge = "*" if rows[0].lr_at_edge else ""
        parts.append(f"`{rule}`{edge} {spread([what(row) for row in rows], digits, unit)}")
    return "; ".join(parts)


def seconds(row: Row) -> float | None:
    """Until the target."""
    return row.seconds_to_target


def accuracy(row: Row) -> float | None:
    """At the end."""
    return row.final_accuracy


def per_sample(row: Row) -> float | None:
    """At the samples that every run reached."""
    return row.accuracy_at_equal_samples


def share(row: Row) -> float | None:
    """Of the no-wait limit."""
    return row.limit_share


def megabytes(row: Row) -> float | None:
    """Sent by all ranks until the target."""
    return None if row.bytes_to_target is None else row.bytes_to_target / 1e6


def elastic() -> list[Finding]:
    """ElasticBSP and ZipLine."""
    paper = "VGG-16 on ImageNet, 4 equal workers, parameter server: 1.77 times faster than BSP, 12.6 % more accurate"
    setting = "mnist5k, 4 virtual ranks, {}; 40 s"
    ring = ("bsp", "elastic_bsp")
    server = ("server/bsp", "server/elastic_bsp")
    rows = []
    settings = {"speeds 1, 1, 1.3, 4": UNEVEN, "equal speeds, 10 % jitter": "shifted_exponential:mean=0.01"}
    for label, straggler in settings.items():
        both = on_mnist((*ring, *server), straggler)
        for place, rules in (("ring", ring), ("parameter server", server)):
            rows.append(
                Finding(
                    "converges faster and to a higher accuracy than BSP",
                    paper,
                    setting.format(label) + f", {place}",
                    f"to 0.88: {told(both, rules, seconds, 1, ' s')}. At the end: {told(both, rules, accuracy, 3)}. "
                    f"At equal samples: {told(both, rules, per_sample, 3)}",
                )
            )
    others = (
        "server/bsp",
        "server/asp",
        "server/ssp:staleness=3",
        "server/dssp:lower=3,upper=15",
        "server/elastic_bsp",
    )
    compared = on_mnist(others)
    rows.append(
        Finding(
            "comparable to other relaxed models",
            "the same; ASP, SSP and DSSP fail to learn there",
            setting.format("speeds 1, 1, 1.3, 4") + ", parameter server",
            f"to 0.88: {told(compared, others, seconds, 1, ' s')}. At the end: {told(compared, others, accuracy, 3)}",
        )
    )
    swept = tuple(f"elastic_bsp:lookahead={lookahead}" for lookahead in (2, 5, 15, 60))
    tuned = on_mnist(swept)
    rows.append(
        Finding(
            "tunable: the lookahead R trades throughput against accuracy per sample",
            "R from 15 to 960; the curves nearly coincide",
            setting.format("speeds 1, 1, 1.3, 4") + ", ring",
            f"share of the no-wait limit: {told(tuned, swept, share, 2)}. "
            f"At equal samples: {told(tuned, swept, per_sample, 3)}. "
            f"To 0.88: {told(tuned, swept, seconds, 1, ' s')}",
        )
    )
    return rows


def anytime() -> list[Finding]:
    """Anytime Minibatch, with and without stale gradients."""
    rules = ("bsp", "bsp:accumulate=3", ANYTIME)
    exploits = on_mnist(rules)
    rows = [
        Finding(
            "exploits stragglers' work, up to 1.5 times faster than fixed mini-batches on EC2, more with more variability",
            "MNIST logistic regression, 10 EC2 nodes",
            "mnist5k, 4 virtual ranks, speeds 1, 1, 1.3, 4, ring; `bsp:accumulate=3` has the same mean batch",
            f"share of the no-wait limit: {told(exploits, rules, share, 2)}. "
            f"To 0.88: {told(exploits, rules, seconds, 1, ' s')}",
        )
    ]
    for windows, until in ((1, 160.0), (4, 360.0)):
        plain = f"{ANYTIME},communication_time={0.4 * windows:g}"
        pair = (plain, f"{plain},staleness={windows}")
        stale = on_mnist(pair, seconds=until, batch_size=2, grid=(0.05, 0.1, 0.2, 0.4, 0.8))
        rows.append(
            Finding(
                "with stale gradients up to 60 % faster where communication is slow",
                "simulated linear regression, communication of four compute times",
                "mnist5k, 4 virtual ranks, speeds 1, 1, 1.3, 4, ring, 2 samples a step; an injected communication time of "
                f"{windows} compute {'time' if windows == 1 else 'times'}",
                f"to 0.88: {told(stale, pair, seconds, 1, ' s')}",
            )
        )
    return rows


def losp() -> list[Finding]:
    """LOSP."""
    speed = study("losp", (1, 2, 4, 8), (1, 2, 4, 8), SEEDS)
    work = [row["work"] for row in speed["rows"]]
    slope = {what: spread(values, 2) for what, values in speed["slopes"].items()}
    setting = "noisy quadratic in ten dimensions, P and K of 1, 2, 4, 8, each at its own learning rate (benchmarks/speedup.py)"
    rules = ("bsp", "local_sgd:steps=4", "relaxed:steps=4,staleness=1", "osp", "losp")
    slow = on_mnist(rules, straggler="none", network="latency=0.1")
    uneven = on_mnist(rules)
    return [
        Finding(
            "converges at the rate of sequential SGD",
            "theory, non-convex",
            setting,
            f"local steps of all ranks to a fixed gradient norm, over sequential SGD's: median "
            f"{statistics.median(work):.2f}, from {min(work):.2f} to {max(work):.2f} over (P, K)",
        ),
        Finding(
            "linear speed-up in workers and in mean local updates",
            "theory",
            setting,
            f"slope of log(rounds) over log(P) {slope['ranks']}, over log(K) {slope['steps']}; -1 is linear",
        ),
        Finding(
            "less communication",
            "against Local SGD and others, CIFAR-10",
            "mnist5k, 4 virtual ranks, equal speeds, rounds of 0.1 s beside steps of 0.1 s",
            f"MB to 0.88: {told(slow, rules, megabytes, 1)}. Seconds: {told(slow, rules, seconds, 1, ' s')}",
        ),
        Finding(
            "better than the state of the art",
            "Local SGD as the authors' code has it: one round stale (`relaxed:steps=4,staleness=1`)",
            "mnist5k, 4 virtual ranks, speeds 1, 1, 1.3, 4, free network",
            f"to 0.88: {told(uneven, rules, seconds, 1, ' s')}. At the end: {told(uneven, rules, accuracy, 3)}",
        ),
    ]


PAPERS: dict[str, tuple[str, Callable[[], list[Finding]]]] = {
    "elastic": ("ElasticBSP with ZipLine (ICDM 2019; Machine Learning 2021)", elastic),
    "anytime": ("Anytime Minibatch (ICLR 2019), with stale gradients (CISS 2019; arXiv 2012.08616)", anytime),
    "losp": ("LOSP (IEEE JSAC 2021)", losp),
}

HEAD = """# What the papers claim, and what came out here

Written by `python benchmarks/claims.py`: virtual ranks, so that it comes out the same on every machine with the same versions.
Each rule runs at the learning rate that suits it best, tuned with other seeds than the {seeds} that count (* marks a rate at the
grid's edge, beyond which a better one may lie); medians are followed by their range. These are small models on small data, on a
ring instead of the papers' parameter servers unless a row says so.
"""


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PAPERS, nargs="+", default=list(PAPERS))
    parser.add_argument("--out", type=Path, help="page to write; else it is printed")
    options = parser.parse_args()
    page = HEAD.format(seeds=len(SEEDS))
    for key in options.only:
        title, examine = PAPERS[key]
        page += f"\n## {title}\n\n| claim | in the paper | here | found |\n|---|---|---|---|\n"
        page += "".join(f"| {row.claim} | {row.paper} | {row.here} | {row.found} |\n" for row in examine())
    if options.out:
        options.out.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
