#!/usr/bin/env python3
"""Build Horovod for the PyTorch of the running Python, keep the wheel, and install it.

    .venv/bin/python cluster_configs/horovod/build.py

Horovod's last release exists as source only and does not compile against current PyTorch. This script downloads that
release with pip, changes what stands in the way (see `EDITS` and `environment`), builds it for CPU with Gloo and
PyTorch, and keeps the wheel under ``$XDG_CACHE_HOME/slackring/horovod/<key>/`` (default ``~/.cache``), beside a
``key.json`` that says what it was built for and the ``build.log``. The key covers all that shapes the wheel, so that a
second set-up with the same Python, PyTorch and compiler takes seconds, and another one never gets a wheel that does not
fit.

Only the standard library is imported, since this runs before anything else is installed. Every way to fail ends in one
line on standard error, after the end of the log where there is one, and in exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HOROVOD = "0.28.1"
HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
CONSTRAINTS = HERE.parent / "constraints.txt"

#: What is built. A build for CUDA and NCCL is another such mapping (and keeps the CUDA lines that `EDITS` takes out).
CPU: Mapping[str, str] = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}

#: C++ standards to try, oldest first: PyTorch's headers refuse one that is too old.
STANDARDS = (17, 20, 23)

#: Instruction sets that Horovod uses where the processor has them (its fp16 sums, mainly).
INSTRUCTION_SETS = ("f16c", "avx", "fma")

#: Headers that Horovod and Gloo use without including them. Compilers since GCC 13 do not bring them in by accident.
FORCED_HEADERS = ("cstdint", "stdexcept", "string")

MINIMUM_CMAKE = (3, 13)
DISK_NEEDED = 1_000_000_000  # bytes; the source and the build tree take about 0.6e9
LOG_TAIL = 25  # lines


class BuildError(Exception):
    """A build that cannot be: one line for the user, and the log that explains it, if any."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclasses.dataclass(frozen=True)
class Edit:
    """One change to Horovod's sources: `old` stands `count` times in `path` and becomes `new`."""

    path: str
    old: str
    new: str
    count: int = 1


#: The changes to the sources. ``{standard}`` is the C++ standard.
EDITS = (
    # PyTorch's headers need a newer standard than the one Horovod sets, in two places.
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {standard})"),
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {standard})"),
    # A CPU build stays one where a CUDA toolkit happens to be installed. Horovod would compile for it unasked.
    Edit("CMakeLists.txt", "check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)", "if(FALSE)"),
    Edit("cmake/Modules/FindPytorch.cmake", "torch.version.cuda is not None", "False"),
)


@dataclasses.dataclass(frozen=True)
class Build:
    """All that shapes a wheel of Horovod.

    Parameters
    ----------
    horovod, torch : str
        Their versions; PyTorch's with its local part (``2.13.0+cpu``), since Horovod compares the full text later.
    cuda : str or None
        The CUDA version PyTorch was built for.
    python : str
        Implementation and ABI, e.g. ``cpython-311-x86_64-linux-gnu``.
    standard : int
        The C++ standard, e.g. 17.
    platform : str
        Operating system, C library and processor kind.
    compiler : str
        Name and version of the C++ compiler.
    instructions : tuple of str
        Those of `INSTRUCTION_SETS` that this processor has.
    flags : mapping of str to str
        Horovod's build variables.
    recipe : str
        A digest of the edits and build variables this script adds: a wheel made by another recipe is another wheel.

    Examples
    --------
    >>> build = Build("0.28.1", "2.13.0+cpu", None, "cpython-311", 17, "linux-x86_64", "g++ 12.2.0", ("avx",), CPU, "0")
    >>> build.key == dataclasses.replace(build).key
    True
    >>> build.key == dataclasses.replace(build, torch="2.13.0+cu130").key
    False
    """

    horovod: str
    torch: str
    cuda: str | None
    python: str
    standard: int
    platform: str
    compiler: str
    instructions: tuple[str, ...]
    flags: Mapping[str, str]
    recipe: str

    def describe(self) -> str:
        """Give the readable key: JSON with sorted names."""
        return json.dumps({**dataclasses.asdict(self), "flags": dict(self.flags)}, indent=2, sort_keys=True) + "\n"

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache."""
        digest = hashlib.sha256(self.describe().encode()).hexdigest()[:16]
        return f"{self.horovod}-torch{self.torch}-cxx{self.standard}-{digest}"


# What is there


def installed_torch() -> tuple[str, str | None, Path]:
    """Find PyTorch without importing it (which takes seconds).

    Returns
    -------
    tuple of (str, str or None, Path)
        Its full version, the CUDA version it was built for, and its folder.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"PyTorch is not installed in {sys.executable}: run `{pip_text('install', 'torch==2.13.0')}`")
    folder = Path(spec.origin).parent
    values = runpy.run_path(str(folder / "version.py"))
    return values["__version__"], values["cuda"], folder


def compiler() -> list[str]:
    """Find the C++ compiler, as CMake would: ``$CXX``, or the first of the usual names.

    Returns
    -------
    list of str
        The command.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    named = f" ($CXX is {chosen[0]!r})" if chosen else ""
    raise BuildError(f"no C++ compiler found{named}: {system_packages('g++', 'gcc-c++')}")


def check_tools() -> None:
    """Refuse to start without make, CMake and Python's headers."""
    if not shutil.which("make"):
        raise BuildError(f"make is missing: {system_packages('make', 'make')}")
    cmake = os.environ.get("HOROVOD_CMAKE", "cmake")
    if not shutil.which(cmake):
        raise BuildError(f"{cmake} is missing: {system_packages('cmake', 'cmake')}")
    found = re.search(r"version (\d+)\.(\d+)", output([cmake, "--version"]))
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_CMAKE:
        version = found[0] if found else "an unknown version"
        wanted = ".".join(map(str, MINIMUM_CMAKE))
        raise BuildError(f"cmake is {version}, and {wanted} or newer is needed: `{pip_text('install', 'cmake')}`")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise BuildError(f"Python's headers are missing ({header}): {system_packages('python3-dev', 'python3-devel')}")


def check_disk(*folders: Path) -> None:
    """Refuse to start where the disk would fill up."""
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if free < DISK_NEEDED:
            raise BuildError(
                f"{folder} has {free / 1e9:.1f} GB free and the build needs {DISK_NEEDED / 1e9:.0f} GB: "
                "free some, or point TMPDIR or XDG_CACHE_HOME to another disk"
            )


def cxx_standard(torch: Path, command: Sequence[str]) -> int:
    """Ask PyTorch's headers which C++ standard they need.

    Only the preprocessor runs (under a second), since the headers refuse an old standard with ``#error``.

    Parameters
    ----------
    torch : Path
        PyTorch's folder.
    command : sequence of str
        The C++ compiler.

    Returns
    -------
    int
        The oldest of `STANDARDS` that they accept.
    """
    include = torch / "include"
    if not (include / "ATen" / "ATen.h").exists():
        raise BuildError(f"PyTorch's headers are missing ({include}): reinstall PyTorch from its wheel")
    source = "#include <ATen/ATen.h>\n#include <torch/all.h>\n"
    folders = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    log = ""
    for standard in STANDARDS:
        arguments = [*command, f"-std=c++{standard}", "-E", "-x", "c++", *folders, "-o", os.devnull, "-"]
        done = subprocess.run(arguments, input=source, capture_output=True, text=True)
        if done.returncode == 0:
            return standard
        log = done.stderr
    newest = f"{shlex.join(command)} cannot read PyTorch's headers, even with C++ {STANDARDS[-1]}"
    raise BuildError(f"{newest}: install a newer compiler, or name one in CXX", log)


def instruction_sets(cpuinfo: str) -> tuple[str, ...]:
    """Pick what Horovod can use from the text of ``/proc/cpuinfo``.

    Examples
    --------
    >>> instruction_sets("flags : fpu sse2 avx fma")
    ('avx', 'fma')
    >>> instruction_sets("Features : fp asimd")
    ()
    """
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    flags = found[1].split() if found else []
    return tuple(name for name in INSTRUCTION_SETS if name in flags)


def this_build(flags: Mapping[str, str] = CPU) -> Build:
    """Describe the build for the running Python, its PyTorch, and this machine."""
    version, cuda, folder = installed_torch()
    command = compiler()
    cpuinfo = Path("/proc/cpuinfo")
    recipe = repr((EDITS, FORCED_HEADERS))
    return Build(
        horovod=HOROVOD,
        torch=version,
        cuda=cuda,
        python=str(sysconfig.get_config_var("SOABI")),
        standard=cxx_standard(folder, command),
        platform=f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}",
        compiler=output([*command, "--version"]).partition("\n")[0],
        instructions=instruction_sets(cpuinfo.read_text() if cpuinfo.exists() else ""),
        flags=flags,
        recipe=hashlib.sha256(recipe.encode()).hexdigest()[:16],
    )


# Building


def apply_edits(source: Path, standard: int, edits: Iterable[Edit] = EDITS) -> None:
    """Change Horovod's sources in place.

    Parameters
    ----------
    source : Path
        The unpacked release.
    standard : int
        The C++ standard to set.
    edits : iterable of Edit
        What to change. A text that is not there as often as expected is an error: this is not the release they are for.
    """
    for edit in edits:
        path = source / edit.path
        text = path.read_text() if path.exists() else ""
        if text.count(edit.old) != edit.count:
            raise BuildError(f"Horovod's {edit.path} does not contain {edit.old!r} as expected: is this {HOROVOD}?")
        path.write_text(text.replace(edit.old, edit.new.format(standard=standard)))


def environment(build: Build, jobs: int) -> dict[str, str]:
    """Give the environment that the build runs in."""
    # What else the user's shell says about Horovod would make another build than the key tells.
    kept = ("HOROVOD_CMAKE",)
    result = {name: value for name, value in os.environ.items() if name in kept or not name.startswith("HOROVOD_")}
    forced = " ".join(f"-include {name}" for name in FORCED_HEADERS)
    result |= build.flags
    result |= {
        "CXX": shlex.join(compiler()),
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} {forced}".strip(),
        "MAKEFLAGS": f"-j{jobs}",
        # The bundled Gloo asks for a policy version that CMake 4 no longer has.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    if build.instructions:
        result["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(f"-m{name}" for name in build.instructions)
    return result


def download(folder: Path) -> Path:
    """Download and unpack the release, and return its folder."""
    arguments = ("download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation", f"horovod=={HOROVOD}")
    run_pip([*arguments, "-d", str(folder)], f"could not download horovod {HOROVOD}: is the package index reachable?")
    archive = folder / f"horovod-{HOROVOD}.tar.gz"
    with tarfile.open(archive) as tar:
        # Python before 3.11.4 (Debian 12's) has no filters, and then this is an attribute that nothing reads.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder)
    archive.unlink()
    return folder / f"horovod-{HOROVOD}"


def build_wheel(build: Build, folder: Path, jobs: int, log: Path) -> Path:
    """Build the wheel.

    Parameters
    ----------
    build : Build
        What to build.
    folder : Path
        An empty folder to work in.
    jobs : int
        Compilers to run at once.
    log : Path
        Where the output goes; it is kept, also when the build fails.

    Returns
    -------
    Path
        The wheel.
    """
    source = download(folder)
    apply_edits(source, build.standard)
    wheels = folder / "wheels"
    # --no-cache-dir: pip's own cache does not know the build variables, and would hand out a wheel built with others.
    arguments = ("wheel", "-v", "--no-cache-dir", "--no-build-isolation", "--no-deps", "-w", str(wheels), str(source))
    progress = Progress()
    process = subprocess.Popen(
        [*pip(), *arguments],
        env=environment(build, jobs),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        with log.open("w") as written:
            for line in process.stdout or ():
                written.write(line)
                progress.see(line)
    except BaseException:  # above all an interrupt: pip, make and the compilers must not go on alone
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        progress.close()
        process.communicate()
    found = list(wheels.glob("horovod-*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise BuildError(f"Horovod did not compile; the whole log is {log}", log.read_text())
    names = zipfile.ZipFile(found[0]).namelist()
    if not any(re.fullmatch(r"horovod/torch/mpi_lib_v2.*\.so", name) for name in names):
        raise BuildError(f"Horovod was built without its PyTorch library; the whole log is {log}", log.read_text())
    return found[0]


class Progress:
    """The build's percentage, as CMake's makefiles print it: on one line of a terminal, else a line a quarter."""

    def __init__(self) -> None:
        self.shown = 0
        self.terminal = sys.stdout.isatty()

    def see(self, line: str) -> None:
        """Look for a percentage in a line of the build's output."""
        found = re.search(r"\[ *(\d+)%\]", line)
        percent = int(found[1]) if found else 0
        if percent >= self.shown + (1 if self.terminal else 25):
            self.shown = percent
            before, after = ("\r", "") if self.terminal else ("", "\n")
            print(f"{before}  Horovod {percent:3d} %", end=after, flush=True)

    def close(self) -> None:
        """End the line."""
        if self.terminal and self.shown:
            print(flush=True)


def cache_folder() -> Path:
    """Where wheels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slackring" / "horovod"


def cached_wheel(build: Build, cache: Path) -> Path | None:
    """Look a wheel up."""
    return next(iter((cache / build.key).glob("horovod-*.whl")), None)


def store(build: Build, wheel: Path, log: Path, cache: Path) -> Path:
    """Put a wheel into the cache in one move, so that nobody ever sees half of it.

    Returns
    -------
    Path
        The stored wheel; another process's, if that was first.
    """
    with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as holder:
        entry = Path(holder) / build.key
        entry.mkdir()
        shutil.copy2(wheel, entry / wheel.name)
        shutil.copy2(log, entry / "build.log")
        (entry / "key.json").write_text(build.describe())
        # Another process may have stored the same build meanwhile; a folder that is not empty is never replaced.
        with contextlib.suppress(OSError):
            entry.rename(cache / build.key)
    stored = cached_wheel(build, cache)
    if stored is None:
        raise BuildError(f"cannot store the wheel in {cache / build.key}: remove what is there and try again")
    return stored


def install(wheel: Path) -> None:
    """Install a wheel over whatever Horovod there is, and see that it loads and has Gloo."""
    run_pip(["install", "--force-reinstall", "--no-deps", "--no-index", str(wheel)], f"could not install {wheel}")
    check = "import horovod.torch as hvd; raise SystemExit(not hvd.gloo_built())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", check], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"Horovod was installed but does not load: remove {wheel.parent} and try again", done.stderr)


# Helpers


def pip() -> list[str]:
    """Give the command of this Python's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def pip_text(*arguments: str) -> str:
    """Give a pip command for the user to type."""
    return shlex.join([sys.executable, "-m", "pip", *arguments])


def run_pip(arguments: Sequence[str], failure: str) -> None:
    """Run pip quietly; if it fails, `failure` is the line for the user."""
    done = subprocess.run([*pip(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(failure, done.stdout + done.stderr)


def output(command: Sequence[str]) -> str:
    """Give what a command prints, or nothing if it fails."""
    return subprocess.run(command, capture_output=True, text=True).stdout


def system_packages(debian: str, fedora: str) -> str:
    """Tell how to install a system package."""
    return f"`apt-get install {debian}` (Debian, Ubuntu) or `dnf install {fedora}` (Fedora, RHEL) brings it"


def telling_lines(log: str) -> list[str]:
    r"""Pick the end of a log, or what follows its first error if that is further up (jobs run side by side).

    Examples
    --------
    >>> telling_lines("compiling a\na.cc:1: error: no\nerror: subprocess-exited-with-error\npip explains itself")
    ['compiling a', 'a.cc:1: error: no']
    """
    # What pip adds after the output of the build says nothing about the build, at length.
    lines = re.split(r"^.*subprocess-exited-with-error", log, maxsplit=1, flags=re.MULTILINE)[0].strip().splitlines()
    errors = (index for index, line in enumerate(lines) if re.search(r"error:|CMake Error", line))
    start = max(0, min(next(errors, len(lines)), len(lines) - LOG_TAIL))
    return lines[start : start + LOG_TAIL]


def install_requirements() -> None:
    """Install what Horovod's build and run need besides PyTorch, if something is missing."""
    missing = []
    for name in re.findall(r"^\w+", REQUIREMENTS.read_text(), re.MULTILINE):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        run_pip(["install", "-c", str(CONSTRAINTS), *missing], f"could not install {', '.join(missing)}")


def run(jobs: int) -> None:
    """Build if needed, and install."""
    started = time.monotonic()
    build = this_build()
    what = f"Horovod {build.horovod} for PyTorch {build.torch}"
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot write to {cache} ({error.strerror}): set XDG_CACHE_HOME to another folder") from error
    install_requirements()
    wheel = cached_wheel(build, cache)
    if wheel is not None:
        print(f"{what}: already built, in {wheel.parent}")
    else:
        check_tools()
        with tempfile.TemporaryDirectory(prefix="slackring-horovod-") as folder:
            check_disk(Path(folder), cache)
            print(f"{what}: building, with C++ {build.standard} and Gloo. This happens once, for minutes.", flush=True)
            log = cache / f"{build.key}.log"
            wheel = store(build, build_wheel(build, Path(folder), jobs, log), log, cache)
            log.unlink()
        print(f"{what}: built in {time.monotonic() - started:.0f} s, kept in {wheel.parent}")
    install(wheel)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build and install Horovod for this Python's PyTorch.")
    # A compiler may take 1 GB of memory, so not one for each core of a large machine.
    jobs = min(len(os.sched_getaffinity(0)), 16)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"compilers to run at once (default here: {jobs})")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, and at least 1 is needed")
    # The tools of this Python's environment come first: a cmake that pip installed is found there.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    try:
        run(options.jobs)
    except BuildError as error:
        for line in telling_lines(error.log):
            print(f"  | {line}", file=sys.stderr)
        print(f"horovod build: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # most likely a full disk or a folder of somebody else's
        print(f"horovod build: {error.filename or 'the system'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("horovod build: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up as after Ctrl-C
    sys.exit(main())
