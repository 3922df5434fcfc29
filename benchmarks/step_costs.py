"""What Slackring costs a step: three figures, beside the most that each may be.

    horovodrun --gloo -np 2 python benchmarks/step_costs.py

1. A delta rule's local step that closes no window: the time that it adds to the plain optimizer's step.
2. A gradient rule's local step inside a window, over one ``torch._foreach_add_`` of the gradients. Beside that addition the step
   collects the gradients, reads the clock and asks the rule whether the window closes, which does not grow with the model.
3. ``bsp`` over ``hvd.DistributedOptimizer``, on parameters with the shapes of ResNet-18 (62 tensors, 11.7 million floats). The
   backward pass is synthetic: each gradient takes its share of `--compute` seconds of matrix products.

What is compared takes turns, on the same memory where it can, so that whatever else the machine does hits both alike; the
medians are of differences or ratios of neighbours, and the middle half of these is printed beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import slackring as sr
from slackring.optim.flat import FlatSpace

SIZES = (1_000_000, 10_000_000)
TENSORS = 20  # that share a size's parameters
DELTA_RULES = ("local_sgd:steps=1000000", "losp:k_min=1000000,k_max=1000000")
GRADIENT_RULE = "bsp:accumulate=1000000"
MOST_ADDED, MOST_OVER_ADDITION, MOST_OVER_HOROVOD = 25e-6, 1.15, 1.05


@dataclass(frozen=True)
class Figure:
    """What was found; `median`, `low` and `high` (quartiles) in seconds or as a ratio, as `what` says."""

    what: str
    rule: str
    parameters: int
    backward_seconds: float
    seconds: float
    reference_seconds: float
    median: float
    low: float
    high: float
    most: float


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def pairs(one: Callable[[], float], other: Callable[[], float], repetitions: int) -> list[tuple[float, float]]:
    """Seconds of two pieces of work, which take turns at being first."""
    found = []
    for number in range(repetitions):
        if number % 2:
            mine, theirs = one(), other()
        else:
            theirs, mine = other(), one()
        found.append((mine, theirs))
    return found


def figure(
    what: str,
    rule: str,
    parameters: int,
    found: Sequence[tuple[float, float]],
    most: float,
    backward_seconds: float = 0.0,
) -> Figure:
    """Differences (if `what` is about seconds) or ratios of neighbours."""
    values = [one - other if "seconds" in what else one / other for one, other in found]
    low, median, high = statistics.quantiles(values, n=4)
    seconds, reference = (statistics.median(column) for column in zip(*found, strict=True))
    return Figure(what, rule, parameters, backward_seconds, seconds, reference, median, low, high, most)


# -- local steps -----------------------------------------------------------------------------------------------------------


def make_parameters(size: int) -> list[nn.Parameter]:
    """`size` numbers, with gradients."""
    parameters = [nn.Parameter(torch.zeros(size // TENSORS)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return parameters


def delta_step(rule: str, size: int, repetitions: int) -> Figure:
    """What a delta rule's local step adds to the plain one, on the same parameters and momentum."""
    parameters = make_parameters(size)
    plain, ruled = (torch.optim.SGD(parameters, lr=1e-3, momentum=0.9) for _ in range(2))
    optimizer = sr.DistributedOptimizer(ruled, rule)
    optimizer.step()
    plain.state = optimizer.state

    def plain_step() -> float:
        # The optimizer would refuse to go on from parameters that something else has changed.
        with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):
            return timed(plain.step)

    found = pairs(partial(timed, optimizer.step), plain_step, repetitions)
    optimizer.join()
    return figure("seconds added to a local step", rule, size, found, MOST_ADDED)


def gradient_step(size: int, repetitions: int) -> Figure:
    """A gradient rule's local step inside a window, over an addition of the gradients to a flat buffer."""
    parameters = make_parameters(size)
    optimizer = sr.DistributedOptimizer(torch.optim.SGD(parameters, lr=1e-3), GRADIENT_RULE)
    for _ in range(3):
        optimizer.step()  # the first one copies, and the second one weighs what was copied
    sums = FlatSpace(parameters).new().views
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    addition = partial(timed, lambda: torch._foreach_add_(sums, grads, alpha=1.0))
    found = pairs(partial(timed, optimizer.step), addition, repetitions)
    optimizer.join()
    return figure("a local step over an addition", GRADIENT_RULE, size, found, MOST_OVER_ADDITION)


# -- synchronous steps -----------------------------------------------------------------------------------------------------


def resnet18_shapes() -> list[tuple[int, ...]]:
    """Shapes of ResNet-18's parameters, from the input to the output."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, channels, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and width != 64:
                shapes += [(width, channels, 1, 1), (width,), (width,)]
            channels = width
    return [*shapes, (1000, 512), (1000,)]


class _Gradient(torch.autograd.Function):
    """Depends on a parameter; its gradient is a given tensor, and costs `products` matrix products."""

    @staticmethod
    def forward(ctx, before, parameter, gradient, matrix, products):  # type: ignore[no-untyped-def]
        ctx.work = gradient, matrix, products
        return before.clone()

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        gradient, matrix, products = ctx.work
        for _ in range(products):
            torch.mm(matrix, matrix)
        return upstream, gradient.clone(), None, None, None


class Trainee:
    """A list of parameters, and an optimizer for them."""

    def __init__(
        self, shapes: list[tuple[int, ...]], wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        self.gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        self.optimizer = wrap(torch.optim.SGD(self.parameters, lr=1e-3, momentum=0.9))

    def step(self, matrix: Tensor, products: list[int]) -> float:
        """Seconds of a backward pass and a step."""
        loss = torch.zeros((), requires_grad=True)
        for parameter, gradient, count in zip(self.parameters, self.gradients, products, strict=True):
            loss = _Gradient.apply(loss, parameter, gradient, matrix, count)
        self.optimizer.zero_grad()

        def work() -> None:
            loss.backward()
            self.optimizer.step()

        return timed(work)


def bsp_steps(computes: Sequence[float], steps: int) -> list[Figure]:
    """``bsp`` over Horovod's own optimizer, for each length of the backward pass."""
    shapes = resnet18_shapes()
    theirs = Trainee(shapes, lambda optimizer: hvd.DistributedOptimizer(optimizer, names_of(optimizer)))
    mine = Trainee(shapes, lambda optimizer: sr.DistributedOptimizer(optimizer, "bsp"))
    matrix = torch.randn(192, 192)
    cost = statistics.median(timed(lambda: torch.mm(matrix, matrix)) for _ in range(200))

    def slowest(trainee: Trainee, products: Sequence[int]) -> float:
        # A step takes as long as it takes the slowest rank.
        hvd.allreduce(torch.zeros(1), name="aligned")
        return float(hvd.allreduce(torch.tensor([trainee.step(matrix, products)]), op=hvd.Max, name="slowest"))

    figures = []
    for compute in computes:
        # Rank 0 decides, since a machine's cores may differ.
        total = int(hvd.broadcast(torch.tensor(compute / cost), 0))
        products = [round(total / len(shapes))] * len(shapes)
        found = pairs(partial(slowest, mine, products), partial(slowest, theirs, products), steps + 5)[5:]
        size = sum(parameter.numel() for parameter in mine.parameters)
        figures.append(figure("a step over Horovod's", "bsp", size, found, MOST_OVER_HOROVOD, compute))
    mine.optimizer.join()  # type: ignore[attr-defined]
    return figures


def names_of(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Names as Horovod wants them."""
    return [(f"parameter.{index}", parameter) for index, parameter in enumerate(optimizer.param_groups[0]["params"])]


# -- results ---------------------------------------------------------------------------------------------------------------


def table(figures: Sequence[Figure]) -> str:
    """The results as text."""
    columns = "{:<30}{:<33}{:>11}{:>10}{:>12}{:>12}{:>9}{:>17}{:>7}"
    lines = [columns.format("", "rule", "parameters", "backward", "step", "reference", "median", "middle half", "most")]
    for found in figures:
        unit, digits = (1e6, 0) if "seconds" in found.what else (1.0, 3)
        median, low, high, most = (
            f"{value * unit:.{digits}f}" for value in (found.median, found.low, found.high, found.most)
        )
        lines.append(
            columns.format(
                found.what.replace("seconds", "us"),
                found.rule,
                f"{found.parameters:,}",
                f"{found.backward_seconds * 1e3:.0f} ms",
                f"{found.seconds * 1e6:.0f} us",
                f"{found.reference_seconds * 1e6:.0f} us",
                median,
                f"{low} - {high}",
                most,
            )
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all three, and print them on rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compute", type=float, nargs="+", default=[0.0, 0.1], help="seconds of the backward pass")
    parser.add_argument("--steps", type=int, default=40, help="synchronous steps of each optimizer")
    parser.add_argument("--repetitions", type=int, default=300, help="local steps of each kind")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    figures = bsp_steps(arguments.compute, arguments.steps)
    # The other ranks wait in join(), asleep, while rank 0 measures; two values have quartiles.
    repetitions = arguments.repetitions if hvd.rank() == 0 else 2
    for size in SIZES:
        figures += [delta_step(rule, size, repetitions) for rule in DELTA_RULES]
        figures.append(gradient_step(size, repetitions))
    if hvd.rank() == 0:
        print(json.dumps([asdict(found) for found in figures], indent=1) if arguments.json else table(figures))


if __name__ == "__main__":
    main()
