"""`narrowgauge fit`: what it hands to `recipes.fit`, what it writes, and what it says to bad input.

The measurement itself is tested with the recipes; here another function stands in its place.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_sample import kept, recipe
from html_page import Page
from PIL import Image

from narrowgauge import recipes, trainers
from narrowgauge.cli import main
from narrowgauge.cli._fit import difference, next_commands
from narrowgauge.cli._fit_options import OF_COMPARE, OF_TRAINING, FitOptions
from narrowgauge.cli._options import CompareOptions
from narrowgauge.cli._report._bill_page import write_bill
from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes._choices import Choice
from narrowgauge.trainers import TrainSettings

pytestmark = pytest.mark.usefixtures("surroundings")

TINY = (
    "--model", "micro", "--vocabulary", "256", "--sequence", "16", "--batch", "4", "--validation-windows", "4",
    "--warmup", "2", "--lr", "0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name, color in (("red", (220, 30, 30)), ("green", (30, 200, 30))):
        (folder / name).mkdir()
        for n in range(24):
            Image.new("RGB", (34, 33), (*color[:2], 5 * n)).save(folder / name / f"{n}.png")
    return folder


def fit(*arguments: object) -> int:
    return main(["fit", *map(str, arguments)])


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the last call of `recipes.fit` got; in its place stands what gives a recipe for any model."""
    seen: dict[str, Any] = {}

    def fitted(model: Any, batches: Any, loss: Any, **options: Any) -> FittedRecipe:
        seen.update(options, model=model, batches=batches, loss=loss)
        options["progress"]("probing", 0.5)
        return whole(model)

    monkeypatch.setattr(recipes, "fit", fitted, raising=False)
    return seen


def whole(model: torch.nn.Module) -> FittedRecipe:
    """All parameters in one group."""
    count = sum(p.numel() for p in model.parameters())
    how = kept("split8", {"m": "log8", "v": "log8"}, 7.03, 0.05, 0.0004)
    choice = Choice(("*",), len([*model.parameters()]), count, how, None, None, "narrow enough")
    return replace(recipe(parameters=count), choices=(choice,), layers=())


def test_its_options_are_those_of_a_training_and_its_own() -> None:
    assert {*OF_TRAINING} <= {f.name for f in fields(TrainSettings)}
    assert {*OF_COMPARE} <= {*OF_TRAINING} & {f.name for f in fields(CompareOptions)}
    own = {f.name: f.default for f in fields(FitOptions)}
    assert all(own[f.name] == f.default for f in fields(TrainSettings) if f.name in OF_TRAINING)
    assert FitOptions().limit == {"tolerance": None}
    assert FitOptions(tolerance=0.3).limit == {"tolerance": 0.3}
    assert FitOptions(memory="24GB").limit == {"memory": "24GB"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--memory", "24"], "--memory must be a number with its unit, such as '80GB' or '80GiB', got '24'"),
        (["--bytes", "0"], "--bytes must be a number above 0, got 0.0"),
        (["--tolerance", "nan"], "--tolerance must be a number above 0, got nan"),
        (["--bytes", "6", "--memory", "9GB"], "takes one of them, got --memory and --bytes"),
        (["--linear", "int4"], "--linear must be one of none, auto, int8, e4m3, got 'int4'"),
        (["--verify-seeds", "0"], "--verify-seeds must be an integer from 1"),
        (["--lr", "0"], "--lr must be a number above 0, got 0.0"),
        (["--model", "clip-micro", "--accumulate", "2"], "--accumulate must be 1 with --model clip-micro, got 2"),
        (["--device", "tpu"], "--device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--resume", "no"], "No such option: --resume"),
    ],
)
def test_wrong_input_is_a_line(
    flags: list[str], says: str, tmp_path: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("--out", tmp_path / "out", *TINY, *flags) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert not given


def test_the_recipe_of_a_training_is_not_replaced(
    tmp_path: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "history.jsonl").touch()
    assert fit("--out", tmp_path, *TINY) == 2
    told = capsys.readouterr().err
    assert f"--out must not be the folder of a training, whose recipe it has, got {tmp_path}\n" in told
    assert not given


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fit() == 2
    assert "fit: got WORLD_SIZE=2, runs in one process" in capsys.readouterr().err


def test_a_limit_that_nothing_meets_is_a_line(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ValueError("bytes_per_parameter must be at least 5.03 here, got 4")

    monkeypatch.setattr(recipes, "fit", refuse, raising=False)
    assert fit("--out", tmp_path, "--data", text, *TINY, "--bytes", 4) == 2
    assert capsys.readouterr().err == "narrowgauge: --bytes must be at least 5.03 here, got 4\n"
    assert not [*tmp_path.iterdir()]


def test_ctrl_c_ends_it_with_nothing_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, progress: Callable[[str, float], None], **options: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        progress("probing", 0.5)
        raise AssertionError("it went on")

    monkeypatch.setattr(recipes, "fit", interrupted, raising=False)
    assert fit("--out", tmp_path, "--data", text, *TINY) == 130
    assert capsys.readouterr().out == "stopping after this step, with nothing written; once more to stop at once\n"
    assert not [*tmp_path.iterdir()]


def test_the_planned_training_is_handed_over_and_the_recipe_written(
    text: Path, tmp_path: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('out = "elsewhere"\nlinear = "SWITCHBACK:int8"\nsteps = 50\nschedule = "linear"\nkeep = 3\n')
    words = ["--config", config, "--data", text, *TINY, "--accumulate", "2", "--seed", "5", "--no-decay-all"]
    out = tmp_path / "out"
    own = ["--out", out, "--bytes=6.5", "--linear", "auto", "--seconds", "9", "--no-verify"]
    assert fit(*own, *words) == 0
    wanted = {
        "lr": 0.01, "steps": 50, "schedule": "linear", "warmup": 2, "final_lr": 0.1, "bytes_per_parameter": 6.5,
        "linear": "auto", "seed": 5, "batch": 2, "sequence": 16, "accumulate": 2, "seconds": 9.0,
        "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 1.0, "decay_all": False,
    }  # fmt: skip
    assert {name: given[name] for name in wanted} == wanted
    assert given.keys() - wanted == {"model", "batches", "loss", "progress"}
    printed = capsys.readouterr().out
    assert printed.startswith(str(whole(given["model"]).bill()))
    typed = " ".join(map(str, words))
    path = out / "recipe.toml"
    assert f"narrowgauge train --recipe {path} {typed}\n" in printed
    shared = f"--data {text} --steps 50 --batch 4 --sequence 16 --vocabulary 256 --seed 5 --lr 0.01 --warmup 2"
    assert f"narrowgauge compare --recipes D,{path} {shared} --beta2 0.95\n" in printed
    assert recipes.load(path) == whole(given["model"])
    assert "7.03 bytes a parameter" in (out / "bill.html").read_text()
    assert fit(*own, *words) == 0
    assert {p.name.split(".")[0] for p in out.iterdir()} == {"recipe", "bill"}
    assert len([*out.iterdir()]) == 4


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model": "micro", "steps": 300, "lr": 1e-4, "warmup": 10, "vocabulary": 1024, "beta2": 0.999},
        {"data": Path("a text's.txt"), "batch": 2, "sequence": 64, "vocabulary": 256, "seed": 3, "beta1": 0.8,
         "eps": 1e-6, "weight_decay": 0.0, "device": "cpu"},
    ],
)  # fmt: skip
def test_the_comparison_that_is_printed_has_the_settings_of_the_fit(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = FitOptions(out=Path("it's here"), **changed)
    seen: list[CompareOptions] = []
    monkeypatch.setattr("narrowgauge.cli._compare.compare", lambda options, line: seen.append(options) or 0)
    *_, line = next_commands(options, ["fit"])
    assert main(shlex.split(line)[1:]) == 0
    planned = {name: getattr(options, name) for name in OF_COMPARE}
    planned |= {"eps": options.eps or 1e-8, "vocabulary": options.vocabulary or 4096}
    assert {name: getattr(seen[0], name) for name in OF_COMPARE} == planned
    assert seen[0].names == ("D", "it's here/recipe.toml")
    assert len(shlex.split(line)) == 4 + 2 * sum(planned[n] != getattr(CompareOptions, n) for n in OF_COMPARE)


@pytest.mark.parametrize("model", ["micro", "bert-micro", "clip-micro", "vit-micro"])
def test_batches_and_loss_are_those_of_the_training(
    model: str, text: Path, photos: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    pictured, accumulate = model.startswith(("clip", "vit")), 1 if model == "clip-micro" else 2
    flags = ["--data", photos if pictured else text, "--accumulate", accumulate, "--validation-windows", 4]
    flags += [] if model == "vit-micro" else ["--vocabulary", 280]
    assert fit("--out", tmp_path, "--model", model, "--batch", 4, *flags) == 0
    assert given["sequence"] == {"clip-micro": 16, "vit-micro": None}.get(model, 128)
    first, again = ([*itertools.islice(given["batches"](), 3)] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert {len(t) for t in one.values()} == {4 // accumulate}
    assert any(not torch.equal(first[0][name], first[2][name]) for name in first[0])
    loss = given["loss"](given["model"], first[0])
    loss.backward()
    assert loss.numel() == 1
    assert all(p.grad is not None for p in given["model"].parameters())


def test_the_choice_is_checked_beside_d(
    text: Path, tmp_path: Path, given: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--verify", "--verify-steps", 2, "--verify-seeds", 2, "--accumulate", 2)
    assert fit("--out", tmp_path, "--data", text, *TINY, *flags) == 0
    results = json.loads((tmp_path / "verify" / "results.json").read_text())
    assert results["reference"] == "D"
    assert results["settings"]["lr"] == 0.01
    assert results["interrupted"] is False
    rows = results["recipes"]
    assert [*rows] == ["D", "fitted"]
    (first, second), (other, _) = ([s["history"]["loss"] for s in row["seeds"]] for row in rows.values())
    assert first[0] == other[0]  # the same weights and the same batch
    assert first != second
    between = rows["fitted"]["difference"]
    said = (
        "Checked: the validation loss of the choice minus that of D: estimated 0.0004, up or down, after 10,000 "
        f"steps, measured {between['mean']:+.5f} ± {between['spread']:.5f} after 2 over 2 seeds: the mean of the "
        "differences of each seed, and their standard deviation."
    )
    printed = capsys.readouterr().out
    assert said in printed
    announced = (
        "--verify: 4 trainings, of D and of the choice (--verify-seeds 2), with 2 steps each (--verify-steps)\n"
    )
    assert announced in printed.partition("D, seed")[0]
    page = (tmp_path / "bill.html").read_text()
    assert said in Page(page).text
    assert 'href="verify/report.html"' in page
    assert "<svg" in (tmp_path / "verify" / "report.html").read_text()


def test_a_check_without_losses_or_with_one_seed_says_so(
    text: Path, tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[str, Any] = {"recipes": {"D": {"difference": None}, "fitted": {"difference": None}}}
    calls: list[dict[str, Any]] = []

    def compared(*arguments: Any, **options: Any) -> None:
        calls.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainers, "compare", compared)
    flags = ("--data", text, *TINY, "--verify", "--seed", 7)
    assert fit("--out", tmp_path, *flags) == 130
    assert {p.name for p in tmp_path.iterdir()} == {"recipe.toml", "bill.html", "verify"}
    assert [*calls[0]["seeds"]] == [7, 8, 9]
    assert (calls[0]["steps"], calls[0]["warmup"], calls[0]["lr"]) == (300, 2, 0.01)
    fitted = recipe(steps=300)  # whose estimate is 0.0015
    assert difference(results, 300, fitted).startswith("Checked: within 300 steps the choice or D diverged")
    results["recipes"]["fitted"]["difference"] = {"mean": -0.00312, "spread": None, "pairs": 1}
    said = "measured -0.00312 after 300. With one seed no spread is known."
    assert difference(results, 300, fitted).endswith(said)


@pytest.mark.parametrize(
    ("mean", "spread", "steps", "verdict"),
    [
        (-0.006, 0.001, 300, "low"), (0.006, 0.001, 300, "low"), (-0.006, 0.001, 200, "low"),
        (-0.006, 0.001, 400, None), (-0.006, 0.002, 300, None), (-0.003, 0.001, 300, None),
        (0.0001, 0.0001, 300, None),
    ],
)  # fmt: skip
def test_an_estimate_that_the_check_contradicts_is_said_to_be_wrong(
    mean: float, spread: float, steps: int, verdict: str | None
) -> None:
    between = {"mean": mean, "spread": spread, "pairs": 3}
    said = difference({"recipes": {"D": {}, "fitted": {"difference": between}}}, steps, recipe(steps=300))
    assert (
        f"estimated 0.0015, up or down, after 300 steps, measured {mean:+.5f} ± {spread:.5f} after {steps}" in said
    )
    wrong = f"too {verdict} here: they are apart by more than chance (95 %) and the tolerance of 0.002."
    assert said.endswith(wrong if verdict else "standard deviation.")


def test_an_estimate_far_above_the_check_is_too_high() -> None:
    between = {"mean": 0.0001, "spread": 0.0001, "pairs": 3}
    small = recipe(steps=300, tolerance=0.001)
    said = difference({"recipes": {"D": {}, "fitted": {"difference": between}}}, 300, small)
    assert said.endswith("too high here: they are apart by more than chance (95 %) and the tolerance of 0.001.")


def test_an_estimate_over_the_tolerance_is_said_by_the_page_and_on_stderr(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes, "fit", lambda *arguments, **options: recipe(tolerance=0.001), raising=False)
    assert fit("--out", tmp_path, "--data", text, *TINY) == 0
    told = capsys.readouterr().err
    assert told == "narrowgauge: change of the loss estimated 0.0015: over the tolerance of 0.001\n"
    page = Page((tmp_path / "bill.html").read_text())
    assert "by 0.0015 nats, up or down, which is over the tolerance of 0.001." in page.text


def test_no_comparison_is_printed_for_prepared_tokens(text: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    assert main(["tokens", "--data", str(text), "--out", str(tokens), "--vocabulary", "256"]) == 0
    assert len(next_commands(FitOptions(data=tokens, vocabulary=256), ["fit"])) == 1
    assert len(next_commands(FitOptions(data=text, vocabulary=256), ["fit"])) == 2


def drawn(source: str) -> set[str]:
    """Names in the picture, without their shares."""
    return set(re.findall(r">([^<>]*) \([^<>()]*%\)<", source[source.index("<svg") :]))


def test_the_page_has_the_numbers_of_the_recipe(tmp_path: Path) -> None:
    sample = recipe()
    write_bill(sample, tmp_path / "bill.html", commands=["narrowgauge train --recipe <here>"])
    source = (tmp_path / "bill.html").read_text()
    page = Page(source)
    bytes_each = sum(c.elements * c.chosen.bytes for c in sample.choices) / sum(c.elements for c in sample.choices)
    assert f"takes {bytes_each:.2f} bytes a parameter, where fp32 master weights" in page.text
    assert "(D) take 16.00 and adamw8bit-split8 takes 7.03" in page.text
    assert "rounding is estimated to move the loss at the end by 0.0015 nats, up or down." in page.text
    assert "The limit: a tolerance of 0.002 nats." in page.text
    assert "All groups together may move the loss by 0.0015. The tolerance, 0.002, is for this sum" in page.text
    assert [" ".join(cell.split()) for cell in page.rows[1]] == [
        "transformer.wte.weight38,597,376 in 1 tensor, 31 % of all",
        "split8, m log4, v log86.52 bytes, loss 0.00022, 0.182 ms",
        "split8, moments log46.02 bytes, loss 0.0031, 0.189 ms",
        "split, m log4, v log87.52 bytes, loss 0.00011, 0.182 ms",
        "43 % to 97 %",
        sample.choices[0].reason,
        "0.31 %",
    ]
    assert sum(row[0].startswith("transformer") for row in page.rows) == len(sample.choices) + len(sample.layers)
    assert "6.52 bytes, loss less than 0.000001, 0.004 ms" in page.text
    assert "16.00 bytes, loss 0" in page.text
    assert "SWITCHBACK: int8 (output 1.1 %, grad input 1.3 %, 1.9 ms)" in page.text
    assert "log4 (moments) 4 bits on a logarithmic scale" in page.text
    assert "kahan" not in page.text
    assert "lr 0.0006" in page.text
    assert "narrowgauge train --recipe <here>" in page.text
    assert {"wte.weight", "h.*.mlp.c_proj.weight", "9 smaller groups together"} <= drawn(source)
    assert "<script" not in source


def test_a_page_without_layers_tolerance_times_and_with_numbers_that_are_not_finite(tmp_path: Path) -> None:
    lost = kept("plain", {"m": "bf16", "v": "factored"}, 8.0, float("inf"), float("inf"))
    choice = Choice(("a<b>.weight",), 1, 5000, lost, None, lost, "the only one", (float("nan"), 0.5))
    long = [f"{tower}_model.encoder.layers.*.self_attn.out_proj.weight" for tower in ("vision", "text")]
    more = [replace(choice, parameters=(name,), narrower=lost) for name in long]
    write_bill(replace(recipe(tolerance=None), choices=(choice, *more), layers=()), tmp_path / "bill.html")
    source = (tmp_path / "bill.html").read_text()
    page = Page(source)
    assert "The tolerance, " not in page.text
    assert "The linear layers" not in page.text
    assert "What to type next" not in page.text
    assert "8.00 bytes, loss ∞" in page.text
    assert "more than 1,000,000 %" in page.text
    assert "not known to 50 %" in page.text
    towers = {name for name in drawn(source) if name.endswith("_attn.out_proj.weight")}
    assert {name.partition("…")[0] for name in towers} == {"vision_model", "text_model"}
    assert {len(name) for name in towers} == {34}
    assert page.rows[1][0].startswith("a<b>.weight")
