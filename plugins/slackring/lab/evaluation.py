"""How good a model is on the evaluation batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from slackring.lab.records import CurvePoint
from slackring.lab.tasks import Batches, Task
from slackring.optim.progress import Progress

__all__ = ["evaluate"]


def evaluate(task: Task, model: nn.Module, test: Batches, seconds: float, progress: Progress) -> CurvePoint:
    """Evaluate a model.

    Parameters
    ----------
    task
        Its loss and metric.
    model
        What to evaluate.
    test
        On which batches.
    seconds, progress
        When, and what the model has been trained on.
    """
    accuracy = task.metric(model, test)
    loss = _mean_loss(model, test, task.loss)
    return CurvePoint(seconds, progress.rounds, progress.steps, progress.samples, loss, accuracy)


@torch.no_grad()
def _mean_loss(model: nn.Module, batches: Batches, loss_of: Callable[[Tensor, Tensor], Tensor]) -> float:
    training = model.training
    model.eval()
    total = samples = 0.0
    for x, y in batches:
        total += float(loss_of(model(x), y)) * len(y)
        samples += len(y)
    model.train(training)
    return total / max(samples, 1)
