"""A run with a fitted recipe keeps a copy, goes on with that alone, and ends as a model that transformers loads."""

from __future__ import annotations

import re
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from fitted import CPU, Silent, assert_it_goes_on, records, run, weights
from parallel_runs import Trainings

from fitted_recipes import GPT, layers
from narrowgauge import recipes
from narrowgauge.trainers import SettingsError, TrainSettings, config_values, fit
from narrowgauge.trainers._build import build_parts

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def given(small: TrainSettings, tmp_path: Path) -> TrainSettings:
    return replace(small, recipe=str(GPT.save(tmp_path / "mine.toml")))


def test_a_run_goes_on_and_its_folder_repeats_it(given: TrainSettings, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert_it_goes_on(given, tmp_path, {})
    out = tmp_path / "whole"
    assert recipes.load(out / "recipe.toml") == GPT
    Path(given.recipe).unlink()
    written = TrainSettings(**{**config_values(out / "config.toml"), "data": given.data, "out": tmp_path / "again"})
    assert written.recipe == str(out / "recipe.toml")
    fit(written, CPU, Silent())
    assert records(tmp_path / "again") == records(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.transformer.wte.weight.equal(weights(out)["transformer.wte.weight"])


def test_a_recipe_of_another_size_is_said_with_the_progress(given: TrainSettings, tmp_path: Path) -> None:
    smaller = replace(GPT, facts={**GPT.facts, "parameters": 5})
    observer = Silent()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = str(smaller.save(tmp_path / "other.toml"))
        fit(replace(given, recipe=recipe, steps=1, warmup=0, out=tmp_path / "run"), CPU, observer)
    assert (
        sum("was fitted for" in line and line.endswith("fit again for this model") for line in observer.told) == 1
    )


def test_it_goes_on_with_the_same_content_alone(given: TrainSettings, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(given, out, steps=2)
    moved = GPT.save(tmp_path / "moved.toml")
    assert len(run(given, out, steps=3, recipe=str(moved))) == 3
    changed = replace(GPT, choices=(replace(GPT.choices[0], reason="another"), *GPT.choices[1:])).save(moved)
    words = r"--recipe must be .*\.toml, unchanged, to go on from .*, got "
    for recipe in (str(changed), "fp32"):
        with pytest.raises(SettingsError, match=words + re.escape(recipe)):
            run(given, out, steps=4, recipe=recipe)
    (out / "recipe.toml").unlink()  # then the checkpoint knows
    with pytest.raises(SettingsError, match=words):
        run(given, out, steps=4, recipe=str(changed))
    assert len(run(given, out, steps=4)) == 4
    run(given, tmp_path / "named", recipe="fp32")
    with pytest.raises(SettingsError, match=r"--recipe must be 'fp32' to go on from"):
        run(given, tmp_path / "named")


def test_layers_have_plans_from_one_place(given: TrainSettings, tmp_path: Path) -> None:
    parts = build_parts(given, 256, CPU)
    planned = [name for name, layer in parts.model.named_modules() if hasattr(layer, "plan")]
    assert planned == ["transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"]
    with pytest.raises(
        SettingsError, match=r"--linear must be none with --recipe .*mine\.toml, which has plans of layers"
    ):
        replace(given, linear="SWITCHBACK")
    with pytest.raises(SettingsError, match=r"--recipe must not set lr, which has a flag, got .*rate\.toml'"):
        replace(given, recipe=str(GPT.with_settings(lr=0.1).save(tmp_path / "rate.toml")))
    other = replace(GPT, layers=(layers("lm_heat"),)).save(tmp_path / "other.toml")
    with pytest.raises(ValueError, match=r"layers must name linear layers of the model, got 'lm_heat'"):
        build_parts(replace(given, recipe=str(other)), 256, CPU)


def test_sharded_it_trains_as_one(trainings: Trainings, given: TrainSettings, tmp_path: Path) -> None:
    alone = run(given, tmp_path / "alone")
    answers = trainings(asdict(replace(given, out=tmp_path / "two", parallel="fsdp")), tmp_path / "answers")
    assert not any(isinstance(answer, str) for answer in answers), answers
    together = [record["loss"] for record in records(tmp_path / "two") if "loss" in record]
    torch.testing.assert_close(together, alone, rtol=0.02, atol=0.02)
    assert weights(tmp_path / "two").keys() == weights(tmp_path / "alone").keys()
