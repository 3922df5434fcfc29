"""What a round costs on a network."""

from __future__ import annotations

from dataclasses import dataclass

from slackring.errors import SpecError
from slackring.spec import parse_options, render

__all__ = ["Network", "parse_network"]


@dataclass(frozen=True)
class Network:
    """A network that all ranks share, as a ring all-reduce sees it.

    Parameters
    ----------
    latency
        Seconds a round takes however small it is.
    bandwidth
        Bytes per second of each rank's link; infinite by default.

    Examples
    --------
    >>> Network(latency=0.001, bandwidth=1e9).seconds(nbytes=4_000_000, size=4)
    0.007
    """

    latency: float = 0.0
    bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        if not 0 <= self.latency < float("inf"):
            raise SpecError(f"network: latency is a time in seconds, 0 or more, not {self.latency}.")
        if not self.bandwidth > 0:
            raise SpecError(f"network: bandwidth is in bytes per second and above 0, not {self.bandwidth}.")

    def seconds(self, nbytes: int, size: int) -> float:
        """Seconds for a ring all-reduce over `size` ranks: ``latency + 2 (size - 1) / size * nbytes / bandwidth``."""
        return self.latency + 2 * (size - 1) / size * nbytes / self.bandwidth

    def __str__(self) -> str:
        """The text that :func:`parse_network` reads back."""
        return render("network", self).removeprefix("network").removeprefix(":") or "none"


def parse_network(text: str) -> Network | None:
    """Read ``latency=0.01,bandwidth=1e9``; ``none`` is no injected network.

    Examples
    --------
    >>> parse_network("latency=0.01")
    Network(latency=0.01, bandwidth=inf)
    """
    if text.strip().lower() in ("", "none"):
        return None
    return parse_options(text, Network, what="network")
