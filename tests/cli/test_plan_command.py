"""`narrowgauge plan`: its table is the plan, its bars are to scale, and bad input is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fitted_recipes import GPT
from narrowgauge import linear, recipes
from narrowgauge.cli import main
from narrowgauge.cli._plan import PARTS, size
from narrowgauge.trainers import TrainSettings, presets
from narrowgauge.trainers._build import plain_model
from narrowgauge.trainers._extras import Extras
from narrowgauge.trainers._image_models import IMAGE_PRESETS, build_image_model
from narrowgauge.trainers._models import configuration

SMALL = ["--batch", "2", "--sequence", "64", "--vocabulary", "1000"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def read(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert main(["plan", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def cells(page: str, head: str) -> list[str]:
    """The cells of a row behind its heading."""
    (row,) = [line for line in page.splitlines() if line.startswith(head + "  ")]
    return row[len(head) :].split()


def test_the_table_is_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "plan.json"
    page = read(capsys, "micro", *SMALL, "--recipe", "D,C", "--memory", "120MB", "--json", str(file))
    config = configuration("micro", vocabulary=1000, sequence=64)
    plans = [
        recipes.plan_memory(config, name, batch=2, sequence=64, device_memory="120MB") for name in ("master", "C")
    ]
    assert cells(page, "weights") == [size(one.at_peak["weights"]) for one in plans]
    assert cells(page, "peak") == [size(one.peak) for one in plans]
    assert cells(page, "largest batch on each GPU") == [str(one.largest_batch()) for one in plans]
    assert cells(page, "fits") == ["yes", "yes"]
    for record, one in zip(json.loads(file.read_text())["plans"], plans, strict=True):
        answers = {name: record.pop(name) for name in ("largest_batch", "largest_model")}
        longest = record.pop("longest_sequence")
        assert record == one.record()
        assert answers == {"largest_batch": one.largest_batch(), "largest_model": one.largest_model()}
        # A preset has positions for as many tokens as it is trained on, so memory alone bounds them.
        assert longest > one.longest_sequence() == one.positions
        for tokens, fits in ((longest, True), (longest + 1, False)):
            again = configuration("micro", vocabulary=1000, sequence=tokens)
            assert (
                recipes.plan_memory(again, one.recipe, batch=2, sequence=tokens, device_memory="120MB").fits is fits
            )
    assert str(file) in page.replace("\n", "")


def test_files_of_fitted_recipes_are_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    GPT.save(one)
    replace(GPT, choices=(replace(GPT.choices[2], parameters=("*",)),)).save(two)  # of the same name
    file = tmp_path / "plan.json"
    read(capsys, "micro", *SMALL, "--recipe", f"{one},{two},D", "--json", str(file))
    found = json.loads(file.read_text())["plans"]
    assert [plan["recipe"] for plan in found] == ["one.toml", "two.toml", "master"]
    assert found[0]["held"]["states"] < found[1]["held"]["states"] == found[2]["held"]["states"]
    read(capsys, "micro", *SMALL, "--recipe", str(one), "--memory", "300MB", "--json", str(file))
    assert json.loads(file.read_text())["plans"][0]["longest_sequence"] > 64
    config = configuration("micro", vocabulary=1000, sequence=64)
    assert recipes.plan_memory(config, str(one), batch=2, sequence=64).peak == found[0]["peak"]
    assert main(["plan", "micro", *SMALL, "--recipe", str(one), "--linear", "SWITCHBACK"]) == 2
    assert "linear must be None with recipe 'by-hand', which has plans of layers" in capsys.readouterr().err


def test_a_fitted_recipe_is_for_its_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(replace(GPT, facts={"model": "GPT", "parameters": 5}).save(tmp_path / "one.toml"))
    assert main(["plan", "7B", "--recipe", f"D,{path}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "narrowgauge: --recipe must be one for any model with a number of parameters, got 'by-hand'"
    )
    assert told.count("\n") == 1
    assert main(["plan", "micro", *SMALL, "--recipe", path, "--memory", "300MB"]) == 0
    told = capsys.readouterr().err
    assert "parameters, and recipe 'by-hand' was fitted for GPT of 5 parameters: fit again for this model" in told
    assert told.startswith("narrowgauge: model has ")
    assert told.count("\n") == 1


def test_bars_are_to_scale(capsys: pytest.CaptureFixture[str]) -> None:
    page = read(capsys, "7B", "--recipe", "D,A", "--memory", "80GB")
    (whole,) = [line.split()[1] for line in page.splitlines() if line.startswith("master  W")]
    (half,) = [line.split()[1] for line in page.splitlines() if line.startswith("bf16  ")]
    # 112 GB are 60 letters: 2, 4, 8 and 2 bytes a parameter, and the memory's end behind 80 GB.
    assert [whole.count(PARTS[part]) for part in ("weights", "low words", "states", "gradients")] in (
        [7, 16, 30, 7], [8, 15, 30, 7], [7, 15, 30, 8], [8, 14, 30, 8], [8, 15, 29, 8],
    )  # fmt: skip
    assert whole.index("|") == round(80 / 112 * 60) == half.index("|")
    assert len(half.rstrip("|").rstrip("·")) == 30
    assert cells(page, "fits") == ["no", "yes"]
    assert cells(page, "largest model, no activations") == ["5.00B", "10.00B"]
    assert "activations: they are not in these figures" in page


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = ["--linear=switchback_m:e4m3", "--checkpointing", "--accumulate", "--gpus=4", "--parallel=fsdp"]
    page = read(capsys, "llama-micro", *SMALL, *words, "--recipe", "kahan", "--json", str(file))
    (record,) = json.loads(file.read_text())["plans"]
    one = recipes.plan_memory(
        configuration("llama-micro", vocabulary=1000, sequence=64), "kahan", batch=2, sequence=64,
        linear=linear.SWITCHBACK_M.with_format("e4m3"), checkpointing=True, accumulate=True, gpus=4,
        parallel="fsdp",
    )  # fmt: skip
    assert record == one.record()
    assert "4 GPUs under FSDP" in page
    assert "gradient checkpointing" in " ".join(page.split())
    assert "fits" not in page
    page = read(capsys, "llama-micro", *SMALL, "--hold-activations=int8", "--recipe", "kahan")
    assert "activations held in int8" in " ".join(page.split())


@pytest.mark.slow
def test_an_image_model_is_planned_with_what_training_adds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    added = Extras(
        stable_embedding=True, layer_scale=0.0, kq_norm=True, patch_norm="after", patch_dropout=0.5
    )  # fmt: skip
    flags = ["--stable-embedding", "--layer-scale=0", "--kq-norm", "--patch-norm=after", "--patch-dropout=0.5"]
    words = ["clip-micro", "--batch", "32", "--vocabulary", "300", "--recipe", "adamw8bit-split8", *flags]
    page = read(capsys, *words, "--memory", "300MB", "--offload", "states", "--json", str(file))
    model = build_image_model(IMAGE_PRESETS["clip-micro"], 300, context=77, seed=0)
    added.add(model, 0)
    one = recipes.plan_memory(model, "adamw8bit-split8", batch=32, offload="states", device_memory="300MB")
    (record,) = json.loads(file.read_text())["plans"]
    assert record["largest_batch"] > 32
    assert record["longest_sequence"] == 16
    assert one.record().items() <= record.items()
    said = " ".join(page.split())
    assert "32 images with 16 tokens each a step, stable embedding, layer scale 0.0, kq norm, patch norm" in said
    assert "after, patch dropout 0.5, states on the host" in said
    assert cells(page, "copies of weights") == [size(one.host["weights"])]
    assert cells(page, "in all, on the host") == [size(sum(one.host.values()))]
    assert "low words" not in page.split("GB on the host")[0]


def test_a_classifier_has_images_and_no_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    words = ["vit-micro", "--classes", "7", "--batch", "3", "--recipe", "A", "--memory", "200MB"]
    page = read(capsys, *words, "--offload", "gradients", "--figure", str(file))
    one = recipes.plan_memory(
        build_image_model(IMAGE_PRESETS["vit-micro"], 7, context=0, seed=0), "A", batch=3, offload="gradients"
    )
    assert f"{one.parameters:,} parameters; 3 images a step, states and gradients on the host" in page
    assert cells(page, "peak") == [size(one.peak)]
    assert "largest batch on each GPU" in page
    assert "longest sequence" not in page
    assert "ViTForImageClassification, 3 images" in file.read_text()


@pytest.mark.parametrize("preset", ["clip-micro", "vit-micro", "bert-micro", "micro"])
def test_a_folder_of_any_kind_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str) -> None:
    settings = TrainSettings(model=preset)
    model = plain_model(settings, 300, 0)
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "plan.json"
    read(capsys, str(tmp_path), "--recipe", "A", "--json", str(file))
    (record,) = json.loads(file.read_text())["plans"]
    assert record["model"] == type(model).__name__
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    capsys.readouterr()
    assert preset in presets(None)
    read(capsys, preset, "--recipe", "A", "--json", str(file))  # and by its name
    (named,) = json.loads(file.read_text())["plans"]
    assert (named["model"], named["example"]) == (record["model"], record["example"])


@pytest.mark.parametrize("kind", ["svg", pytest.param("pdf", marks=pytest.mark.slow)])
def test_the_figure_has_every_recipe_and_part(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"plan.{kind}"
    # Of what would fit the figure shows nothing.
    nothing = dict.fromkeys(("largest_batch", "longest_sequence", "largest_model"))
    monkeypatch.setattr("narrowgauge.cli._plan._answers", lambda *_: nothing)
    read(capsys, "micro", *SMALL, "--recipe", "A,adamw8bit", "--memory", "1GB", "--figure", str(file))
    content = file.read_bytes()
    assert content.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[kind])
    if kind == "svg":
        texts = {text for element in ElementTree.fromstring(content).iter() if (text := element.text)}
        assert {"bf16", "adamw8bit", "weights", "states", "activations", "loss", "backward"} <= texts
        assert "1.00 GB" in texts
        assert not {"gradients", "communication"} & texts  # there are none at these plans' worst moments


ERRORS = {
    "model": (["gpt5"], "MODEL must be a preset"),
    "recipe": (["micro", "--recipe", "E"], "--recipe must be one of"),
    "no recipe": (["micro", "--recipe", ","], "--recipe must name recipes, got ','"),
    "linear": (["micro", "--linear", "FOO"], "--linear must be a name such as SWITCHBACK"),
    "memory": (["micro", "--memory", "much"], "--memory must be a number with its unit"),
    "batch": (["micro", "--batch", "0"], "--batch must be an integer from 1"),
    "count": (["7B", "--batch", "3"], "--batch must be left out for a number of parameters"),
    "vocabulary": (["7B", "--vocabulary", "300"], "--vocabulary must be given with a preset that reads tokens"),
    "classes": (["micro", "--classes", "3"], "--classes must be given with a preset of ViT or a model of timm"),
    "a caption": (["clip-micro", "--sequence", "40"], "--sequence must be at most 16"),
    "added to a count": (["7B", "--layer-scale", "0"], "--layer-scale must be left out for a number of parameters"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    broken = tmp_path / "config.json"
    broken.write_text('{"model_type": "nothing-known"}')
    assert main(["plan", *(word.replace("{}", str(tmp_path)) for word in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"narrowgauge: {message}")
    assert printed.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "7B", "--json", str(tmp_path)]) == 2
    assert "--json: cannot write" in capsys.readouterr().err
