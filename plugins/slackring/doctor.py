"""Tell whether real ranks can run on this machine, and if not, which command mends it.

Each check is a small function that returns a `Check`. What it looks at can be passed in, so that it can be tried
without a broken machine. `examine` runs them all, `report` prints them.

PyTorch is imported late, and Horovod never into this process: a library that was built for another PyTorch may crash
whoever loads it, so a process of its own does that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["Check", "examine", "exit_status", "report"]

_BUILDER = Path("cluster_configs/horovod/build.py")

#: What builds Horovod for the PyTorch that is installed, from the root of the repository.
BUILD_COMMAND = f"{shlex.quote(sys.executable)} {_BUILDER}"

#: Interfaces that containers and virtual machines make; they lead to no other machine.
VIRTUAL_INTERFACES = ("br-", "docker", "podman", "veth", "virbr", "vnet", "lxc", "lxdbr", "cni", "flannel", "cali")

_HOROVOD_FACTS = """
import json, pathlib, horovod, torch, horovod.torch as hvd
built_for = json.loads(pathlib.Path(horovod.__file__).with_name("metadata.json").read_text()).get("pytorch")
print(json.dumps({"version": horovod.__version__, "torch": torch.__version__, "built_for": built_for,
                  "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()), "cuda": torch.cuda.is_available()}))
"""

_RANK = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="doctor")
print("rank", hvd.rank(), "sum", int(total.item()), flush=True)
"""

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found.

    Parameters
    ----------
    name : str
        What was looked at.
    status : {"ok", "warn", "fail"}
        Whether real ranks can run here as far as this check can tell; "warn" when they can, but not well.
    detail : str
        What is there, or what is wrong.
    remedy : str
        The command that mends it; empty when there is nothing to mend.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def check_python(version: tuple[int, int, int] | None = None, platform: str = sys.platform) -> Check:
    """Check the version of Python and the operating system.

    Examples
    --------
    >>> check_python((3, 10, 1), "linux").status
    'fail'
    """
    version = version or sys.version_info[:3]
    text = f"{'.'.join(map(str, version))} on {platform}, {sys.executable}"
    if version < (3, 11):
        return Check("python", "fail", f"{text}: 3.11 or newer is needed", "make setup PYTHON=python3.11")
    if platform == "win32":
        return Check("python", "fail", f"{text}: Horovod does not run on Windows", "wsl --install")
    return Check("python", "ok", text)


def check_torch() -> Check:
    """Check that PyTorch is there and loads."""
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "fail", "not installed", f"{shlex.quote(sys.executable)} -m pip install torch")
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that it needs does not load
        reinstall = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall torch"
        return Check("torch", "fail", f"installed, but it does not load: {error}", reinstall)
    devices = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "CPU only"
    return Check("torch", "ok", f"{torch.__version__}, {devices}")


def horovod_facts(timeout: float = 60.0) -> Mapping[str, Any]:
    """Load Horovod in a process of its own, and ask it what it is.

    Parameters
    ----------
    timeout : float
        Seconds to wait for it.

    Returns
    -------
    mapping
        ``version``, ``torch`` and ``built_for`` (versions), ``gloo`` and ``nccl`` (whether they are built in), and
        ``cuda`` (whether PyTorch sees a GPU). Or only ``error``, why there is nothing to tell; empty if not installed.
    """
    if importlib.util.find_spec("horovod") is None:
        return {"error": ""}
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _HOROVOD_FACTS], capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not load within {timeout:.0f} s"}
    if done.returncode < 0:
        return {"error": f"loading it ended in {signal.Signals(-done.returncode).name}"}
    if done.returncode > 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    facts: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def check_horovod(facts: Mapping[str, Any]) -> Check:
    """Check that Horovod is there, and built for this PyTorch, with Gloo.

    Parameters
    ----------
    facts : mapping
        What `horovod_facts` returns.

    Examples
    --------
    >>> check_horovod({"error": ""}).detail
    'not installed, so ranks can be started by torchrun or be virtual, not by horovodrun'
    """
    if "error" in facts:
        reason = facts["error"]
        detail = (
            f"installed, but it does not load: {reason}"
            if reason
            else "not installed, so ranks can be started by torchrun or be virtual, not by horovodrun"
        )
        return _build(detail)
    version = facts["version"]
    if facts["built_for"] != facts["torch"]:
        detail = f"{version} was built for PyTorch {facts['built_for']}, and {facts['torch']} is installed"
        return _build(detail)
    if not facts["gloo"]:
        return _build(f"{version} was built without Gloo, which `horovodrun --gloo` and every ring on CPU need")
    kinds = "with Gloo and NCCL" if facts["nccl"] else "with Gloo, without NCCL"
    detail = f"{version}, built for PyTorch {facts['built_for']}, {kinds}"
    if facts["cuda"] and not facts["nccl"]:
        slow = f"{detail}: tensors on a GPU travel through host memory"
        return Check("horovod", "warn", slow, f"HOROVOD_GPU_OPERATIONS=NCCL {BUILD_COMMAND}")
    return Check("horovod", "ok", detail)


def _build(detail: str) -> Check:
    """What only a build mends; a wheel of Slackring does not bring the builder."""
    where = "" if _BUILDER.is_file() else "; what builds it is in a clone of the repository"
    return Check("horovod", "fail", detail + where, BUILD_COMMAND)


def addresses() -> dict[str, list[str]]:
    """Give the IPv4 addresses of each network interface that is up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: [entry.address for entry in entries if entry.family.name == "AF_INET"]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: ips for name, ips in found.items() if ips}


def check_network(interfaces: Mapping[str, Sequence[str]]) -> Check:
    """Check that ranks can reach each other, on one machine and between machines.

    Parameters
    ----------
    interfaces : mapping
        What `addresses` returns.

    Examples
    --------
    >>> check_network({"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "docker0": ["172.17.0.1"]}).detail
    'lo on this machine, eth0 (10.0.0.2) to others'
    >>> check_network({"eth0": ["10.0.0.2"]}).status
    'fail'
    """
    loopback = [name for name, ips in interfaces.items() if any(ip.startswith("127.") for ip in ips)]
    if not loopback:
        missing = "no loopback interface is up; ranks on one machine need it"
        return Check("network", "fail", missing, "ip link set lo up")
    others = {n: ips for n, ips in interfaces.items() if n not in loopback and not n.startswith(VIRTUAL_INTERFACES)}
    here = f"{loopback[0]} on this machine"
    if not others:
        return Check("network", "ok", f"{here}, none to others")
    listed = ", ".join(f"{name} ({ips[0]})" for name, ips in others.items())
    if len(others) > 1:
        detail = f"{here}; to others one of {listed}: name it, since Horovod may pick one that leads nowhere"
        return Check("network", "warn", detail, f"horovodrun --network-interfaces {next(iter(others))} ...")
    return Check("network", "ok", f"{here}, {listed} to others")


def usable_cores(cpu_max: str | None = None, affinity: int | None = None) -> int:
    """Count the cores that this process may use: its affinity, and a container's quota.

    Parameters
    ----------
    cpu_max : str, optional
        The text of a ``cpu.max``; this process's control group by default.
    affinity : int, optional
        The cores of the affinity mask; this process's by default.

    Examples
    --------
    >>> usable_cores("150000 100000", affinity=8), usable_cores("max 100000", affinity=8)
    (2, 8)
    """
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cpu_max is None:
        path = Path("/sys/fs/cgroup/cpu.max")
        cpu_max = path.read_text() if path.exists() else "max 100000"
    quota, period = cpu_max.split()
    return affinity if quota == "max" else max(1, min(affinity, math.ceil(int(quota) / int(period))))


def check_threads(cores: int, ranks: int, threads: int | None) -> Check:
    """Check that the ranks' threads fit the cores.

    Parameters
    ----------
    cores : int
        What `usable_cores` returns.
    ranks : int
        Ranks on this machine.
    threads : int or None
        ``OMP_NUM_THREADS``; None when it is not set, and each rank's PyTorch takes a thread a core.

    Examples
    --------
    >>> check_threads(cores=8, ranks=4, threads=None).remedy
    'export OMP_NUM_THREADS=2'
    """
    each = cores if threads is None else threads
    share = max(1, cores // ranks)
    said = "OMP_NUM_THREADS is not set" if threads is None else f"OMP_NUM_THREADS={threads}"
    detail = f"{cores} cores; {said}, so {ranks} ranks run {ranks * each} threads"
    if ranks * each > max(cores, ranks):
        return Check("threads", "warn", f"{detail}, which slow each other down", f"export OMP_NUM_THREADS={share}")
    if ranks > cores:
        return Check("threads", "warn", f"{detail}: they share cores, so their speeds are not their own", "")
    return Check("threads", "ok", detail)


def end_tree(process: subprocess.Popen[str], grace: float = 3.0) -> None:
    """End a process and all that it started: first politely, after `grace` seconds by force."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        # Listed before anything ends: a child whose parent is gone cannot be found any more.
        family = [*root.children(recursive=True), root]
        for signal_name in ("terminate", "kill"):
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    getattr(member, signal_name)()
            family = psutil.wait_procs(family, timeout=grace)[1]
    process.wait()


def _reason(output: str) -> str:
    """Find the line that tells most in what the launcher printed: the last of a rank's, or else the very last."""
    lines = output.strip().splitlines() or ["no output"]
    of_ranks = [line.partition("<stderr>:")[2] for line in lines if re.match(r"\[\d+\]<stderr>:", line)]
    # Once a rank has failed the launcher ends the others, and their shells say so.
    telling = [line for line in of_ranks if line.strip() not in ("", "Terminated", "Killed")]
    return (telling or of_ranks or lines)[-1]


def check_allreduce(ranks: int = 2, timeout: float = 60.0, rank_program: str = _RANK) -> Check:
    """Start real ranks on this machine and let them add up their numbers.

    Parameters
    ----------
    ranks : int
        How many.
    timeout : float
        Seconds; whatever still runs then is ended.
    rank_program : str
        What each rank runs.
    """
    loopback = next((name for name, ips in addresses().items() if "127.0.0.1" in ips), "lo")
    # Horovod would look for an interface by itself, which takes long and can find one that leads nowhere.
    command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(ranks)]
    command += ["--network-interfaces", loopback, sys.executable, "-W", "ignore", "-c", rank_program]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    environment |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(timeout)), "OMP_NUM_THREADS": "1"}
    launch = f"horovodrun --gloo -np {ranks} --network-interfaces {loopback}"
    typed = f"{launch} python -c 'import horovod.torch as hvd; hvd.init()'"
    started = time.monotonic()
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            late = f"{ranks} ranks did not finish within {timeout:.0f} s on {loopback}"
            return Check("all-reduce", "fail", late, typed)
        finally:
            end_tree(process)
    total = ranks * (ranks + 1) // 2
    if process.returncode != 0 or any(f"rank {rank} sum {total}" not in output for rank in range(ranks)):
        return Check("all-reduce", "fail", f"{ranks} ranks on {loopback} failed: {_reason(output)}", typed)
    took = time.monotonic() - started
    return Check("all-reduce", "ok", f"{ranks} ranks on {loopback} agree, {took:.1f} s with their start")


def examine(ranks: int = 2, timeout: float = 60.0) -> Iterator[Check]:
    """Run every check, one after the other.

    Parameters
    ----------
    ranks : int
        How many ranks are meant to run on this machine, and are started to try it.
    timeout : float
        Seconds that these may take.

    Yields
    ------
    Check
        What each found, as soon as it is known.
    """
    yield check_python()
    yield check_torch()
    horovod = check_horovod(horovod_facts(timeout))
    yield horovod
    yield check_network(addresses())
    omp = os.environ.get("OMP_NUM_THREADS", "")
    yield check_threads(usable_cores(), ranks, int(omp) if omp.isdecimal() and int(omp) > 0 else None)
    if horovod.status == "fail":
        yield Check("all-reduce", "fail", "not tried, since Horovod cannot run", horovod.remedy)
    else:
        yield check_allreduce(ranks, timeout)


def exit_status(checks: Iterable[Check]) -> int:
    """Give the exit status that stands for these checks: 1 when one fails.

    Examples
    --------
    >>> exit_status([Check("network", "ok", "lo"), Check("threads", "warn", "4 ranks share 2 cores")])
    0
    """
    return int(any(check.status == "fail" for check in checks))


def report(checks: Iterable[Check], console: Console) -> None:
    """Print a table of the checks, and below it the commands that mend what is wrong.

    Examples
    --------
    >>> report([Check("network", "fail", "no loopback", "ip link set lo up")], Console(width=60))
      network   fail  no loopback
    <BLANKLINE>
    network: ip link set lo up
    """
    checks = list(checks)
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", escape(check.detail))
    console.print(table)
    remedies = [check for check in checks if check.remedy]
    if remedies:
        console.print()
    else:
        console.print("\nA rule helps where ranks differ or the network is slow; slackring compare tells by how much.")
    for check in remedies:
        # Not wrapped, so that the command can be copied.
        console.print(f"{check.name}: [bold]{escape(check.remedy)}[/]", soft_wrap=True)
