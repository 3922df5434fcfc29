"""The doctor: each thing that can be wrong is faked once, and what is right is tried on real ranks."""

from __future__ import annotations

import importlib.machinery
import io
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from slackring import doctor
from slackring.doctor import Check

FACTS: dict[str, Any] = {
    "version": "0.28.1",
    "torch": "2.13.0+cpu",
    "built_for": "2.13.0+cpu",
    "gloo": True,
    "nccl": False,
    "cuda": False,
}


def test_module_imports_neither_torch_nor_horovod() -> None:
    code = "import sys, slackring.doctor; print(sorted({'torch', 'horovod'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python() -> None:
    assert doctor.check_python().status == "ok"
    old = doctor.check_python((3, 9, 2), "linux")
    assert (old.status, old.remedy) == ("fail", "make setup PYTHON=python3.11")
    assert doctor.check_python((3, 11, 0), "win32").status == "fail"


def test_torch_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check = doctor.check_torch()
    assert (check.status, check.detail) == ("fail", "not installed")
    assert check.remedy.endswith("-m pip install torch")


def test_torch_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: importlib.machinery.ModuleSpec(name, loader=None))
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the import fail
    check = doctor.check_torch()
    assert check.status == "fail"
    assert "does not load" in check.detail
    assert "--force-reinstall" in check.remedy


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({}, "ok", "with Gloo, without NCCL"),
        ({"nccl": True, "cuda": True}, "ok", "with Gloo and NCCL"),
        ({"cuda": True}, "warn", "without NCCL: tensors on a GPU travel through host memory"),
        ({"built_for": "2.12.0"}, "fail", "built for PyTorch 2.12.0, and 2.13.0+cpu is installed"),
        ({"gloo": False}, "fail", "without Gloo"),
    ],
)
def test_horovod(change: dict[str, Any], status: str, words: str) -> None:
    check = doctor.check_horovod({**FACTS, **change})
    assert check.status == status
    assert words in check.detail
    assert (check.remedy == doctor.BUILD_COMMAND) == (status == "fail")


def _package(folder: Path, body: str) -> None:
    """Put a package that calls itself Horovod where the doctor's process finds it first."""
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text(body)


@pytest.mark.parametrize(
    ("body", "timeout", "words"),
    [
        ("raise ImportError('undefined symbol: _ZN2at')", 60, "ImportError: undefined symbol: _ZN2at"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", 60, "SIGABRT"),
        ("import time; time.sleep(60)", 1, "did not load within 1 s"),
    ],
)
def test_horovod_that_breaks_its_process(
    body: str, timeout: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path, body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: importlib.machinery.ModuleSpec(name, loader=None))
    check = doctor.check_horovod(doctor.horovod_facts(timeout))
    assert check.status == "fail"
    assert words in check.detail
    assert check.remedy == doctor.BUILD_COMMAND


def test_horovod_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor.horovod_facts() == {"error": ""}


@pytest.mark.parametrize(
    ("interfaces", "status", "words"),
    [
        ({"lo": ["127.0.0.1"]}, "ok", "none to others"),
        ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "veth12": ["172.18.0.1"]}, "ok", "eth0 (10.0.0.2) to others"),
        ({"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "ib0": ["10.1.0.2"]}, "warn", "eth0 (10.0.0.2), ib0 (10.1.0.2)"),
        ({"eth0": ["10.0.0.2"]}, "fail", "no loopback"),
        ({}, "fail", "no loopback"),
    ],
)
def test_network(interfaces: dict[str, Sequence[str]], status: str, words: str) -> None:
    check = doctor.check_network(interfaces)
    assert check.status == status
    assert words in check.detail
    assert bool(check.remedy) == (status != "ok")


def test_network_of_this_machine_has_a_loopback() -> None:
    assert any("127.0.0.1" in ips for ips in doctor.addresses().values())


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "status", "remedy"),
    [
        (8, 4, 2, "ok", ""),
        (8, 4, 1, "ok", ""),
        (8, 4, None, "warn", "export OMP_NUM_THREADS=2"),
        (2, 2, 2, "warn", "export OMP_NUM_THREADS=1"),
        (2, 4, 1, "warn", ""),
        (2, 4, 2, "warn", "export OMP_NUM_THREADS=1"),
    ],
)
def test_threads(cores: int, ranks: int, threads: int | None, status: str, remedy: str) -> None:
    check = doctor.check_threads(cores, ranks, threads)
    assert (check.status, check.remedy) == (status, remedy)


@pytest.mark.parametrize(
    ("cpu_max", "affinity", "cores"),
    [("max 100000", 4, 4), ("50000 100000", 4, 1), ("250000 100000", 4, 3), ("800000 100000", 4, 4)],
)
def test_cores_respect_a_containers_quota(cpu_max: str, affinity: int, cores: int) -> None:
    assert doctor.usable_cores(cpu_max, affinity) == cores


def _running(marker: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(marker in part for part in p.info["cmdline"] or ())]


@pytest.mark.multirank
def test_allreduce_of_real_ranks() -> None:
    check = doctor.check_allreduce(ranks=2, timeout=60)
    assert check.status == "ok", check.detail
    assert check.detail.startswith("2 ranks on lo agree")


@pytest.mark.multirank
def test_allreduce_that_fails_says_why() -> None:
    # The other rank is ended by the launcher, which must not hide the reason.
    program = "import os, time\ntime.sleep(30 * int(os.environ['HOROVOD_RANK']))\nraise SystemExit('no such luck')"
    check = doctor.check_allreduce(ranks=2, timeout=60, rank_program=program)
    assert check.status == "fail"
    assert check.detail == "2 ranks on lo failed: no such luck"
    assert check.remedy.startswith("horovodrun --gloo -np 2 --network-interfaces lo")


@pytest.mark.multirank
def test_allreduce_that_hangs_is_ended_with_all_its_processes() -> None:
    marker = uuid.uuid4().hex
    # A rank that also refuses to end politely.
    program = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)  # {marker}"
    started = time.monotonic()
    check = doctor.check_allreduce(ranks=2, timeout=4, rank_program=program)
    assert check.status == "fail"
    assert "did not finish within 4 s" in check.detail
    assert time.monotonic() - started < 60
    assert _running(marker) == []


def test_allreduce_is_not_tried_without_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "horovod_facts", lambda timeout: {"error": ""})
    monkeypatch.setattr(doctor, "check_allreduce", lambda *args: pytest.fail("must not start ranks"))
    checks = {check.name: check for check in doctor.examine()}
    assert list(checks) == ["python", "torch", "horovod", "network", "threads", "all-reduce"]
    assert checks["all-reduce"].status == "fail"
    assert checks["all-reduce"].remedy == doctor.BUILD_COMMAND
    assert doctor.exit_status(checks.values()) == 1


def test_a_malformed_thread_count_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "horovod_facts", lambda timeout: {"error": ""})
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    threads = next(check for check in doctor.examine() if check.name == "threads")
    assert "OMP_NUM_THREADS is not set" in threads.detail


def test_exit_status_is_one_only_for_a_failure() -> None:
    ok, warn, fail = Check("a", "ok", ""), Check("b", "warn", ""), Check("c", "fail", "")
    assert doctor.exit_status([]) == 0
    assert doctor.exit_status([ok, warn]) == 0
    assert doctor.exit_status([ok, fail, warn]) == 1


def test_report_keeps_commands_on_one_line_and_brackets_as_they_are() -> None:
    command = "python cluster_configs/horovod/build.py " + "--jobs 2 " * 20
    written = io.StringIO()
    doctor.report([Check("horovod", "fail", "symbol [_ZN2at] missing", command)], Console(file=written, width=60))
    lines = written.getvalue().splitlines()
    assert f"horovod: {command}" in lines
    assert "symbol [_ZN2at] missing" in written.getvalue()
