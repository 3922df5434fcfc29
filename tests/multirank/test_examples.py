"""The examples, and scripts that are started wrongly, as users start them."""

from __future__ import annotations

import difflib
import json
import re
import runpy

import pytest
from tests.multirank.launchers import alone, horovodrun, torchrun
from tests.multirank.pool import ROOT

pytest.importorskip("horovod.torch")
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("start", "ranks", "name"),
    [
        # The scripts before migration have nothing of this package: one rank shows that they learn.
        (alone, 1, "horovod_digits.py"),
        (torchrun, 1, "ddp_digits.py"),
        (alone, 1, "amp_digits.py"),
        (horovodrun, 2, "slackring_digits.py"),
        (torchrun, 2, "slackring_ddp_digits.py"),
        (horovodrun, 2, "slackring_amp_digits.py"),
    ],
)
def test_examples_learn(start, ranks, name):
    done = start(ranks, str(EXAMPLES / name))
    assert done.returncode == 0, done.stderr
    said = re.findall(r"accuracy on the test set: (0\.\d+)", done.stdout)
    assert len(said) == 1, done.stdout
    assert float(said[0]) >= 0.93


def code(name):
    """Lines of an example without its docstring and comments."""
    text = (EXAMPLES / name).read_text().split('"""', 2)[2]
    lines = [line.partition("  # ")[0].rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("before", "after", "removed", "added"),
    [
        (
            "horovod_digits.py",
            "slackring_digits.py",
            3,
            [
                "import slackring as sr",
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                "optimizer = sr.DistributedOptimizer(optimizer, "
                'rule="losp:k_max=8", named_parameters=model.named_parameters())',
                "optimizer.step(samples=len(x))",
                "optimizer.join()",
            ],
        ),
        (
            "ddp_digits.py",
            "slackring_ddp_digits.py",
            4,
            [
                "import slackring as sr",
                "for tensor in model.state_dict().values():",
                "tensor.copy_(sr.broadcast(tensor))",
                "optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
                'optimizer = sr.DistributedOptimizer(optimizer, rule="losp:k_max=8", named_buffers=model.named_buffers())',
                "optimizer.step(samples=len(x))",
                "optimizer.join()",
            ],
        ),
        (
            "amp_digits.py",
            "slackring_amp_digits.py",
            5,
            [
                "import horovod.torch as hvd",
                "import slackring as sr",
                "hvd.init()",
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
                'optimizer = sr.DistributedOptimizer(optimizer, rule="losp:k_max=8", max_grad_norm=1.0)',
                "loader = DataLoader(train, "
                "batch_sampler=sr.data.RoundSampler(train, batch_size=16, optimizer=optimizer))",
                "scaler.step(optimizer, samples=len(x))",
                "optimizer.join()",
                "if hvd.rank() == 0:",
                'print(f"accuracy on the test set: {int(correct) / 297:.3f}")',
            ],
        ),
    ],
)
def test_migration_changes_few_lines(before, after, removed, added):
    changes = [line for line in difflib.ndiff(code(before), code(after)) if line[0] in "-+"]
    assert [line[2:].strip() for line in changes if line[0] == "+"] == added
    assert len([line for line in changes if line[0] == "-"]) == removed


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


def test_the_benchmark_prints_all_three_figures():
    script = str(ROOT / "benchmarks" / "step_costs.py")
    done = horovodrun(2, script, "--steps", "3", "--compute", "0", "--repetitions", "3", "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(re.sub(r"^\[0\]<stdout>:", "", done.stdout, flags=re.MULTILINE))
    local = ["seconds added to a local step"] * 2 + ["a local step over an addition"]
    assert [(found["what"], found["parameters"]) for found in figures] == [
        ("a step over Horovod's", 11_689_512),
        *[(what, size) for size in (1_000_000, 10_000_000) for what in local],
    ]
    assert all(found["seconds"] > 0 and found["low"] <= found["median"] <= found["high"] for found in figures)
    benchmark = runpy.run_path(script)
    lines = benchmark["table"]([benchmark["Figure"](**found) for found in figures]).splitlines()
    assert [line.split()[-1] for line in lines] == ["most", "1.050", *["25", "25", "1.150"] * 2]
