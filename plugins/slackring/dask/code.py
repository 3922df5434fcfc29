"""The user's code as bytes: a call that every rank can run, and the local modules that it needs there."""

from __future__ import annotations

import ast
import dis
import hashlib
import importlib.util
import io
import linecache
import os
import pickle
import sysconfig
import types
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import cloudpickle

from slackring.errors import PoolError

__all__ = ["Bundle", "bundle", "dump_call", "load_call", "local_modules", "unpack"]

_NO_FILE = "<dynamic-code>"
_LIMIT = 100_000_000  # bytes; each rank gets them, and keeps them while it runs
_INSTALLED = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}


@dataclass(frozen=True)
class Bundle:
    """Local modules that ranks can import once they are unpacked.

    Parameters
    ----------
    names
        Of the top-level modules.
    digest
        Equal if and only if names and contents of all files are.
    archive
        A zip file; empty bytes if there are no modules.
    """

    names: tuple[str, ...]
    digest: str
    archive: bytes


def dump_call(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bytes:
    """Pickle a call.

    What is defined in a notebook or in the script that runs travels by value, with its source for tracebacks; what can be
    imported travels by its name.

    Parameters
    ----------
    fn, args, kwargs
        What to call, and with what.

    Raises
    ------
    PoolError
        If something cannot be pickled; the message names the function, and the variable as far as it can be found.

    Examples
    --------
    >>> fn, args, kwargs = load_call(dump_call(lambda x, y: x + y, [1], {"y": 2}))
    >>> fn(*args, **kwargs)
    3
    """
    kwargs = dict(kwargs or {})
    name = _name(fn)
    parts = [(name, fn), *((f"argument {number} of {name}", value) for number, value in enumerate(args, 1))]
    parts += [(f"argument {key!r} of {name}", value) for key, value in kwargs.items()]
    buffer = io.BytesIO()
    pickler = _pickle((fn, tuple(args), kwargs), buffer, parts)
    sources = {file: lines for file in pickler.files if (lines := linecache.getlines(file))}
    pickle.dump(sources, buffer)
    return buffer.getvalue()


def load_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Take a call back from what :func:`dump_call` gave; only for bytes from the client that started the run.

    Raises
    ------
    PoolError
        If a module that the call needs is missing here.
    """
    file = io.BytesIO(data)
    try:
        fn, args, kwargs = pickle.load(file)
    except ModuleNotFoundError as exc:
        raise PoolError(
            f"the function needs the module {exc.name!r}, which is missing here; install it on the workers, or send it along "
            "(modules=)."
        ) from exc
    for name, lines in pickle.load(file).items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)  # no time: never looked for on this disk
    return fn, args, kwargs


def local_modules(*what: Any, modules: Sequence[str] = ()) -> dict[str, tuple[Path, ...]]:
    """Find the modules that objects need and that are installed nowhere: those of a project folder or an editable install.

    They are found from where functions and classes are defined and from what their code imports, and so on from the source of
    each module found. A module that is imported by a computed name has to be named.

    Parameters
    ----------
    what
        Functions, classes, or anything else that can be pickled.
    modules
        Names of further modules (``my_task``, ``my_package.tasks``); the current folder is searched too.

    Returns
    -------
    dict
        The file or the folder of each top-level module or package, by its name; several folders of a namespace package.

    Raises
    ------
    PoolError
        If a named module does not exist, or something cannot be pickled.
    """
    for name in modules:
        if _find(name.partition(".")[0]) is None:
            raise PoolError(f"there is no module {name!r}, here or among the installed ones.")
    names = [*modules, *_pickle(what, _Nowhere(), [(_name(value), value) for value in what]).modules]
    found: dict[str, tuple[Path, ...]] = {}
    while names:
        top = names.pop().partition(".")[0]
        # Slackring is on the workers, and what is in __main__ travels by value.
        if top not in found and top not in ("slackring", "__main__"):
            found[top] = _places(top)
            names += (name for file in _files(top, found[top]).values() for name in _imports_of_source(file))
    return {top: places for top, places in sorted(found.items()) if places}


def bundle(*what: Any, modules: Sequence[str] = ()) -> Bundle:
    """Put the local modules that objects need into an archive.

    Whole packages are taken, with their data files, but nothing hidden.

    Parameters
    ----------
    what, modules
        See :func:`local_modules`.

    Raises
    ------
    PoolError
        See :func:`local_modules`; also if the modules take more than 100 MB, or cannot be read.
    """
    files: dict[str, Path] = {}
    local = local_modules(*what, modules=modules)
    if not local:
        return Bundle((), "", b"")
    for top, places in local.items():
        files |= _files(top, places)
    try:
        _check_size(files, list(local))
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in sorted(files.items()):
                # Without the time of the file, so that equal contents are equal bytes.
                entry = zipfile.ZipInfo(name)
                entry.external_attr = (0o700 if os.access(path, os.X_OK) else 0o600) << 16
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    except OSError as exc:
        raise PoolError(f"{exc.filename!r} cannot be sent to the ranks ({exc.strerror}).") from exc
    return Bundle(tuple(local), hashlib.sha256(buffer.getvalue()).hexdigest(), buffer.getvalue())


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack a bundle's archive; with the folder first on ``sys.path`` its modules can be imported.

    Parameters
    ----------
    archive
        What :func:`bundle` made.
    folder
        Made if it is missing; only its owner can enter it afterwards.

    Raises
    ------
    PoolError
        If a file of the archive would lie outside the folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not archive:
        return
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for entry in files.infolist():
            target = (folder / entry.filename).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise PoolError(f"the archive of local modules has a file {entry.filename!r}, outside its folder.")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.read(entry))
            target.chmod(entry.external_attr >> 16 & 0o700)


# Pickling


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    """Notes the modules that objects come from and that their code imports, and the files of the code that it pickles."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.modules: set[str] = set()
        self.files: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        """See every object on its way."""
        names: Iterable[str | None] = ()
        if isinstance(obj, types.CodeType) and obj.co_filename != _NO_FILE:
            self.files.add(obj.co_filename)
            return _located, (obj.replace(co_filename=_NO_FILE), obj.co_filename)
        if isinstance(obj, types.CodeType):
            names = (step.argval for step in dis.get_instructions(obj) if step.opname == "IMPORT_NAME")
        elif isinstance(obj, types.ModuleType):
            names = (obj.__name__,)
        elif isinstance(obj, types.FunctionType):
            # A script run by -m is __main__, but what it imports relatively is in its package.
            names = (obj.__module__, obj.__globals__.get("__package__"))
        elif isinstance(obj, type | types.BuiltinFunctionType):
            names = (obj.__module__,)
        self.modules.update(name for name in names if name)
        return super().reducer_override(obj)


def _located(code: types.CodeType, file: str) -> types.CodeType:
    """Say again where code comes from, which cloudpickle leaves out."""
    return code.replace(co_filename=file)


class _Nowhere(io.RawIOBase):
    """A file for those who want to know what is written, but not to have it."""

    def write(self, data: Any) -> int:
        return len(data)


def _pickle(value: Any, file: Any, parts: Iterable[tuple[str, Any]]) -> _Pickler:
    """Pickle a value, and give who did it; if that fails, one of the named parts is to blame."""
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as exc:  # what users write into __reduce__ and __getstate__ may raise anything
        raise _refusal(parts, exc) from exc
    return pickler


def _refusal(parts: Iterable[tuple[str, Any]], exc: Exception) -> PoolError:
    name, part = next(((name, part) for name, part in parts if _fails(part)), ("the call", None))
    trail = ", which uses ".join(_trail(part, {id(part)}))
    reason = f"it uses {trail}" if trail else f"it is of type {_type(part)}"
    details = " ".join(str(exc).split())
    return PoolError(f"{name} cannot be sent to the ranks: {reason} ({details}); make it inside the function instead.")


def _fails(value: Any) -> bool:
    try:
        _Pickler(_Nowhere()).dump(value)
    except Exception:
        return True
    return False


def _trail(value: Any, seen: set[int]) -> Iterator[str]:
    """Follow what cannot be pickled from a value down to the variable that is to blame."""
    for name, part in _parts(value):
        if id(part) not in seen and _fails(part):
            seen.add(id(part))
            yield f"{name!r}, of type {_type(part)}"
            yield from _trail(part, seen)
            return


def _parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    """Give what is pickled along with a value, by the names that the user knows."""
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield from (
            (name, value.__globals__[name]) for name in _global_names(value.__code__) if name in value.__globals__
        )
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty one
                yield name, cell.cell_contents
        arguments, defaults = value.__code__.co_varnames[: value.__code__.co_argcount], value.__defaults__ or ()
        yield from zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple | set):
        yield from enumerate(value)
    else:
        yield from (
            (name, part)
            for name, part in getattr(value, "__dict__", {}).items()
            if name not in ("__dict__", "__weakref__")
        )


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _name(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    if name is None:
        return f"an object of type {_type(value)}"
    name = name.rpartition("<locals>.")[2]
    return name if isinstance(value, type) else f"{name}()"


def _type(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# Local modules


def _find(top: str) -> Any:
    """Find the spec of a top-level module, loaded or not."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # loaded, but not from a file
        spec = None
    return spec or PathFinder.find_spec(top, [os.getcwd()])


def _places(top: str) -> tuple[Path, ...]:
    """Give where a top-level module lies, if that is no place where packages are installed."""
    spec = _find(top)
    if spec is None:
        return ()
    where = spec.submodule_search_locations or ([spec.origin] if spec.has_location else [])
    local = (path for path in map(Path, where) if path.exists() and not _is_installed(path))
    # Any folder could be a namespace package: one without code is something else, such as data.
    return tuple(path for path in local if spec.origin or any(path.rglob("*.py")))


def _is_installed(path: Path) -> bool:
    if {"site-packages", "dist-packages"} & {*path.parts, *path.resolve().parts}:
        return True
    return any(path.resolve().is_relative_to(folder) for folder in _INSTALLED)


def _files(top: str, places: Iterable[Path]) -> dict[str, Path]:
    """List the files of a top-level module, by their names in the archive."""
    files: dict[str, Path] = {}
    for place in places:
        if place.is_file():
            files[place.name] = place
        for folder, subfolders, names in os.walk(place):
            subfolders[:] = [name for name in subfolders if name != "__pycache__" and not name.startswith(".")]
            for name in names:
                path = Path(folder, name)
                if path.is_file() and not name.startswith("."):
                    # Of a namespace's folders, the first wins, as in an import.
                    files.setdefault(f"{top}/{path.relative_to(place).as_posix()}", path)
    return files


def _imports_of_source(file: Path) -> tuple[str, ...]:
    """Give the modules that a source file imports, without running it."""
    if file.suffix != ".py":
        return ()
    try:
        stat = file.stat()
        return _imports(file, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError, SyntaxError):  # a template, perhaps: who imports it will learn
        return ()


@lru_cache(maxsize=10_000)
def _imports(file: Path, changed: int, size: int) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return tuple(names)


def _check_size(files: Mapping[str, Path], names: Sequence[str]) -> None:
    sizes: Counter[Path] = Counter()
    for path in files.values():
        sizes[path.parent] += path.stat().st_size
    if sizes.total() > _LIMIT:
        ((folder, size),) = sizes.most_common(1)
        raise PoolError(
            f"the local modules {', '.join(names)} take {sizes.total() / 1e6:.0f} MB, more than the {_LIMIT / 1e6:.0f} MB that "
            f"are sent to ranks, and {size / 1e6:.0f} MB of it are in {str(folder)!r}; move data out of there, or install the "
            "package on the workers."
        )
