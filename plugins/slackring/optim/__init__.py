"""The optimizer: flat buffers, windows, rounds; and an optimizer of the papers to put under it."""

from slackring.optim.dual_averaging import DualAveraging

__all__ = ["DualAveraging"]
