"""The small language of ``--rule``, ``--straggler`` and ``--network``: ``name:key=value,key=value``.

A name stands for a frozen dataclass, the keys for its fields, and the fields' type hints say how a value is read.
Several values of one key are joined by ``+``. :func:`render` is the inverse of :func:`parse`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from slackring.errors import SpecError

__all__ = ["nearest", "parse", "parse_options", "render"]

T = TypeVar("T")

_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Name what the user may have meant, as the end of an error message.

    Examples
    --------
    >>> nearest("lsop", ["bsp", "losp"])
    "did you mean 'losp'? Known: bsp, losp"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}"


def parse(text: str, registry: Mapping[str, type[T]], *, kind: str, error: type[SpecError] = SpecError) -> T:
    """Read a text such as ``losp:compensation=0.5,k_max=64``.

    Parameters
    ----------
    text
        The name, and after a colon the fields that differ from their defaults.
    registry
        Dataclasses by name.
    kind
        What the names stand for ("rule", "straggler"), for error messages.
    error
        The class of error to raise.

    Raises
    ------
    SpecError
        For an unknown name or key (with the nearest valid one) and for a malformed value.

    Examples
    --------
    >>> @dataclasses.dataclass(frozen=True)
    ... class Delay:
    ...     seconds: float = 0.0
    ...     ranks: tuple[int, ...] = ()
    >>> parse("delay:seconds=0.5,ranks=1+3", {"delay": Delay}, kind="straggler")
    Delay(seconds=0.5, ranks=(1, 3))
    """
    name, _, rest = text.strip().partition(":")
    name = name.strip()
    if name not in registry:
        raise error(f"there is no {kind} named {name!r}; {nearest(name, registry)}.")
    return parse_options(rest, registry[name], what=f"{kind} {name!r}", error=error)


def parse_options(text: str, cls: type[T], *, what: str, error: type[SpecError] = SpecError) -> T:
    """Read what follows a name: the fields of its dataclass that differ from their defaults.

    Parameters
    ----------
    text
        Such as ``compensation=0.5,k_max=64``.
    cls
        The dataclass.
    what
        What the error messages begin with.
    error
        The class of error to raise.

    Raises
    ------
    SpecError
        For an unknown key (with the nearest valid one) and for a malformed value.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise error(f"{what}: {part!r} is not of the form key=value.")
        if key not in fields:
            known = f"{nearest(key, fields)}" if fields else "it takes none"
            raise error(f"{what} has no option {key!r}; {known}.")
        if key in values:
            raise error(f"{what}: the option {key!r} is given twice.")
        try:
            values[key] = _convert(value, hints[key])
        except ValueError as exc:
            raise error(f"{what}: {key}={value!r} is not {exc}.") from None
    missing = [
        f.name
        for f in dataclasses.fields(typing.cast(Any, cls))
        if f.init and f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise error(f"{what} needs {', '.join(f'{m}=' for m in missing)}.")
    return cls(**values)


def render(name: str, value: object) -> str:
    """Write a dataclass as the shortest text that :func:`parse` reads back.

    Examples
    --------
    >>> @dataclasses.dataclass(frozen=True)
    ... class Delay:
    ...     seconds: float = 0.0
    ...     ranks: tuple[int, ...] = ()
    >>> render("delay", Delay(ranks=(1, 3)))
    'delay:ranks=1+3'
    """
    parts = []
    for field in dataclasses.fields(typing.cast(Any, value)):
        item = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and item != default:
            text = "+".join(map(_written, item)) if isinstance(item, tuple) else _written(item)
            parts.append(f"{field.name}={text}")
    return f"{name}:{','.join(parts)}" if parts else name


def _written(item: object) -> str:
    # 1e+16 would read as two values
    return str(item).replace("e+", "e") if isinstance(item, float) else str(item)


def _convert(text: str, hint: Any) -> Any:
    """Read one value; the ValueError's text completes the sentence "... is not ..."."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        expected = []
        for option in args:
            try:
                return _convert(text, option)
            except ValueError as exc:
                expected.append(str(exc))
        raise ValueError(" or ".join(dict.fromkeys(expected)))
    if origin is Literal:
        if text in args:
            return text
        raise ValueError(" or ".join(repr(arg) for arg in args))
    if origin is tuple:
        return tuple(_convert(item, args[0]) for item in text.split("+"))
    if hint is bool:
        if text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        raise ValueError("true or false")
    if hint is types.NoneType:
        if text.lower() == "none":
            return None
        raise ValueError("none")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            raise ValueError("a whole number" if hint is int else "a number") from None
    return text
