"""The examples, and scripts that are started wrongly, under horovodrun."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.multirank.pool import MARK, ROOT, processes_of_pools

pytest.importorskip("horovod.torch")
EXAMPLES = ROOT / "examples"
HOROVODRUN = [str(Path(sys.executable).with_name("horovodrun")), "--gloo", "--network-interfaces", "lo"]


def horovodrun(ranks, *command, timeout=120):
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    done = subprocess.run(
        [*HOROVODRUN, "-np", str(ranks), "-H", f"localhost:{ranks}", sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    assert not processes_of_pools(mark), "horovodrun left processes running"
    return done


@pytest.mark.parametrize("name", ["horovod_digits.py", "slackring_digits.py"])
def test_examples_learn(name):
    done = horovodrun(2, str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    said = re.findall(r"accuracy on the test set: (0\.\d+)", done.stdout)
    assert len(said) == 1, done.stdout
    assert float(said[0]) >= 0.93


def code(name):
    """Lines of an example without its docstring and comments."""
    text = (EXAMPLES / name).read_text().split('"""', 2)[2]
    lines = [line.partition("  # ")[0].rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_migration_changes_few_lines():
    changes = [
        line for line in difflib.ndiff(code("horovod_digits.py"), code("slackring_digits.py")) if line[0] in "-+"
    ]
    assert [line[2:].strip() for line in changes if line[0] == "+"] == [
        "import slackring as sr",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
        'optimizer = sr.DistributedOptimizer(optimizer, rule="losp:k_max=8", named_parameters=model.named_parameters())',
        "optimizer.step(samples=len(x))",
        "optimizer.join()",
    ]
    assert len([line for line in changes if line[0] == "-"]) == 3


def test_a_script_that_forgets_init_is_told():
    script = (
        "import torch, slackring as sr\n"
        "model = torch.nn.Linear(1, 1)\n"
        "sr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), 'losp')\n"
    )
    done = horovodrun(2, "-c", script)
    assert done.returncode != 0
    assert "RingError: this process is one of several Horovod ranks" in done.stderr
    assert "call hvd.init() first" in done.stderr


def test_the_benchmark_prints_its_tables():
    done = horovodrun(2, str(ROOT / "benchmarks" / "bsp_step.py"), "--steps", "3", "--compute", "0")
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"(hvd\.DistributedOptimizer|slackring bsp|plain SGD|local_sgd|losp) +(\d+\.?\d*) (ms|us)", done.stdout
    )
    assert [name for name, *_ in rows] == [
        "hvd.DistributedOptimizer",
        "slackring bsp",
        *["plain SGD", "local_sgd", "losp"] * 2,
    ]
    assert all(float(number) > 0 for _, number, _ in rows)
