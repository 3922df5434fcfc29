"""What a study found: sentences computed from its runs, in Markdown for a notebook. Medians over seeds, and ranges."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from slackring.lab.comparison import Comparison, Row
from slackring.lab.runs import Run
from slackring.lab.windows import batches, by_rank, idle_share, windows

__all__ = ["batch_finding", "finding", "idle_finding", "sweep_finding", "window_finding"]

Measure = Callable[[Row], float | None]


def finding(comparison: Comparison, rule: str) -> str:
    """Say how a rule fared beside plain BSP and the other rules of a comparison.

    Parameters
    ----------
    comparison
        With `rule` among its rules.
    rule
        Its text.

    Returns
    -------
    str
        When it and BSP reached the target and who was faster, when the others did, who came first, and their steps and
        accuracy.
    """
    rules, target = comparison.config.rules, f"{comparison.config.base.target:g}"
    own = comparison.of(rule)
    bsp = comparison.of("bsp") if rule != "bsp" else []
    lines = [f"**`{rule}` reached {target} {_when(own)}" + (_beside_bsp(own, bsp) if bsp else "") + ".**"]
    others = [f"`{other}` {_when(comparison.of(other))}" for other in rules if other not in (rule, "bsp")]
    if others:
        lines.append(f"The others: {', '.join(others)}.")
    medians = {other: median for other in rules if (median := _median_seconds(comparison.of(other))) is not None}
    first = min(medians, key=lambda other: medians[other], default=None)
    if first not in (None, rule, "bsp"):
        lines.append(f"First of all was `{first}`.")
    beside = [(_spread(some, _limit_share), _spread(some, _accuracy)) for some in (own, bsp) if some]
    limits, accuracies = ("; BSP: ".join(found) for found in zip(*beside, strict=True))
    lines.append(f"Share of the no-wait limit: {limits}.")
    lines.append(f"Accuracy after {comparison.equal_samples:,.0f} samples: {accuracies}.")
    if len(comparison.config.lr_grid) == 1:
        lines.append("All rules ran at one learning rate, which favours some: a fair comparison tunes it for each.")
    return " ".join(lines)


def sweep_finding(rows: Mapping[str, Sequence[Row]], option: str, target: float) -> str:
    """Say what a swept option changes.

    Parameters
    ----------
    rows
        Rows by the option's value.
    option
        Its name.
    target
        The accuracy that was timed.

    Returns
    -------
    str
        Where the target was reached first and last, which values cannot be told from the first, and how the share of the
        no-wait limit and the accuracy at equal samples vary.
    """
    medians = {value: median for value, some in rows.items() if (median := _median_seconds(some)) is not None}
    missed = [f"{_when(some)} with {option}={value}" for value, some in rows.items() if value not in medians]
    if medians:
        first, last = min(medians, key=lambda value: medians[value]), max(medians, key=lambda value: medians[value])
        text = f"**{target:g} was reached first with {option}={first}, {_when(rows[first])}"
        text += f", and last with {option}={last}, {_when(rows[last])}.**" if last != first else ".**"
        near = [value for value in medians if value != first and _overlap(rows[value], rows[first])]
        if near:
            text += f" Its range overlaps that of {option}={_listed(near)}, so that chance may decide between them."
    else:
        text = f"**No value of {option} reached {target:g} in all of its runs.**"
    if missed:
        text += f" It was reached {_listed(missed)}."
    for name, measure in (
        ("share of the no-wait limit", _limit_share),
        ("accuracy at equal samples", _accuracy),
    ):
        ends = {
            value: statistics.median(known)
            for value, some in rows.items()
            if (known := [found for row in some if (found := measure(row)) is not None])
        }
        if len(ends) > 1:
            low, high = min(ends, key=lambda value: ends[value]), max(ends, key=lambda value: ends[value])
            text += (
                f" The {name} went from {ends[low]:.3f} ({option}={low}) to {ends[high]:.3f} ({option}={high})."
                if f"{ends[low]:.3f}" != f"{ends[high]:.3f}"
                else f" The {name} was {ends[low]:.3f} with every value."
            )
    return text


def window_finding(run: Run) -> str:
    """Say how long the windows of each rank were, and on how old a model they were computed."""
    table = by_rank(run)
    stale = windows(run)["staleness"]
    return (
        f"With `{run.config.rule}`, ranks 0 to {len(table) - 1} took "
        f"{_listed([f'{steps:g}' for steps in table['local steps a window']])} local steps in a window (medians; at most "
        f"{table['most'].max()}), at a staleness of {stale.median():g} (at most {stale.max():g}), and were blocked for "
        f"{_listed(table['idle'])} of the time."
    )


def batch_finding(runs: Mapping[str, Run]) -> str:
    """Say how many samples each rule's updates averaged, one run a rule."""
    parts = []
    for rule, run in runs.items():
        sizes = batches(run)
        spread = f"standard deviation {sizes.std(ddof=0):.0f}, {sizes.min():.0f} to {sizes.max():.0f}"
        parts.append(
            f"`{rule}` {sizes.mean():.0f} ({spread if sizes.nunique() > 1 else 'always'}), {len(sizes)} updates"
        )
    return f"Samples in an update: {'; '.join(parts)}."


def idle_finding(runs: Mapping[str, Run], option: str) -> str:
    """Say which share of their time ranks were blocked at each value of an option, and how stale their gradients were."""
    parts = []
    for value, run in runs.items():
        shares, stale = idle_share(run), windows(run)["staleness"]
        parts.append(
            f"{sum(shares) / len(shares):.0%} with {option}={value} (gradients {stale.median():g} averages old)"
        )
    return f"Ranks were blocked for {_listed(parts)} of the time."


def _limit_share(row: Row) -> float | None:
    return row.limit_share


def _accuracy(row: Row) -> float | None:
    return row.accuracy_at_equal_samples


def _seconds(rows: Sequence[Row]) -> list[float]:
    return sorted(row.seconds_to_target for row in rows if row.seconds_to_target is not None)


def _median_seconds(rows: Sequence[Row]) -> float | None:
    """None unless all runs reached the target: a median of those that did flatters."""
    seconds = _seconds(rows)
    return statistics.median(seconds) if seconds and len(seconds) == len(rows) else None


def _when(rows: Sequence[Row]) -> str:
    seconds = _seconds(rows)
    if len(seconds) < len(rows):
        return (
            f"in {f'only {len(seconds)}' if seconds else 'none'} of {len(rows)} runs" if len(rows) > 1 else "not at all"
        )
    return f"after {_range(seconds, '{:.1f}'.format, ' s')}"


def _beside_bsp(own: Sequence[Row], bsp: Sequence[Row]) -> str:
    mine, theirs = _median_seconds(own), _median_seconds(bsp)
    text = f", plain BSP {_when(bsp)}"
    if theirs is None:
        return text
    if mine is None:
        return f"{text}: plain BSP was faster"
    verdict = "plain BSP was faster" if theirs < mine else f"{mine / theirs:.2f} of its time"
    return f"{text}: {verdict}{', though the ranges overlap' if _overlap(own, bsp) else ''}"


def _overlap(some: Sequence[Row], others: Sequence[Row]) -> bool:
    ours, theirs = _seconds(some), _seconds(others)
    return ours[0] <= theirs[-1] and theirs[0] <= ours[-1]


def _spread(rows: Sequence[Row], measure: Measure) -> str:
    known = sorted(value for row in rows if (value := measure(row)) is not None)
    return _range(known, "{:.3f}".format) if known else "unknown"


def _range(known: Sequence[float], write: Callable[[float], str], unit: str = "") -> str:
    low, high = write(known[0]), write(known[-1])
    return f"{write(statistics.median(known))}{unit}" + (f" ({low} to {high})" if low != high else "")


def _listed(items: Iterable[str]) -> str:
    """The texts as a list in a sentence."""
    texts = list(items)
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
