"""The optimizer: flat buffers, windows, rounds; and an optimizer of the papers to put under it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slackring.optim.dual_averaging import DualAveraging

__all__ = ["DualAveraging"]


def __getattr__(name: str) -> Any:
    # Ranks that wait for their first call, and rules, use modules of this package that need no torch.
    if name == "DualAveraging":
        from slackring.optim.dual_averaging import DualAveraging

        return DualAveraging
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
