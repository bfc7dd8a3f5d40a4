"""The file of a fitted recipe gives the same recipe again; a wrong one is refused in a line that names the key."""

from __future__ import annotations

import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fitted_recipes import GPT, LOG, choice, fitted, kept, layers
from narrowgauge import recipes
from narrowgauge.linear import EightBit, LinearPlan
from narrowgauge.linear._plan import SWITCHBACK, SWITCHBACK_M, TENSORWISE_FP8
from narrowgauge.optim import AdamW, Lion
from narrowgauge.recipes._fitted import Choice, Computed, FittedRecipe, Kept, LayerChoice
from narrowgauge.storage import state_storages

NUMBERS = st.floats(allow_nan=False)
PLANS = st.one_of(
    st.sampled_from([SWITCHBACK, SWITCHBACK_M.with_format("e4m3"), TENSORWISE_FP8.with_format("e4m3", "e5m2")]),
    st.builds(
        LinearPlan,
        output=st.builds(EightBit, st.sampled_from(["row", "tensor"]), st.just("tensor"), st.just("e5m2")),
        grad_input=st.sampled_from([None, EightBit("row", "column", "e4m3", "e5m2")]),
        saved=st.sampled_from(["input", "codes"]),
        arithmetic=st.sampled_from(["real", "simulated"]),
        tensor_absmax=st.sampled_from(["step", "average"]),
        decay=st.floats(0, 0.99),
        accumulation=st.sampled_from(["fast", "full"]),
        name=st.one_of(st.just("SWITCHBACK"), st.text()),
    ),
)
NAMES = st.lists(st.text(), max_size=3).map(tuple)
COUNTS = st.integers(1, 2**62)
COMPUTED = st.builds(Computed, PLANS, st.dictionaries(st.text(), NUMBERS, max_size=2), NUMBERS, st.none() | NUMBERS)
LAYERS = st.builds(LayerChoice, NAMES, COUNTS, COMPUTED, st.none() | COMPUTED, st.none() | COMPUTED, st.text())
PLAIN = st.one_of(st.text(), NUMBERS, st.booleans(), st.integers(-(2**63), 2**63 - 1))


@st.composite
def fitted_recipes(draw: st.DrawFn) -> FittedRecipe:
    kind, slots = draw(st.sampled_from([(AdamW, ("m", "v")), (Lion, ("m",))]))
    storages = st.sampled_from([name for name in state_storages() if name != "normalized"])
    dtype, weights = draw(
        st.sampled_from([(torch.float32, ["plain"]), (torch.bfloat16, ["split8", "kahan", "plain", "master"])])
    )
    states = st.fixed_dictionaries({slot: storages.filter(lambda name: "factor" not in name) for slot in slots})
    keeps = st.builds(Kept, st.sampled_from(weights), states, NUMBERS, NUMBERS, NUMBERS, st.none() | NUMBERS)
    lost = st.none() | st.tuples(NUMBERS, NUMBERS)
    choices = st.builds(Choice, NAMES, COUNTS, COUNTS, keeps, st.none() | keeps, st.none() | keeps, st.text(), lost)
    return FittedRecipe(
        draw(st.text()), draw(st.text()), dtype, optimizer=kind,
        settings=draw(st.sampled_from([{}, {"lr": 3e-5, "betas": (0.9, 0.95)}])),
        choices=tuple(draw(st.lists(choices, min_size=1, max_size=3))),
        layers=tuple(draw(st.lists(LAYERS, max_size=2))),
        facts=draw(st.dictionaries(st.text(), PLAIN | st.lists(PLAIN, max_size=2), max_size=3)),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(fitted_recipes())
def test_the_same_recipe_comes_back(recipe: FittedRecipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = recipes.load(recipe.save(Path(folder) / "new" / "recipe.toml"))
        assert [path.name for path in (Path(folder) / "new").iterdir()] == ["recipe.toml"]
    assert found == recipe
    for one, other in zip(found.layers, recipe.layers, strict=True):
        assert one.chosen.plan.name == other.chosen.plan.name  # which equality leaves out


def test_a_loss_without_end_comes_back(tmp_path: Path) -> None:
    lost = kept("plain", LOG, loss=math.inf)
    made = fitted(replace(choice("*", elements=1, chosen=kept("split8", LOG, loss=3e-7)), narrower=lost))
    assert "loss = inf" in made.text()
    assert recipes.load(made.save(tmp_path / "recipe.toml")) == made


def test_a_named_plan_is_written_short() -> None:
    plans = (SWITCHBACK_M.with_format("e4m3"), TENSORWISE_FP8.with_format("e4m3", "e5m2"))
    text = fitted(*GPT.choices, plans=tuple(layers("a", plan=plan) for plan in plans)).text()
    assert re.findall('plan = ("[^"]*")', text) == ['"SWITCHBACK_M:e4m3"', '"TENSORWISE_FP8:e4m3/e5m2"']


def test_a_path_is_taken_where_a_name_is(tmp_path: Path) -> None:
    path = GPT.save(tmp_path / "at@home=1" / "recipe.toml")
    assert recipes.get(str(path)) == recipes.parse(f" {path} ") == GPT
    careful = recipes.parse(f"{path}@lr=3e-5,betas=0.9/0.99")
    assert careful == GPT.with_settings(lr=3e-5, betas=(0.9, 0.99))
    clipped = recipes.parse(f"{path}@clip_updates=True,nonfinite=skip")
    assert clipped == GPT.with_settings(clip_updates=True, nonfinite="skip")
    with pytest.raises(ValueError, match=r"a recipe with settings must be NAME@KEY=VALUE,KEY=VALUE"):
        recipes.parse(f"{path}@lr")
    with pytest.raises(ValueError, match=r"path must end in \.toml, got 'recipe'"):
        GPT.save("recipe")
    with pytest.raises(ValueError, match=r"model must be text, a number, .*, got <object"):
        replace(GPT, facts={"model": object()}).save(path)
    assert recipes.load(path) == GPT  # what was there stays


WRONG = {
    "no TOML": ("[[choices", "{", r"Invalid"),
    "no UTF-8": ("a test's", "\udcff", r"can't decode byte 0xff"),
    "a missing key": ('name = "by-hand"\n', "", r"name must be there, got title, dtype"),
    "a missing key inside": ("bytes = 7.03, ", "", r"choices\[0\]\.chosen\.bytes must be there, got weights"),
    "an unknown key": ('title = "', 'tile = "', r"title must be there"),
    "no loss": (", loss = 0.0 }", " }", r"\[0\]\.chosen\.loss must be there, got weights, states, bytes, noise$"),
    "a key too many": ("loss = 0.0 }", "loss = 0.0, nose = 1 }", r"\[0\]\.chosen must have keys .*, got 'nose'"),
    "another type": ("elements = 20000", 'elements = "many"', r"\[0\]\.elements must be an integer, got 'many'"),
    "a truth for a number": ("share = 0.4", "share = true", r"\[0\]\.chosen\.share must be a number, got True"),
    "a number beyond floats": ("bytes = 7.03", f"bytes = 1{'0' * 400}", r"\.bytes must be a number, got an int"),
    "an unknown storage": ('"split8"', '"split9"', r"\[0\]\.chosen: weights must be .*, got 'split9'"),
    "an unknown plan": ('"SWITCHBACK"', '"SWITCH"', r"layers\[0\]\.chosen\.plan: plan must be a name such as"),
    "a plan that cannot be": (
        '"SWITCHBACK"', '{ name = "own", saved = "codes" }', r"\[0\]\.chosen\.plan: saved must be 'input' unless",
    ),
    "an unknown optimizer": ('"AdamW"', '"NarrowOptimizer"', r"optimizer must be one of .*, got 'NarrowO"),
    "an unknown dtype": ('"bfloat16"', '"int8"', r"dtype must be one of float32, bfloat16, float16, got 'int8'"),
    "an unknown setting": ("[facts]", "[settings]\nrate = 1\n[facts]", r"settings of recipe .* must be among"),
    "a share too few": ("tensors = 1", "tensors = 1\nlost = [0.5]", r"choices\[0\]\.lost must be two numbers, got"),
    "no table": ("[facts]\n", "facts = 3\n[settings]\n", r"facts must be a table, got 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line_that_names_the_key(case: str, tmp_path: Path) -> None:
    was, becomes, words = WRONG[case]
    path = tmp_path / "recipe.toml"
    assert was in GPT.text()
    path.write_text(GPT.text().replace(was, becomes, 1), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*{words}") as refused:
        recipes.get(str(path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"recipe must be a file that can be read, got 'no\.toml': No such file"):
        recipes.get("no.toml")


def test_an_optimizer_of_ones_own_has_no_place_in_a_file() -> None:
    class Own(AdamW):
        pass

    made = fitted(choice("*", elements=1, chosen=kept("split8", LOG)), optimizer=Own)
    with pytest.raises(ValueError, match=r"optimizer must be one of narrowgauge\.optim to be in a file, got Own"):
        made.text()
