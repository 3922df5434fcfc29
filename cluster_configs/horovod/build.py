#!/usr/bin/env python3
"""Build Horovod for the PyTorch of the running Python, keep the wheel, and install it.

    .venv/bin/python cluster_configs/horovod/build.py

Horovod's last release exists as source only and does not compile against current PyTorch. This script downloads that
release with pip, changes what stands in the way (see `EDITS` and `environment`), builds it with Gloo and PyTorch, and
with NCCL where PyTorch is for CUDA and all that takes is there (see `find_gpu`), and keeps the wheel under
``$XDG_CACHE_HOME/slackring/horovod/<key>/`` (default ``~/.cache``), beside a ``key.json`` that says what it was built
for and the ``build.log``. The key covers all that shapes the wheel, so that a second set-up with the same Python,
PyTorch and compiler takes seconds, and another one never gets a wheel that does not fit.

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

#: What is built for CPU.
CPU: Mapping[str, str] = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}

#: What is built for CPU and GPU. NCCL's pip wheel, which PyTorch brings, has the shared library only.
NCCL: Mapping[str, str] = {**CPU, "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}

#: What `--gpu-operations` and Horovod's own HOROVOD_GPU_OPERATIONS can say.
GPU_OPERATIONS = ("auto", "NCCL", "none")

#: Where a CUDA toolkit and NCCL are where nothing says otherwise.
CUDA_HOMES = (Path("/usr/local/cuda"),)
NCCL_HOMES = (Path("/usr"), Path("/usr/local"))

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


#: The changes to the sources for a build for CPU. ``{standard}`` is the C++ standard.
EDITS = (
    # PyTorch's headers need a newer standard than the one Horovod sets, in two places.
    Edit("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {standard})"),
    Edit("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD {standard})"),
    # A CPU build stays one where a CUDA toolkit happens to be installed. Horovod would compile for it unasked.
    Edit("CMakeLists.txt", "check_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)", "if(FALSE)"),
    Edit("cmake/Modules/FindPytorch.cmake", "torch.version.cuda is not None", "False"),
)

#: The changes for a build with NCCL, whose CUDA lines stay.
NCCL_EDITS = (
    *EDITS[:2],
    # nvcc is to read PyTorch's headers, too.
    Edit(
        "horovod/common/ops/cuda/CMakeLists.txt", "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD {standard})"
    ),
)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a build with NCCL takes.

    Parameters
    ----------
    cuda : Path
        Folder of the CUDA toolkit.
    headers, library : Path
        NCCL's.
    versions : str
        Of CUDA and NCCL.
    """

    cuda: Path
    headers: Path
    library: Path
    versions: str


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
        Name and version of the C++ compiler; for a build with NCCL also the versions of CUDA and NCCL.
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


def cuda_toolkit(candidates: Iterable[Path]) -> tuple[Path, str] | None:
    """Find a CUDA toolkit that programs can be built with.

    Parameters
    ----------
    candidates : iterable of Path
        Where it may be.

    Returns
    -------
    tuple of (Path, str) or None
        The first folder with nvcc and headers, and its version such as ``13.0``.
    """
    for folder in candidates:
        if (folder / "include" / "cuda_runtime.h").exists() and (folder / "bin" / "nvcc").exists():
            found = re.search(r"release (\d+\.\d+)", output([str(folder / "bin" / "nvcc"), "--version"]))
            if found:
                return folder, found[1]
    return None


def nccl(candidates: Iterable[Path]) -> tuple[Path, Path, str] | None:
    """Find NCCL.

    Parameters
    ----------
    candidates : iterable of Path
        Where it may be.

    Returns
    -------
    tuple of (Path, Path, str) or None
        The headers, the shared library (a pip wheel has it under its versioned name only) and the version, such as
        ``2.28.9``, in the first folder that has all.
    """
    for folder in candidates:
        header = folder / "include" / "nccl.h"
        libraries = [path for pattern in ("lib*", "lib/*") for path in sorted(folder.glob(f"{pattern}/libnccl.so*"))]
        if header.exists() and libraries:
            numbers = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) +(\d+)", header.read_text()))
            return header.parent, libraries[0], ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    return None


def obstacle(cuda: str | None, toolkit: str | None, nccl: str | None) -> str:
    """Say what keeps Horovod from being built with NCCL; empty if nothing does.

    Parameters
    ----------
    cuda, toolkit, nccl : str or None
        Versions: the CUDA that PyTorch was built for, the CUDA toolkit, NCCL; None for what is not there.

    Examples
    --------
    >>> obstacle("13.0", None, "2.28.9")
    'no nvcc'
    >>> obstacle("13.0", "12.8", "2.28.9")
    "nvcc of CUDA 12.8, beside PyTorch's 13.0"
    >>> obstacle("13.0", "13.1", "2.28.9")
    ''
    """
    if cuda is None:
        return "a PyTorch without CUDA"
    if toolkit is None:
        return "no nvcc"
    if toolkit.split(".")[0] != cuda.split(".")[0]:
        return f"nvcc of CUDA {toolkit}, beside PyTorch's {cuda}"
    return "no NCCL" if nccl is None else ""


def find_gpu(wanted: str, cuda: str | None, torch: Path, environ: Mapping[str, str] = os.environ) -> Gpu | None:
    """Find what a build with NCCL takes, and say so where a PyTorch for CUDA gets a build without it.

    Parameters
    ----------
    wanted : {"auto", "NCCL", "none"}
        Whether to build with NCCL: if nothing is in the way, in any case, or not at all.
    cuda : str or None
        The CUDA version PyTorch was built for.
    torch : Path
        PyTorch's folder; NCCL's wheel is beside it.
    environ : mapping of str to str
        Where ``HOROVOD_CUDA_HOME``, ``CUDA_HOME`` and ``HOROVOD_NCCL_HOME`` are looked up.
    """
    if wanted == "none":
        return None
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    homes = [Path(environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if environ.get(name)]
    homes += [Path(nvcc).resolve().parents[1]] if nvcc else []
    toolkit = cuda_toolkit([*homes, *CUDA_HOMES])
    homes = [Path(environ["HOROVOD_NCCL_HOME"])] if environ.get("HOROVOD_NCCL_HOME") else []
    library = nccl([*homes, torch.parent / "nvidia" / "nccl", *NCCL_HOMES])
    why = obstacle(cuda, toolkit and toolkit[1], library and library[2])
    if toolkit and library and not why:
        return Gpu(toolkit[0], *library[:2], f"CUDA {toolkit[1]}, NCCL {library[2]}")
    if wanted == "NCCL":
        raise BuildError(
            f"cannot build with NCCL, since there is {why}: set CUDA_HOME or HOROVOD_NCCL_HOME to where it is, or build without"
        )
    if cuda is not None:
        print(f"Horovod without NCCL, since there is {why}: GPU tensors will travel through host memory")
    return None


def this_build(gpu: Gpu | None = None) -> Build:
    """Describe the build for the running Python, its PyTorch, and this machine."""
    version, cuda, folder = installed_torch()
    command = compiler()
    cpuinfo = Path("/proc/cpuinfo")
    recipe = repr((EDITS if gpu is None else NCCL_EDITS, FORCED_HEADERS))
    names = output([*command, "--version"]).partition("\n")[0]
    return Build(
        horovod=HOROVOD,
        torch=version,
        cuda=cuda,
        python=str(sysconfig.get_config_var("SOABI")),
        standard=cxx_standard(folder, command),
        platform=f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}",
        compiler=names if gpu is None else f"{names}, {gpu.versions}",
        instructions=instruction_sets(cpuinfo.read_text() if cpuinfo.exists() else ""),
        flags=CPU if gpu is None else NCCL,
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


def gpu_environment(gpu: Gpu, folder: Path) -> dict[str, str]:
    """Lay NCCL out in `folder` as CMake looks for it, and give the variables that lead there and to nvcc."""
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "libnccl.so").symlink_to(gpu.library)
    (folder / "include").symlink_to(gpu.headers)
    return {
        "HOROVOD_NCCL_HOME": str(folder),
        "HOROVOD_CUDA_HOME": str(gpu.cuda),
        "CUDA_HOME": str(gpu.cuda),
        # Horovod asks the first nvcc on the path which GPUs there are to build for.
        "PATH": os.pathsep.join([str(gpu.cuda / "bin"), os.environ.get("PATH", os.defpath)]),
    }


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


def build_wheel(build: Build, folder: Path, jobs: int, log: Path, gpu: Gpu | None = None) -> Path:
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
    gpu : Gpu, optional
        What a build with NCCL takes.

    Returns
    -------
    Path
        The wheel.
    """
    source = download(folder)
    apply_edits(source, build.standard, EDITS if gpu is None else NCCL_EDITS)
    wheels = folder / "wheels"
    # --no-cache-dir: pip's own cache does not know the build variables, and would hand out a wheel built with others.
    arguments = ("wheel", "-v", "--no-cache-dir", "--no-build-isolation", "--no-deps", "-w", str(wheels), str(source))
    progress = Progress()
    process = subprocess.Popen(
        [*pip(), *arguments],
        env=environment(build, jobs) | ({} if gpu is None else gpu_environment(gpu, folder / "nccl")),
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
        way_out = "" if gpu is None else "; HOROVOD_GPU_OPERATIONS=none leaves NCCL out"
        raise BuildError(f"Horovod did not compile; the whole log is {log}{way_out}", log.read_text())
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


def install(wheel: Path, gpu: Gpu | None = None) -> None:
    """Install a wheel over whatever Horovod there is, and see that it loads and has Gloo, and NCCL if it should."""
    run_pip(["install", "--force-reinstall", "--no-deps", "--no-index", str(wheel)], f"could not install {wheel}")
    built = "hvd.gloo_built()" if gpu is None else "(hvd.gloo_built() and hvd.nccl_built())"
    check = f"import horovod.torch as hvd; raise SystemExit(not {built})"
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


def run(jobs: int, gpu_operations: str) -> None:
    """Build if needed, and install."""
    started = time.monotonic()
    _, cuda, torch = installed_torch()
    gpu = find_gpu(gpu_operations, cuda, torch)
    build = this_build(gpu)
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
            kinds = "Gloo" if gpu is None else f"Gloo, {gpu.versions}"
            print(f"{what}: building, with C++ {build.standard}, {kinds}. This happens once, for minutes.", flush=True)
            log = cache / f"{build.key}.log"
            wheel = store(build, build_wheel(build, Path(folder), jobs, log, gpu), log, cache)
            log.unlink()
        print(f"{what}: built in {time.monotonic() - started:.0f} s, kept in {wheel.parent}")
    install(wheel, gpu)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build and install Horovod for this Python's PyTorch.")
    # A compiler may take 1 GB of memory, so not one for each core of a large machine.
    jobs = min(len(os.sched_getaffinity(0)), 16)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"compilers to run at once (default here: {jobs})")
    parser.add_argument(
        "--gpu-operations",
        choices=GPU_OPERATIONS,
        default=os.environ.get("HOROVOD_GPU_OPERATIONS") or "auto",
        help="build with NCCL: where PyTorch, nvcc and NCCL allow it, in any case, or not (also: HOROVOD_GPU_OPERATIONS)",
    )
    options = parser.parse_args(arguments)
    if options.gpu_operations not in GPU_OPERATIONS:  # argparse does not look at the environment's
        parser.error(f"HOROVOD_GPU_OPERATIONS is {options.gpu_operations!r}, and can be {', '.join(GPU_OPERATIONS)}")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, and at least 1 is needed")
    # The tools of this Python's environment come first: a cmake that pip installed is found there.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    try:
        run(options.jobs, options.gpu_operations)
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
