"""What a step costs: ``bsp`` against ``hvd.DistributedOptimizer``, and a local step that closes no window.

    horovodrun --gloo -np 2 python benchmarks/bsp_step.py

The parameters have the shapes of ResNet-18 (62 tensors, 11.7 million floats). The backward pass is synthetic: each gradient
takes its share of `--compute` seconds of matrix products. The two optimizers take turns, step by step, so that whatever
else the machine does hits both alike; the table gives medians over steps and the middle half of all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import slackring as sr


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
        start = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def compare_with_horovod(computes: list[float], steps: int) -> None:
    """Print seconds per step of both optimizers, for each length of the backward pass."""
    shapes = resnet18_shapes()
    trainees = {
        "hvd.DistributedOptimizer": Trainee(
            shapes, lambda optimizer: hvd.DistributedOptimizer(optimizer, gradient_names(optimizer))
        ),
        "slackring bsp": Trainee(shapes, lambda optimizer: sr.DistributedOptimizer(optimizer, "bsp")),
    }
    matrix = torch.randn(192, 192)
    start = time.perf_counter()
    for _ in range(200):
        torch.mm(matrix, matrix)
    cost = (time.perf_counter() - start) / 200
    sizes = [parameter.numel() for parameter in trainees["slackring bsp"].parameters]
    if hvd.rank() == 0:
        print(f"\n{hvd.size()} ranks, {sum(sizes):,} parameters in {len(sizes)} tensors, medians of {steps} steps")
        print(f"{'backward computes':>18} {'':<26}{'step':>10}{'middle half':>22}{'ratio':>8}")
    for compute in computes:
        # Rank 0 decides, since a machine's cores may differ.
        total = int(hvd.broadcast(torch.tensor(compute / cost), 0))
        products = [round(total / len(sizes))] * len(sizes)
        taken: dict[str, list[float]] = {name: [] for name in trainees}
        for step in range(steps + 5):
            for name in sorted(trainees, reverse=bool(step % 2)):
                hvd.allreduce(torch.zeros(1), name="aligned")
                seconds = trainees[name].step(matrix, products)
                # A step takes as long as it takes the slowest rank.
                slowest = float(hvd.allreduce(torch.tensor([seconds]), op=hvd.Max, name="slowest"))
                if step >= 5:
                    taken[name].append(slowest)
        reference = statistics.median(taken["hvd.DistributedOptimizer"])
        for name, seconds_of in taken.items():
            low, median, high = statistics.quantiles(seconds_of, n=4)
            if hvd.rank() == 0:
                print(
                    f"{compute * 1e3:15.0f} ms {name:<26}{median * 1e3:7.1f} ms{low * 1e3:11.1f} - {high * 1e3:5.1f} ms"
                    f"{median / reference:8.3f}"
                )
    trainees["slackring bsp"].optimizer.join()  # type: ignore[attr-defined]


def gradient_names(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Names as Horovod wants them."""
    return [(f"parameter.{index}", parameter) for index, parameter in enumerate(optimizer.param_groups[0]["params"])]


def local_steps(sizes: list[int], steps: int) -> None:
    """Print what a local step that closes no window adds to the plain optimizer's, on this rank alone."""
    if hvd.rank() == 0:
        print(f"\nlocal steps that close no window, medians of {steps}")
        print(f"{'parameters':>18} {'':<26}{'step':>10}{'added':>14}")
    for size in sizes:
        shapes = [(size // 20,)] * 20
        rules = {"plain SGD": None, "local_sgd": "local_sgd:steps=1000000", "losp": "losp:k_min=1000000,k_max=1000000"}
        trainees = {
            name: Trainee(
                shapes, lambda optimizer, rule=rule: sr.DistributedOptimizer(optimizer, rule) if rule else optimizer
            )  # type: ignore[misc]
            for name, rule in rules.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in trainees}
        for trainee in trainees.values():
            for parameter, gradient in zip(trainee.parameters, trainee.gradients, strict=True):
                parameter.grad = gradient
            trainee.optimizer.step()
        if hvd.rank() == 0:
            for _ in range(steps):
                for name, trainee in trainees.items():
                    start = time.perf_counter()
                    trainee.optimizer.step()
                    taken[name].append(time.perf_counter() - start)
            plain = statistics.median(taken["plain SGD"])
            for name, seconds in taken.items():
                median = statistics.median(seconds)
                print(f"{size:18,} {name:<26}{median * 1e6:7.0f} us{(median - plain) * 1e6:11.0f} us")
        for name, trainee in trainees.items():
            if rules[name]:
                trainee.optimizer.join()  # type: ignore[attr-defined]


def main() -> None:
    """Run both comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compute", type=float, nargs="+", default=[0.0, 0.1], help="seconds of the backward pass")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    compare_with_horovod(arguments.compute, arguments.steps)
    local_steps([1_000_000, 10_000_000], 200)


if __name__ == "__main__":
    main()
