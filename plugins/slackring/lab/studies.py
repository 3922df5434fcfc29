"""What the notebooks of the papers compare and sweep, at three sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from slackring.errors import SpecError
from slackring.lab.choices import parse_choices
from slackring.lab.comparison import CompareConfig, Comparison, Row
from slackring.lab.config import TrainConfig
from slackring.spec import nearest

__all__ = ["STUDIES", "Study", "Sweep", "study", "with_options"]

_ALWAYS_SLOW = "persistent:ranks=2+3,factor=1.3+4"
_DRAWN = "shifted_exponential:mean=1.5"


class Sweep(NamedTuple):
    """One option of a rule at several values; always on virtual ranks.

    Attributes
    ----------
    option
        What is swept.
    rules
        The rule's text by the option's value.
    config
        What to compare.
    """

    option: str
    rules: dict[str, str]
    config: CompareConfig

    def rows(self, comparison: Comparison) -> dict[str, list[Row]]:
        """Rows of a comparison by the option's value."""
        return {value: comparison.of(rule) for value, rule in self.rules.items()}


@dataclasses.dataclass(frozen=True)
class Study:
    """A rule, what it is compared with, and in which setting; lists are texts, joined by commas, as in a notebook's parameters.

    Parameters
    ----------
    rule, baselines
        The paper's rule, and the others. The first baseline is plain BSP.
    values
        What :meth:`sweep` sweeps an option over.
    on_server
        Policies of the parameter server to compare with.
    communication_time
        Seconds that a round takes where this is injected.
    changing
        A straggler under which speeds change from step to step.
    task, workers, straggler, network, step_time, batch_size, momentum, seconds, target
        As in :class:`slackring.lab.config.TrainConfig`.
    lr_grid, tuning_runs, seeds
        As in :class:`slackring.lab.comparison.CompareConfig`.
    """

    rule: str
    baselines: str
    values: Mapping[str, str]
    on_server: str = ""
    communication_time: float = 0.0
    changing: str = _DRAWN
    task: str = "mnist5k"
    workers: int = 4
    straggler: str = _ALWAYS_SLOW
    network: str = "none"
    step_time: float = 0.1
    batch_size: int = 32
    momentum: float = 0.0
    lr_grid: str = "0.1,0.2,0.4,0.8,1.6,3.2"
    tuning_runs: int = 2
    seeds: str = "0,1,2"
    seconds: float = 20.0
    target: float = 0.86

    def comparison(self, rules: str = "", *, virtual: bool = True) -> CompareConfig:
        """Say what to compare: `rules`, or the baselines and the paper's rule."""
        return CompareConfig(
            TrainConfig(
                task=self.task,
                straggler=self.straggler,
                network=self.network,
                step_time=self.step_time,
                batch_size=self.batch_size,
                momentum=self.momentum,
                seconds=self.seconds,
                target=self.target,
            ),
            rules=tuple(map(str, parse_choices(rules or f"{self.baselines},{self.rule}"))),
            workers=self.workers,
            lr_grid=tuple(map(float, self.lr_grid.split(","))),
            seeds=tuple(map(int, self.seeds.split(","))),
            tuning_runs=self.tuning_runs,
            virtual=virtual,
        )

    def sweep(self, option: str, values: str = "", *, beside: str = "bsp", **others: object) -> Sweep:
        """Sweep an option of the paper's rule.

        Parameters
        ----------
        option
            Its name.
        values
            Joined by commas; the study's own if empty.
        beside
            Rules that run as well; may be empty.
        **others
            Other options of the rule, the same at all values.

        Examples
        --------
        >>> study("losp", "smoke").sweep("compensation", "0,1,auto", k_max=16).rules
        {'0': 'losp:k_max=16,compensation=0.0', '1': 'losp:k_max=16,compensation=1.0', 'auto': 'losp:k_max=16,compensation=auto'}
        """
        texts = [value.strip() for value in (values or self.values[option]).split(",")]
        rules = {value: with_options(self.rule, **{**others, option: value}) for value in texts}
        return Sweep(option, rules, self.comparison(",".join(filter(None, (beside, *rules.values())))))


def with_options(rule: str, **options: object) -> str:
    """Set options of a rule's text, others of which stay.

    Examples
    --------
    >>> with_options("losp:k_max=16,compensation=0.5", compensation=1)
    'losp:k_max=16,compensation=1.0'
    """
    name, _, rest = rule.partition(":")
    kept = [part for part in rest.split(",") if part and part.partition("=")[0].strip() not in options]
    (parsed,) = parse_choices(f"{name}:{','.join((*kept, *(f'{key}={value}' for key, value in options.items())))}")
    return str(parsed)


def _sizes(laptop: Study, smoke: Mapping[str, Any], paper: Mapping[str, Any]) -> Mapping[str, Study]:
    small = {
        "task": "digits",
        "lr_grid": "0.8",  # one rate is not tuned
        "seeds": "0",
        "seconds": 5.0,
        "target": 0.7,
    }
    large = {"tuning_runs": 3, "seeds": "0,1,2,3,4", "seconds": 60.0, "target": 0.9}
    return MappingProxyType(
        {
            "smoke": dataclasses.replace(laptop, **{**small, **smoke}),
            "laptop": laptop,
            "paper": dataclasses.replace(laptop, **{**large, **paper}),
        }
    )


STUDIES: Mapping[str, Mapping[str, Study]] = MappingProxyType(
    {
        "elastic_bsp": _sizes(
            Study(
                rule="elastic_bsp:lookahead=15",
                baselines="bsp,local_sgd:steps=4",
                values={"lookahead": "1,5,15,60"},
                on_server="server/bsp,server/asp,server/ssp:staleness=3,server/elastic_bsp:lookahead=15",
            ),
            smoke={"values": {"lookahead": "1,15"}, "on_server": "server/bsp,server/elastic_bsp:lookahead=15"},
            # The paper's four machines were equal; some jitter stands for what is left then.
            paper={"values": {"lookahead": "15,30,60,120,240"}, "straggler": "shifted_exponential:mean=0.1"},
        ),
        "anytime": _sizes(
            # A window is a little longer than a step of the slowest rank: at 0.4 s, real ranks would just miss its end.
            Study(
                rule="anytime:compute_time=0.42",
                baselines="bsp,bsp:accumulate=3,local_sgd:steps=4",
                values={"compute_time": "0.21,0.42,0.84,1.68", "staleness": "0,1,2,auto"},
                communication_time=0.42,
                seconds=30.0,
                target=0.82,
            ),
            smoke={"baselines": "bsp,bsp:accumulate=3", "values": {"compute_time": "0.42,0.84", "staleness": "0,1"}},
            # Ten workers, 60 samples in 2.5 s on average, and a round trip of 10 s: four windows.
            paper={
                "rule": "anytime:compute_time=2.5",
                "baselines": "bsp,bsp:accumulate=10,local_sgd:steps=10",
                "values": {"compute_time": "1.25,2.5,5", "staleness": "0,1,2,4,auto"},
                "communication_time": 10.0,
                "straggler": _DRAWN,
                "workers": 10,
                "batch_size": 6,
                "seconds": 600.0,
            },
        ),
        "losp": _sizes(
            Study(
                rule="losp",
                baselines="bsp,local_sgd:steps=4,relaxed:steps=4,staleness=1,osp",
                values={"compensation": "0,0.5,0.75,1,1.5,auto"},
            ),
            smoke={"values": {"compensation": "0,auto"}},
            paper={"rule": "losp:k_max=256", "workers": 8, "network": "latency=0.02,bandwidth=1e7"},
        ),
    }
)
"""By name and size; ``laptop`` is the default of the notebooks, ``paper`` the nearest to the paper's own setting."""


def study(name: str, size: str, **given: Any) -> Study:
    """Take a study at a size, and change what is given.

    Parameters
    ----------
    name
        A key of :data:`STUDIES`.
    size
        ``"smoke"`` (seconds), ``"laptop"`` (minutes) or ``"paper"``.
    **given
        Fields of :class:`Study`; what is empty or 0 is as the size has it.

    Raises
    ------
    SpecError
        For an unknown size.

    Examples
    --------
    >>> changed = study("losp", "smoke", workers=2, seconds=0.0, straggler="none")
    >>> changed.workers, changed.seconds, changed.straggler
    (2, 5.0, 'none')
    """
    sizes = STUDIES[name]
    if size not in sizes:
        raise SpecError(f"there is no size {size!r}; {nearest(size, sizes)}.")
    return dataclasses.replace(sizes[size], **{field: value for field, value in given.items() if value})
