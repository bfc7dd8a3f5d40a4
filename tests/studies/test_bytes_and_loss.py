"""Bytes against loss: every row trains and weighs what its formula says, peers are reported, nothing is lost."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import _bytes_picture
import _bytes_pool
import _bytes_rows
import _bytes_tables
import _bytes_training
import bytes_and_loss
import pytest
import torch
from _bytes_pool import Task
from _bytes_rows import Ours, Peer
from _bytes_training import Setting

OURS = [row for row in _bytes_rows.rows() if isinstance(row, Ours)]
PEERS = [row for row in _bytes_rows.rows() if isinstance(row, Peer)]


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bytes_training, "WINDOWS", 8)


@pytest.fixture(scope="module")
def setting(training: Any) -> Setting:
    return Setting(
        training.data, "micro", training.vocabulary, training.sequence, training.steps, training.batch, 1e-3, 2
    )


def test_rows_have_names_of_their_own_and_come_by_tier() -> None:
    rows = _bytes_rows.rows()
    assert len({row.name for row in rows}) == len(rows)
    assert [row.tier for row in rows] == sorted(row.tier for row in rows)
    assert {"D", "split + 8bit", "split8 + 8bit", "A", "C", "FlashAdamW"} <= {row.name for row in rows}


def test_no_recipe_is_left_out() -> None:
    from narrowgauge import recipes

    there = {_bytes_rows._kept(row.recipe) for row in OURS}
    assert there >= {_bytes_rows._kept(recipes.get(name)) for name in recipes.names()}


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.name)
def test_a_row_trains_and_weighs_what_its_formula_says(row: Ours, setting: Setting) -> None:
    result = _bytes_training.train(row.name, replace(setting, steps=4), 0)
    assert math.isfinite(result["validation_loss"])
    assert not result["diverged"]
    weighed = result["bytes"]
    assert weighed["total"] == pytest.approx(sum(weighed[key] for key in ("weights", "gradients", "states")))
    if row.formula() is not None:
        # Small parameters keep fp32 moments: 8 bytes for what may take 1, and under a twentieth of this model.
        assert -0.01 < weighed["total"] - row.formula() < 0.05 * 8
    else:
        assert row.embeddings == "fp32"


def test_one_seed_is_one_training(setting: Setting) -> None:
    first, again = (_bytes_training.train("D", setting, 1) for _ in range(2))
    other = _bytes_training.train("D", setting, 2)
    assert first["validation_loss"] == again["validation_loss"] != other["validation_loss"]


def test_exact_weights_in_two_ways_train_alike(setting: Setting) -> None:
    """`split` holds D's fp32 weight in other words: they differ in ties of the visible word alone."""
    small = replace(setting, steps=30, lr=1e-4)  # most updates are below half a unit of bf16
    master, split, plain = (
        _bytes_training.train(name, small, 0)["validation_loss"] for name in ("D", "split", "D-MW")
    )
    # Measured: 1e-5 to 2e-4, and 0.05.
    assert abs(split - master) < 1e-3
    assert plain - master > 0.01


def test_embeddings_are_marked_where_the_row_says_so() -> None:
    row = next(row for row in OURS if row.embeddings)
    model = _bytes_training.build_model("micro", vocabulary=256, sequence=32, seed=0)
    optimizer = row.optimizer(model, {"lr": 1e-3}, 0)
    words = {name: optimizer._engine.plans[p].slots[0].storage.name for name, p in model.named_parameters()}
    assert words["transformer.wte.weight"] == words["transformer.wpe.weight"] == "fp32"
    assert words["transformer.h.0.mlp.c_fc.weight"] == "8bit"


# FlashOptim quantizes on CUDA devices only. Torchao compiles its step: its five rows take a minute or two.
MARKS = {"flashoptim": [pytest.mark.gpu], "torchao": [pytest.mark.slow]}


@pytest.mark.filterwarnings("ignore")  # they are others'
@pytest.mark.parametrize("row", [pytest.param(row, marks=MARKS.get(row.family, ()), id=row.name) for row in PEERS])
def test_a_peer_trains_where_it_can(row: Peer, setting: Setting) -> None:
    if row.refusal() is not None:
        pytest.skip(row.refusal())
    device = "cuda" if row.family == "flashoptim" else "cpu"
    result = _bytes_training.train(row.name, replace(setting, steps=4, device=device), 0)
    assert math.isfinite(result["validation_loss"])
    assert 5 <= result["bytes"]["total"] < 10.1


def test_a_peer_that_is_not_there_says_so() -> None:
    peer = Peer("nobody's", "nothing", _bytes_rows.PEERS, "no_such_package", lambda params, options: None)
    assert peer.refusal() == "no_such_package is not installed"
    assert all((importlib.util.find_spec(row.family) is None) == bool(row.refusal()) for row in PEERS)


def test_the_rate_rises_and_falls() -> None:
    setting = Setting(steps=100, warmup=10, lr=1.0, final=0.1)
    rates = [setting.rate(step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_a_rate_that_is_a_tensor_is_set_in_place() -> None:
    rate = torch.tensor(1.0, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=rate)
    _bytes_training._set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.25


def test_memory_is_counted_once_wherever_it_hangs() -> None:
    class Kept:
        def __init__(self, data: torch.Tensor) -> None:
            self.data, self.name, self.none = data, "m", None

    shared = torch.zeros(64)
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = optimizer.state[model.weight]
    state |= {
        "a": shared,
        "b": shared[3:],
        "c": Kept(torch.zeros(16)),
        "d": [torch.zeros(8, dtype=torch.uint8)],
        "e": 3,
    }
    weighed = _bytes_training.measured_bytes(model, optimizer)
    assert weighed == {"weights": 4.0, "gradients": 0.0, "states": (256 + 64 + 8) / 64, "total": 4 + 328 / 64}


def test_the_first_questions_are_answered_first() -> None:
    rows = _bytes_rows.rows()
    tasks = bytes_and_loss.tasks(rows, [Setting(), Setting(beta2=0.95)], 2)
    tiers = {row.name: row.tier for row in rows}
    anchors = [row.name for row in rows if row.tier == 0]
    assert [(t.row, t.seed) for t in tasks[: 2 * len(anchors)]] == [(name, s) for s in (0, 1) for name in anchors]
    assert [3 if t.number else tiers[t.row] for t in tasks] == sorted(
        3 if t.number else tiers[t.row] for t in tasks
    )
    assert len(set(tasks)) == len(tasks) == 2 * (len(rows) + len(anchors))


@pytest.mark.usefixtures("forked")
def test_a_failure_takes_nothing_with_it(setting: Setting) -> None:
    """An unknown row raises in its process; the next one is served by a fresh process."""
    told = {}
    tasks = [Task("no such row", 0, setting, 0), Task("D", 0, replace(setting, steps=3), 0)]
    with _bytes_pool.Pool(1) as pool:
        left = pool.run(tasks, 600.0, lambda task, result: told.update({task.row: result}))
        assert left == []
        assert told["no such row"]["failed"].startswith("StopIteration")
        assert math.isfinite(told["D"]["validation_loss"])
        assert pool.run(tasks, 0.0, lambda task, result: None) == tasks


@pytest.mark.usefixtures("forked")
def test_the_study_writes_what_it_found(setting: Setting, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results.json"
    rows = bytes_and_loss.chosen(["D", "A", "FlashAdamW"], ["A*"])
    assert [row.name for row in rows] == ["D", "FlashAdamW"]
    short = replace(setting, steps=3)
    bytes_and_loss.study(out, rows, [short], rates=[1e-3], seeds=1, jobs=1, minutes=10)
    results = json.loads(out.read_text())
    assert results["unfinished"] == []
    assert {run["row"] for run in results["runs"]} == {"D", "FlashAdamW"}
    if not torch.cuda.is_available():
        failed = next(run for run in results["runs"] if run["row"] == "FlashAdamW")
        assert failed["failed"]
    assert str(tmp_path) not in out.read_text()
    assert "failed: " in _bytes_tables.rows(results) or torch.cuda.is_available()


def made_up(**differences: list[float | None]) -> dict[str, Any]:
    """Results of three seeds; None is a run that diverged."""
    start = [5.0, 5.02, 4.98]
    runs = [
        {
            "row": name.replace("_", " + "), "setting": 0, "seed": seed, "diverged": d is None,
            "validation_loss": None if d is None else start[seed] + d,
            "bytes": {"weights": 2.0, "gradients": 2.0, "states": 3.0, "total": 7.0},
        }
        for name, found in differences.items() for seed, d in enumerate(found)
    ]  # fmt: skip
    rows = [{"name": n.replace("_", " + "), "title": "", "family": "ours", "formula": 7.0} for n in differences]
    setting = {"model": "gpt2", "beta2": 0.999}
    return {
        "runs": runs,
        "rows": rows,
        "settings": [setting],
        "training": {"seeds": 3, "steps": 9},
        "unfinished": [],
    }


def test_tables_say_what_is_within_the_spread() -> None:
    results = made_up(
        D=[0.0, 0.0, 0.0], split_log8=[0.001, -0.002, 0.004], split_8bit=[0.1, 0.2, 0.3], x=[None] * 3
    )
    assert _bytes_tables.spread(results) == pytest.approx(0.02)
    lines = {line.split(" | ")[0].strip("| `"): line for line in _bytes_tables.rows(results).splitlines()}
    assert lines["D"].endswith("| reference |")
    assert "+0.0010 | -0.0020 … +0.0040 | yes" in lines["split + log8"]
    assert "+0.2000 | +0.1000 … +0.3000 | no" in lines["split + 8bit"]
    assert "| diverged |" in lines["x"]
    assert "| 7.00 | 7.00 | 5.00 |" in lines["D"]
    assert "| 5.0000 | 0.0200 | +0.0010 (-0.0020 … +0.0040) | +0.2000" in _bytes_tables.anchors(results)
    facts = _bytes_tables.facts(results)
    assert facts["loss_split___log8"] == "+0.0010"
    assert facts["spread"] == "0.0200"


def test_labels_keep_clear_of_each_other() -> None:
    """Ten rows at nearly one place: no box on another."""
    import numpy as np
    from matplotlib.transforms import Bbox

    inside, taken = Bbox.from_bounds(0, 0, 1200, 800), []
    for number in range(10):
        place = np.array([600.0 + number, 400.0])
        box, _ = _bytes_picture._free(place, (120, 14), taken, inside, 1.0)
        assert not any(box.overlaps(other) for other in taken)
        taken.append(box)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    results = made_up(
        D=[0.0, 0.0, 0.0], split_log8=[0.001, -0.002, 0.004], split_8bit=[0.1, 0.2, 0.3], x=[None] * 3
    )
    figure = _bytes_picture.bytes_against_loss(results)
    figure.savefig(tmp_path / "picture.png")
    names = {text.get_text() for text in figure.axes[0].texts}
    assert names == {"D", "split + log8", "split + 8bit"}
