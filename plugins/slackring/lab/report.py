"""A comparison as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from slackring.lab.comparison import Comparison, Row
from slackring.lab.config import TrainConfig
from slackring.lab.runs import Run
from slackring.server import Policy

__all__ = ["describe_compression", "describe_injected", "print_comparison", "print_run", "table", "verdict"]

_NOTHING = "-"
_NOTHING_TO_GAIN = 0.95  # share of the no-wait limit


def table(comparison: Comparison) -> Table:
    """Lay a comparison out, one line a rule: medians over seeds, and ranges where there are several."""
    config = comparison.config
    ranks = f"{config.workers} {'virtual' if config.virtual else 'Horovod'} ranks"
    title = f"{config.base.task}, {ranks}{describe_compression(config.base)}"
    result = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("rule", no_wrap=True)
    for header in (
        "lr",
        f"seconds to {config.base.target:g}",
        "speed vs BSP",
        "final acc.",
        f"acc. at {comparison.equal_samples:,.0f} samples",
        "share of no-wait limit",
        "% wait by rank",
        "rounds",
        "MB to target",
    ):
        result.add_column(header, justify="right", overflow="fold")  # no digit is left out
    for rule in comparison.config.rules:
        rows = comparison.of(rule)
        if rows:
            result.add_row(*_cells(rule, rows))
    return result


def _cells(rule: str, rows: Sequence[Row]) -> list[str]:
    waits = [row.wait_share for row in rows if row.wait_share is not None]
    by_rank = [statistics.median(shares) for shares in zip(*waits, strict=True)]
    return [
        rule,
        f"{rows[0].lr:g}{'*' if rows[0].lr_at_edge else ''}",
        _spread([row.seconds_to_target for row in rows], "{:.1f}".format),
        _spread([row.speedup for row in rows], "{:.2f}x".format),
        _spread([row.final_accuracy for row in rows], "{:.3f}".format),
        _spread([row.accuracy_at_equal_samples for row in rows], "{:.3f}".format),
        _spread([row.limit_share for row in rows], "{:.2f}".format),
        " ".join(f"{100 * share:.0f}" for share in by_rank) or _NOTHING,
        _spread([row.rounds for row in rows], "{:.0f}".format),
        _spread([None if row.bytes_to_target is None else row.bytes_to_target / 1e6 for row in rows], "{:.1f}".format),
    ]


def _spread(values: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Median and range; with values missing, only how many of the runs have one, since a median of those flatters."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return _NOTHING
    if len(known) < len(values):
        return f"{write(known[0])}\n{len(known)} of {len(values)} runs"
    text, low, high = write(statistics.median(known)), write(known[0]), write(known[-1])
    return text if low == high else f"{text}\n{low} to {high}"


def describe_injected(config: TrainConfig) -> str:
    """Say in a few words what was injected into a run."""
    injected = [
        f"step time {config.step_time:g} s" if config.step_time is not None else "",
        f"straggler {config.straggler}" if config.straggler != "none" else "",
        f"network {config.network}" if config.network != "none" else "",
    ]
    return ", ".join(filter(None, injected)) or "nothing"


def describe_compression(config: TrainConfig) -> str:
    """Say in a bracket how contributions travel; nothing if they travel as they are."""
    return "" if config.compression == "none" else f" (compressed: {config.compression})"


def verdict(comparison: Comparison) -> str:
    """Say which rule came first, and plainly so where that is BSP."""
    medians: dict[str, float] = {}
    for rule in comparison.config.rules:
        seconds = [row.seconds_to_target for row in comparison.of(rule)]
        known = [value for value in seconds if value is not None]
        if known and len(known) == len(seconds):
            medians[rule] = statistics.median(known)
    target = f"{comparison.config.base.target:g}"
    if not medians:
        return f"No rule reached {target} in all of its runs."
    first = min(medians, key=lambda rule: medians[rule])
    if "bsp" not in comparison.config.rules:
        return f"First at {target}: {first}, after {medians[first]:.1f} s (there is no BSP to compare with)."
    if first == "bsp":
        return f"Plain BSP was first at {target}, after {medians[first]:.1f} s: no other rule helped here."
    if "bsp" not in medians:
        return (
            f"First at {target}: {first}, after {medians[first]:.1f} s; plain BSP did not reach it in all of its runs."
        )
    return f"First at {target}: {first}, after {medians[first]:.1f} s; plain BSP took {medians['bsp']:.1f} s."


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, what it says, and what it rests on."""
    config = comparison.config
    console.print(table(comparison))
    console.print(verdict(comparison), highlight=False)
    console.print(f"Injected: {describe_injected(config.base)}.", highlight=False)
    if len(config.lr_grid) > 1:
        grid = ", ".join(f"{lr:g}" for lr in config.lr_grid)
        edge = "; * at its edge, a rate beyond may be better" if any(one.at_edge for one in comparison.tuned) else ""
        console.print(
            f"The lr of each rule was tuned by itself on virtual ranks with other seeds (grid {grid}{edge}).",
            highlight=False,
        )
    else:
        console.print(
            "All rules ran at the one lr that was given; a fair comparison tunes it for each rule.", highlight=False
        )
    if comparison.interrupted:
        console.print("Interrupted: some runs are missing or cut short.", style="yellow")
    console.print(f"Everything is in {comparison.folder}", highlight=False, soft_wrap=True)


def _where(run: Run) -> str:
    """On a Dask cluster, the hosts."""
    hosts = dict.fromkeys(run.facts.get("hosts", ()))
    return f", on Dask workers of {', '.join(hosts)}" if hosts else ""


def _cluster(run: Run) -> str:
    return f" --cluster {run.facts['cluster']}" if run.facts.get("cluster") else ""


def _staleness(run: Run) -> list[tuple[str, str]]:
    """On a parameter server, how stale its updates were."""
    if "updates" not in run.facts:
        return []
    staleness = run.steps["staleness"]
    return [
        ("updates", str(run.facts["updates"])),
        ("staleness", f"{staleness.median():.0f} updates in the median, at most {staleness.max()}"),
    ]


def _blocks(config: TrainConfig) -> bool:
    """Whether ranks meet at barriers with nothing in flight."""
    rule = config.parsed_rule()
    return rule.averages if isinstance(rule, Policy) else rule.most_in_flight == 0


def print_run(run: Run, folder: str, console: Console) -> None:
    """Print one run in a few lines."""
    summary, config = run.summary, run.config
    reached = "not reached" if summary.seconds_to_target is None else f"after {summary.seconds_to_target:.1f} s"
    lines = Table.grid(padding=(0, 2))
    for key, value in (
        ("rule", f"{config.rule}, lr {config.lr:g} ({config.lr_source})"),
        ("ranks", f"{run.facts['ranks']} ({run.facts['ring']}){_where(run)}"),
        ("injected", describe_injected(config)),
        ("final accuracy", f"{summary.final_accuracy:.3f}"),
        (f"accuracy {config.target:g}", reached),
        (
            "steps",
            f"{summary.steps} of all ranks, {summary.steps_per_second:.1f}/s, {summary.limit_share:.2f} of the no-wait limit",
        ),
        ("wait by rank", " ".join(f"{share:.0%}" for share in summary.wait_share)),
        ("idle by rank", " ".join(f"{share:.0%}" for share in summary.idle_share)),
        ("rounds", f"{summary.rounds}, {summary.nbytes / 1e6:.1f} MB{describe_compression(config)}"),
        *_staleness(run),
        (
            "longest window",
            f"{summary.longest_window_steps} local step{'' if summary.longest_window_steps == 1 else 's'}, "
            f"{summary.longest_window:.1f} of the slowest rank's steps",
        ),
        ("run", folder),
    ):
        lines.add_row(key, value)
    console.print(lines, highlight=False)
    if _blocks(config) and summary.limit_share > _NOTHING_TO_GAIN and len(summary.wait_share) > 1:
        console.print(
            f"Ranks hardly waited: no rule could have made this more than {1 / summary.limit_share:.2f} times faster.",
            highlight=False,
        )
    if summary.interrupted:
        console.print("Interrupted: this run was cut short.", style="yellow")
        if (Path(folder) / "checkpoint").is_dir():
            command = "run" if run.facts.get("launcher") == "dask" else "train"
            console.print(
                f"Go on with: slackring {command}{_cluster(run)} --resume {folder}", highlight=False, soft_wrap=True
            )
