"""What the user holds: their own optimizer, which now follows a rule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from slackring.errors import UnsupportedError
from slackring.optim.engine import Engine
from slackring.optim.flat import DTYPES
from slackring.optim.progress import Budget, LandedRound, Progress
from slackring.optim.records import Recorder
from slackring.optim.wire import read_compression
from slackring.ring.ambient import ring as ambient_ring
from slackring.ring.base import Ring
from slackring.rules import Rule, parse_rule

__all__ = ["DistributedOptimizer", "RelaxedOptimizer"]

_HOROVOD_ARGUMENTS = {
    "op": "the rule decides how contributions are averaged",
    "backward_passes_per_step": "use rule='bsp:accumulate=k' and call step() after every backward pass",
    "gradient_predivide_factor": "averages are divided once, after the sum",
    "num_groups": "contributions travel in flat buffers already",
    "groups": "contributions travel in flat buffers already",
    "sparse_as_dense": "build embeddings with sparse=False",
}


def DistributedOptimizer(
    optimizer: Optimizer,
    rule: Rule | str,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    named_buffers: Iterable[tuple[str, Tensor]] | None = None,
    max_grad_norm: float | None = None,
    compression: object = None,
    anchor_device: str | None = None,
    budget: Budget | None = None,
    recorder: Recorder | None = None,
    ring: Ring | None = None,
    process_set: object = None,
    **horovod_arguments: object,
) -> RelaxedOptimizer:
    """Have an optimizer follow a synchronisation rule over all ranks.

    The optimizer itself is returned, with a few methods more: its parameter groups, state, hooks and schedulers go on as
    before, whether they were made before or after this call.

    Parameters
    ----------
    optimizer
        Any optimizer that evaluates its closure once. Gradient rules (``bsp``) keep Horovod's habit of an lr times the
        number of ranks; delta rules (all others) take the lr of a single rank. Its parameters are float32, float64,
        bfloat16 or float16; those of 16 bits are averaged in float32.
    rule
        A rule or its text, such as ``"losp:k_max=64"``.
    named_parameters
        ``model.named_parameters()``, for messages; names must be unique and cover what the optimizer trains.
    named_buffers
        ``model.named_buffers()``: floating buffers (BatchNorm's statistics) are averaged over ranks.
    max_grad_norm
        Clip the gradient to this norm: the averaged one for gradient rules, each rank's own for delta rules.
    compression
        ``"fp16"`` (or ``hvd.Compression.fp16``) sends contributions as float16, scaled by a power of two that follows their
        size, so that neither small nor large ones are lost; a round that would overflow is reduced again as it is. Averaged
        buffers are not compressed. None sends everything as it is, and only then is no work lost to rounding.
    anchor_device
        Where anchors and sums lie: ``"device"`` is beside the parameters, ``"cpu"`` saves a GPU's memory (in pinned memory of
        the host, from which ``bsp`` sends in ``step()``, not during the backward pass). None is beside the parameters if the
        ring can sum there, and the CPU if not, as with a Horovod without NCCL.
    budget
        When all ranks stop by themselves.
    recorder
        Receives a row for each local step and each round.
    ring
        The ring to use instead of the ambient one.
    process_set
        The ranks that train this model: an ``hvd.ProcessSet`` under Horovod, a ``torch.distributed.ProcessGroup`` under
        ``torch.distributed``; all if None. Only they call this.

    Returns
    -------
    RelaxedOptimizer
        `optimizer`, which is an instance of its old class and of `RelaxedOptimizer` now.

    Raises
    ------
    RuleError
        For a text that names no rule.
    UnsupportedError
        For an optimizer, parameter or argument that cannot work; the message names the replacement.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule="losp:k_max=8")
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> optimizer.step(samples=4)
    >>> optimizer.drain()
    >>> optimizer.progress.samples
    4.0
    """
    for argument in horovod_arguments:
        advice = _HOROVOD_ARGUMENTS.get(argument)
        if advice is None:
            raise TypeError(f"DistributedOptimizer() got an unexpected keyword argument {argument!r}")
        raise UnsupportedError(f"{argument}= has no meaning here: {advice}.")
    _refuse_optimizer(optimizer)
    if ring is not None and process_set is not None:
        raise UnsupportedError("process_set= chooses among the ranks of the ambient ring; leave ring= out.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise UnsupportedError(f"max_grad_norm is above 0, not {max_grad_norm}.")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = _names(parameters, named_parameters)
    _refuse_dtypes(names, parameters)
    buffers = [buffer for _, buffer in named_buffers or () if buffer.dtype in DTYPES]
    chosen = ring or ambient_ring(process_set)
    engine = Engine(
        optimizer,
        parse_rule(rule),
        chosen,
        names,
        parameters,
        buffers,
        read_compression(compression),
        _buffer_device(anchor_device, [*parameters, *buffers], chosen),
        max_grad_norm,
        budget,
        recorder,
    )
    optimizer.__class__ = _relaxed(type(optimizer))
    assert isinstance(optimizer, RelaxedOptimizer)
    optimizer._engine = engine
    # Torch's scaler then hands every step over, with its scale, instead of leaving out those that overflowed on one rank.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    chosen.before_collective(_drain_if_alive(weakref.ref(optimizer)))
    return optimizer


class RelaxedOptimizer(Optimizer):
    """An optimizer that follows a rule; made by :func:`DistributedOptimizer`, never by itself.

    ``step`` is the optimizer's own, and takes ``samples=``, the samples (or tokens) in the micro-batch. Pickling or copying
    it gives a plain optimizer of its old class.
    """

    _engine: Engine
    _depth = 0  # calls of step() under way, each inside the one before

    if TYPE_CHECKING:

        def step(self, closure: Callable[[], Any] | None = None, *, samples: float | None = None) -> Any:
            """Take one local step."""

    else:

        def step(self, *args: Any, **kwargs: Any) -> Any:
            """Take one local step; inside a window of a gradient rule without the optimizer's own, which would do nothing."""
            if args or kwargs.keys() - {"samples"} or not self._engine.only_accumulates or self._has_other_hooks():
                try:
                    return super().step(*args, **kwargs)
                finally:
                    self._depth = 0
                    self._engine.restore_groups()
            self._engine.before_step(kwargs.get("samples"))
            self._engine.after_step()
            return None

        step.hooked = True  # by torch, in the class below; else it would call the hooks once more

    def _has_other_hooks(self) -> bool:
        own = len(self._optimizer_step_pre_hooks) == len(self._optimizer_step_post_hooks) == 1
        return not own or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    @property
    def rule(self) -> Rule:
        """The rule that is followed."""
        return self._engine.rule

    @property
    def progress(self) -> Progress:
        """What has landed, agreed by all ranks."""
        return self._engine.progress

    def set_samples(self, samples: float) -> None:
        """Announce the samples of the coming micro-batch before its backward pass.

        Only ``bsp`` needs it, and only to save a second reduction: it sends gradients during the backward pass, weighted by
        the samples of the micro-batch before if it is not told.
        """
        self._engine.set_samples(samples)

    def request_stop(self) -> None:
        """Have all ranks stop after the same round; ``progress.stop`` tells them."""
        self._engine.request_stop()

    def drain(self) -> None:
        """Land every round on all ranks, this rank's open window included; collective.

        Afterwards all models are the same to the bit, and collectives of one's own are safe. A rank that drains helps the
        others with empty contributions until they drain too.
        """
        self._engine.drain()

    def join(self) -> int:
        """Say that this rank is out of data, and help the others until they are too; collective.

        Returns
        -------
        int
            The rank that joined last.
        """
        return self._engine.join()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Have the last landed anchor and the averaged buffers in the model, for evaluating or saving; local.

        Its time is not counted as a step's.
        """
        with self._engine.consensus():
            yield

    def on_landed(self, callback: Callable[[LandedRound], object]) -> None:
        """Call `callback` on this rank with every round that lands from now on.

        All ranks hear of the same rounds in the same order, though not at the same time: what follows from them alone is agreed.
        The callback is called inside ``step()``, ``drain()`` or ``join()``, and must not call these itself.

        Examples
        --------
        >>> x = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = DistributedOptimizer(torch.optim.SGD([x], lr=0.1), rule="local_sgd:steps=2")
        >>> optimizer.on_landed(lambda landed: print(landed.index, landed.steps, landed.samples))
        >>> for _ in range(4):
        ...     x.grad = torch.ones(1)
        ...     optimizer.step(samples=8)
        0 (2,) (16.0,)
        1 (2,) (16.0,)
        """
        self._engine.on_landed(callback)

    def reset_anchor(self) -> None:
        """Accept parameters that were changed outside the optimizer, in the same way on every rank, after ``drain()``."""
        self._engine.reset_anchor()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own state dict, with this rank's rounds under ``"slackring"``; local.

        The dicts of all ranks, each taken after the same round, restore training exactly; rank 0's alone, loaded everywhere,
        restores the anchor. A plain optimizer loads it too.
        """
        state = super().state_dict()
        saved = self._engine.save()
        return state if saved is None else {**state, "slackring": saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain optimizer's dict; on every rank, before the first step or after ``drain()``."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "slackring"})
        self._engine.load(state_dict.get("slackring"))

    def synchronize(self) -> None:
        """Not needed: refused."""
        raise UnsupportedError("synchronize() has no meaning here: step() does it; clip averages with max_grad_norm=.")

    def skip_synchronize(self) -> None:
        """Not needed: refused."""
        raise UnsupportedError(
            "skip_synchronize() has no meaning here: call step() alone; clip averages with max_grad_norm=."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own settings; on every rank, before the first step or after ``drain()``."""
        if not self._engine.settled:
            raise UnsupportedError("a parameter group is added before the first step or after drain(), not in between.")
        before = sum(len(group["params"]) for group in self.param_groups)
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        names = [f"parameter.{before + place}" for place in range(len(added))]
        _refuse_dtypes(names, added)
        self._engine.extend(names, added)

    def __reduce_ex__(self, protocol: Any) -> Any:
        base = next(cls for cls in type(self).__mro__[1:] if not issubclass(cls, RelaxedOptimizer))
        return base.__new__, (base,), self.__getstate__()


_classes: dict[type, type[RelaxedOptimizer]] = {}


def _relaxed(base: type[Optimizer]) -> type[RelaxedOptimizer]:
    """The class that is both `base` and a `RelaxedOptimizer`; one a base, so that types compare equal."""
    if base not in _classes:
        attributes = {"__doc__": RelaxedOptimizer.__doc__}
        _classes[base] = type(f"Relaxed{base.__name__}", (RelaxedOptimizer, base), attributes)
    return _classes[base]


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take `samples` out of the arguments, evaluate a closure once, and hand the gradients to the engine."""
    assert isinstance(optimizer, RelaxedOptimizer)
    if optimizer._depth:  # the step() of a class has called that of the class it extends, which torch hooks, too
        optimizer._depth += 1
        return args, kwargs
    kwargs = dict(kwargs)
    samples = kwargs.pop("samples", None)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        # The optimizer must not evaluate it again, after the averaging.
        with torch.enable_grad():
            loss = closure()
        kwargs.pop("closure", None)
        args = (args[0], lambda: loss, *args[2:])
    optimizer._engine.before_step(samples)
    optimizer._depth = 1
    return args, kwargs


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, RelaxedOptimizer)
    optimizer._depth -= 1
    if optimizer._depth == 0:
        optimizer._engine.after_step()


def _drain_if_alive(reference: weakref.ref[Optimizer]) -> Callable[[], None]:
    def drain() -> None:
        optimizer = reference()
        if isinstance(optimizer, RelaxedOptimizer) and optimizer._engine.started:
            optimizer.drain()

    return drain


def _refuse_dtypes(names: Iterable[str], parameters: Iterable[Tensor]) -> None:
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UnsupportedError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, which has no average here; parameters are "
                f"{known}."
            )


def _buffer_device(anchor_device: str | None, tensors: Iterable[Tensor], ring: Ring) -> torch.device | None:
    """Where flat buffers lie; None is beside the tensors."""
    if anchor_device not in (None, "device", "cpu"):
        raise UnsupportedError(f"anchor_device= is None, 'device' or 'cpu', not {anchor_device!r}.")
    if anchor_device == "cpu":
        return torch.device("cpu")
    without = next((tensor.device for tensor in tensors if not ring.reduces(tensor.device)), None)
    if without is None:
        return None
    if anchor_device == "device":
        raise UnsupportedError(
            f"anchor_device='device': the {ring.kind} ring cannot sum on {without.type} as it was built; leave anchor_device= "
            "out, and the CPU does it."
        )
    return torch.device("cpu")


def _refuse_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedError(f"DistributedOptimizer() wraps a torch.optim.Optimizer, not {type(optimizer).__name__}.")
    if isinstance(optimizer, RelaxedOptimizer):
        raise UnsupportedError("this optimizer follows a rule already; wrap a plain one.")
    if hasattr(optimizer, "_allreduce_delay") or hasattr(optimizer, "backward_passes_per_step"):
        raise UnsupportedError(
            "this optimizer is wrapped by Horovod already, which would average twice; wrap the plain one."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            "LBFGS evaluates its closure a different number of times on each rank; use an optimizer that evaluates it once."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise UnsupportedError("the optimizer has no parameters.")


def _names(parameters: list[Tensor], named: Iterable[tuple[str, Tensor]] | None) -> list[str]:
    if named is None:
        return [f"parameter.{index}" for index in range(len(parameters))]
    by_id = {id(parameter): name for name, parameter in named}
    missing = [index for index, parameter in enumerate(parameters) if id(parameter) not in by_id]
    if missing:
        raise UnsupportedError(
            f"named_parameters= lacks {len(missing)} of the optimizer's parameters (the first has shape "
            f"{list(parameters[missing[0]].shape)}); give those of all its models."
        )
    return [by_id[id(parameter)] for parameter in parameters]
