"""`narrowgauge.compare` of a model of one's own: one start and one order of batches for all, settings, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import narrowgauge as ng
from narrowgauge.recipes import _book
from narrowgauge.rules import Rule, Slot
from narrowgauge.trainers import CompareProgress, Comparison, Run, _compare_run

pytestmark = pytest.mark.usefixtures("one_thread")

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


class Silent(CompareProgress):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.rounds: list[tuple[int, int]] = []
        self.counts: list[int] = []

    def begin(self, name: str, seed: int) -> None:
        self.begun.append((name, seed))

    def finish(self, name: str, run: Run, so_far: Comparison) -> None:
        assert so_far.results["interrupted"]
        self.counts.append(sum(len(row["seeds"]) for row in so_far.results["recipes"].values()))

    def timed(self, done: int, total: int) -> None:
        self.rounds.append((done, total))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))


def loss(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    return (model(x.to(next(model.parameters()).dtype)).float() - x).square().mean()


def batches() -> Any:
    return DataLoader(TensorDataset(X), batch_size=16, shuffle=True)


def compare(recipes: Any, make: Any = make_model, of: Any = loss, data: Any = batches, **more: Any) -> Comparison:
    return ng.compare(recipes, make, of, data, **{"steps": 4, "progress": Silent(), **more})


def test_recipes_of_a_seed_share_weights_and_batches_whatever_the_model_draws() -> None:
    seen: dict[str, list[Any]] = {}

    class Watching(Silent):
        def begin(self, name: str, seed: int) -> None:
            seen[f"{name} {seed}"] = []
            seen["now"] = seen[f"{name} {seed}"]

    def draws(model: nn.Module, batch: Any) -> Tensor:
        seen["now"].append(batch[0])
        if model[0].weight.dtype == torch.bfloat16:
            torch.rand(3)  # as dropout may draw other numbers in another dtype
        return loss(model, batch)

    def starts() -> nn.Module:
        model = make_model()
        seen["now"].append(model[0].weight.detach().bfloat16().float())
        return model

    before = torch.get_rng_state()
    found = compare(["fp32", "A"], starts, draws, steps=7, seeds=2, progress=Watching())
    assert torch.equal(torch.get_rng_state(), before)
    assert list(found.results["recipes"]) == ["fp32", "A"]
    for seed in (0, 1):
        one, other = seen[f"fp32 {seed}"], seen[f"A {seed}"]
        assert len(one) == 8  # the weights, and batches of three epochs
        assert all(map(torch.equal, one, other))
    assert not torch.equal(seen["A 0"][0], seen["A 1"][0])
    assert not torch.equal(seen["A 0"][1], seen["A 0"][4])  # another order in the next epoch


def test_it_prints_the_table_and_saves_the_files_of_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    progress = Silent()
    found = compare(
        ["D", "lion8bit@lr=3e-5,weight_decay=0"], seeds=2, steps=10, lr=1e-3, weight_decay=0.5,
        validation=[(X[:32],), (X[32:],)], progress=progress, facts={"data": {"source": "forty points"}},
    )  # fmt: skip
    assert progress.begun == [(name, seed) for seed in (0, 1) for name in found.results["recipes"]]
    assert progress.counts == [1, 2, 3, 4]
    assert progress.rounds == [(1, 2), (2, 2)]  # ten steps: one round
    row = found.results["recipes"]["lion8bit@lr=3e-5,weight_decay=0"]
    assert row["settings"] == {"lr": 3e-5, "weight_decay": 0}
    assert row["lr"] == 3e-5
    assert found.results["recipes"]["D"]["lr"] == 1e-3
    assert len(row["step_ms_quartiles"]) == 2
    assert f"{row['validation_loss']:.4f}" in str(found)
    assert "\nD: bf16 with fp32 master weights and fp32 states.\n" in str(found)
    assert repr(found) == str(found)
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules if name.startswith("narrowgauge.cli._report")]:
            without.delitem(sys.modules, name)
        without.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ModuleNotFoundError, match=r"a page needs matplotlib.*; install it with: pip install"):
            found.save(tmp_path / "no page")
    assert json.loads((tmp_path / "no page" / "results.json").read_text()) == found.results
    assert found.save(tmp_path / "new") == tmp_path / "new" / "report.html"
    assert json.loads((tmp_path / "new" / "results.json").read_text()) == found.results
    page = (tmp_path / "new" / "report.html").read_text()
    assert "forty points" in page
    assert "lr 3e-05, weight_decay 0" in page
    assert "Command line" not in page
    assert "Perplexity" not in page


def test_validation_weighs_by_examples_in_evaluation_mode() -> None:
    one, two = (
        compare(["fp32"], validation=parts).results["recipes"]["fp32"]["validation_loss"]
        for parts in ([(X,)], [{"x": (X[:33],)}["x"], (X[33:],)])
    )
    assert one == pytest.approx(two, rel=1e-6)


def test_a_rule_with_three_betas_runs_beside_rules_with_two() -> None:
    class Three(Rule):
        name = "three"
        betas = 3
        moments = (Slot("m", signed=True),)

        def scalars(self, group: Any, step: Any) -> dict[str, Any]:
            return {"lr": group["lr"], "beta": group["betas"][2], "new": 1 - group["betas"][2]}

        def update(self, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
            m = arithmetic.accumulate(moments["m"], grad, s["beta"], s["new"])
            return -s["lr"] * arithmetic.value(m), {"m": m}

    class ThreeBetas(ng.optim.NarrowOptimizer):
        rule = Three()

        def __init__(self, params: Any, lr: float = 0.25, betas: Any = (0.9, 0.99, 0.5), **options: Any) -> None:
            super().__init__(params, {"lr": lr, "betas": betas}, options)

    own = ng.recipes.Recipe("three", "of three betas", torch.float32, optimizer=ThreeBetas)
    found = compare(["fp32", own], betas=(0.9, 0.95), eps=1e-7).results
    assert found["recipes"]["three"]["lr"] == 0.25
    assert "three takes 3 betas, not 2: it has its optimizer's defaults." in found["notes"]
    assert own.with_settings(betas=(0.1, 0.2, 0.3)).apply(make_model()).defaults["betas"] == (0.1, 0.2, 0.3)


def test_steps_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = [0.0], []

    def now(device: torch.device) -> float:
        return clock[0]

    def slow(model: nn.Module, batch: Any) -> Tensor:
        turns.append(model[0].weight.dtype)
        clock[0] += 10.0 if 40 < len(turns) <= 60 else 1.0  # the machine is slower for a while; all recipes see it
        return loss(model, batch)

    monkeypatch.setattr(_compare_run, "now", now)
    found = compare(["fp32", "A"], of=slow, steps=20).results["recipes"]
    rounds = turns[40:]
    assert rounds == ([torch.float32] * 10 + [torch.bfloat16] * 10) * 2
    assert found["fp32"]["step_ms_quartiles"] == found["A"]["step_ms_quartiles"] == [1000.0, 10000.0]
    assert found["A"]["step_overlaps"]


def shared() -> Iterator[Any]:
    return ITERATOR


ITERATOR = iter([(X,)] * 100)
COUNT = iter(range(100))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipes": []}, "recipes must name one or more of fp32, bf16, .*, got none"),
        ({"recipes": "A,B"}, "recipes must be a list of names and recipes, got 'A,B'"),
        ({"recipes": ["A", ng.recipes.get("A")]}, "each recipe once, got A and bf16, which are the same"),
        ({"recipes": [3]}, "recipes must be a Recipe such as .*, got 3"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"seeds": []}, "seeds must be one or more, got none"),
        ({"seeds": [5, 5]}, r"seeds must be each once, got \[5, 5\]"),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"wieght_decay": 0.1}, "wieght_decay must be an argument of compare or of AdamW, and is of none"),
        ({"weights": "split"}, "weights must be an argument of compare or of AdamW"),
        ({"seed": 3}, "seed must be left out"),
        ({"validation": iter([X])}, "validation must be batches that can be read more than once"),
        ({"make": lambda: nn.Identity()}, "make_model.. must give a model with parameters"),
        ({"make": lambda: nn.Linear(8, 8).requires_grad_(False).weight}, "make_model.. must be a torch.nn.Module"),
        ({"make": lambda: nn.Linear(8, 8 + next(COUNT))}, "make_model.. must give the same weights each time"),
        ({"data": lambda: [(torch.full((2, 8), 1.0 + next(COUNT)),)]}, "batches.. must give the same batches each"),
        ({"data": list}, "batches.. must give one batch at least, got none"),
        ({"of": lambda model, batch: model(batch[0].to(model[0].weight.dtype))}, "must return a tensor of one"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare(**{"recipes": ["A", "D"], "steps": 1, **changes})


def test_an_error_of_the_loss_says_what_dtype_the_model_has() -> None:
    with pytest.raises(RuntimeError) as raised:
        compare(["A"], of=lambda model, batch: model(batch[0]).mean())
    assert "recipe 'bf16', whose model is in torch.bfloat16" in raised.value.__notes__[0]


def test_a_recipe_of_ones_own_is_registered_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_book, "_REGISTERED", {})
    own = ng.recipes.Recipe(
        "my-lion", "Lion in bf16", torch.bfloat16, "split8", "8bit", optimizer=ng.optim.Lion8bit
    )
    ng.recipes.register(own)
    ng.recipes.register(own)
    assert ng.recipes.names()[-1] == "my-lion"
    assert ng.recipes.parse("my-lion@lr=1e-5,betas=0.9/0.95,maximize=false") == own.with_settings(
        lr=1e-5, betas=(0.9, 0.95), maximize=False
    )
    for recipe in (own, own.with_settings(lr=3e-5, betas=(0.9, 0.95), maximize=True)):
        assert ng.recipes.parse(recipe.label) == recipe
    with pytest.raises(ValueError, match="name of a recipe must be new, got 'my-lion'"):
        ng.recipes.register(own.with_settings(lr=1.0))
    with pytest.raises(ValueError, match="must be a word without '@'"):
        ng.recipes.register(ng.recipes.Recipe("a@b", "", torch.float32))
    with pytest.raises(ValueError, match=r"lr must be left out: recipe 'my-lion' sets it, got 0\.1"):
        own.with_settings(lr=1.0).apply(make_model(), lr=0.1)
    with pytest.raises(ValueError, match="NAME@KEY=VALUE,KEY=VALUE, got 'my-lion@lr'"):
        ng.recipes.parse("my-lion@lr")
    assert list(compare(["my-lion", "D"], steps=1).results["recipes"]) == ["my-lion", "D"]
