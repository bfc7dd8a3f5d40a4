"""Plans by name: what the command takes, `plan_memory` takes too, and plans the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from libraries import library
from narrowgauge import recipes
from narrowgauge.cli import main
from narrowgauge.linear import SWITCHBACK
from narrowgauge.trainers._models import configuration


def commanded(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the command plans."""
    assert main(["plan", *arguments, "--json", str(folder / "plan.json")]) == 0
    return json.loads((folder / "plan.json").read_text())["plans"]


def test_a_preset_several_recipes_and_a_plan_by_name(tmp_path: Path) -> None:
    named = recipes.plan_memory(
        "micro", ["D", recipes.get("adamw8bit")], batch=2, sequence=64, linear="SWITCHBACK:e4m3"
    )
    config = configuration("micro", vocabulary=50257, sequence=64)
    plan = SWITCHBACK.with_format("e4m3")
    options = {"batch": 2, "sequence": 64, "linear": plan}
    assert named == [recipes.plan_memory(config, name, **options) for name in ("master", "adamw8bit")]
    given = ["micro", "--recipe", "D,adamw8bit", "--batch", "2", "--sequence", "64", "--linear", "SWITCHBACK:e4m3"]
    assert commanded(tmp_path, *given) == [one.record() for one in named]


def test_a_number_of_parameters_and_one_recipe() -> None:
    assert recipes.plan_memory("1.5B", "bf16") == recipes.plan_memory(1_500_000_000, "bf16")
    (alone,) = recipes.plan_memory("7B", ("bf16",))
    assert alone == recipes.plan_memory(7 * 10**9, "bf16")


class Tiny(nn.Module):
    """A classifier as timm makes them: it says what its images are, and takes them in the dtype of its weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, 32, 32)}
        self.stem, self.norm, self.head = nn.Conv2d(3, 16, 4, 4), nn.BatchNorm2d(16), nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.stem(x)).mean((2, 3)))


def test_a_model_of_timm_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []

    def create_model(name: str, **options: Any) -> Tiny:
        made.append((name, options))
        return Tiny(**options)

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    plan = recipes.plan_memory("timm:tiny.in1k", "adamw8bit-split8", batch=4)
    assert made == [("tiny.in1k", {"num_classes": 1000})]
    assert plan == recipes.plan_memory(Tiny(1000), "adamw8bit-split8", batch=4)
    assert (plan.example, plan.sequence, plan.model) == ("image", None, "Tiny")
    (found,) = commanded(tmp_path, "timm:tiny.in1k", "--classes", "7", "--recipe", "bf16", "--batch", "4")
    assert found["parameters"] == sum(p.numel() for p in Tiny(7).parameters())
    assert main(["plan", "timm:tiny", "--kq-norm"]) == 2


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_timms_own_models(name: str) -> None:
    timm = library("timm")
    model = timm.create_model(name, num_classes=10)
    plan = recipes.plan_memory(model, "adamw8bit-split8", batch=2)
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    by_name = recipes.plan_memory(f"timm:{name}", "adamw8bit-split8", batch=2)
    assert by_name.model == plan.model
    assert 0 < by_name.held["weights"] - plan.held["weights"] < 1000 * 2 * 300
    assert by_name.largest_batch("1GB") > 2


def test_what_names_nothing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"^model_or_config must be a preset \(micro, .* got 'gpt5'$"):
        recipes.plan_memory("gpt5", "bf16")
    with pytest.raises(ValueError, match=r"plan must be a name such as SWITCHBACK.*, got 'FOO'"):
        recipes.plan_memory("micro", "bf16", linear="FOO")
    with pytest.raises(ValueError, match="recipe must be a Recipe, got 5"):
        recipes.plan_memory("micro", ["bf16", 5])
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"^model_or_config: timm:tiny needs timm: pip install timm$"):
        recipes.plan_memory("timm:tiny", "bf16")
    assert main(["plan", "timm:tiny"]) == 2
    assert capsys.readouterr().err == "narrowgauge: MODEL: timm:tiny needs timm: pip install timm\n"
