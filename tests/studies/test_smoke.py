"""Every study runs: its command with `--check` writes a results file from which its tables are drawn."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from forked import START
from studies import render

# Beside `--check` and `--out`: TEXT and PAIRS stand for the folders of the tests.
WORDS = {
    "adam_variants": ["--data", "TEXT", "--only", "images", "--only", "masked"],
    "at_scale": ["--data", "TEXT", "--only", "D"],
    "bytes_and_loss": ["--data", "TEXT", "--only", "D", "--only", "FlashAdamW"],
    "clip_precision": ["--data", "PAIRS", "--batch", "8", "--only", "bf16", "--only", "tensor*"],
    "collage_float8": ["--data", "TEXT"],
    "collage_throughput": ["--only", "[DA]", "--only", "adamw8bit*"],
    "collage_training": ["--data", "TEXT", "--only", "[ABD]"],
    "compressed_training": ["--data", "TEXT", "--steps", "4", "--only", "fp32", "--only", "2 nearest"],
    "eight_bit_adam": ["--data", "TEXT"],
    "fit": ["--data", "TEXT", "--pairs", "PAIRS", "--model", "clip-micro", "--only", "D", "--only", "*6.5*"],
    "inner_product_noise": ["--data", "TEXT"],
    "loss_scaling": ["--data", "TEXT", "--only", "inf × 1", "--steps", "10"],
    "loss_spikes": [],
    "memory_plans": [],
    "other_codes": ["--data", "TEXT", "--lr", "0.01", "--seeds", "1"],
    "quantization_error": ["--data", "TEXT"],
    "stability": ["--data", "PAIRS", "--only", "shift"],
    "state_codecs": ["--data", "TEXT", "--part", "blocks", "--part", "adagrad", "--jobs", "1"],
    "training_magnitudes": ["--data", "TEXT"],
    "weight_words": ["--only", "decay", "--only", "beta2*"],
}
# Those that take more than two seconds, but one that trains images and one that trains in several processes. Of
# memory_plans and inner_product_noise other tests of this folder run the same functions.
LONG = (
    "adam_variants", "collage_float8", "collage_training", "eight_bit_adam", "fit", "inner_product_noise",
    "loss_spikes", "memory_plans", "other_codes", "quantization_error",
)  # fmt: skip
# Tables that need more than a check makes: several seeds or devices, every part, every row.
LARGER = {
    "bytes_and_loss": {"short", "choice"},
    "collage_training": {"reading"},
    "eight_bit_adam": {"repeats"},
    "state_codecs": set(render.page_of("state_codecs").TABLES) - {"origin"},
    "weight_words": set(render.page_of("weight_words").TABLES) - {"origin", "decay"},
}


def test_there_is_a_smoke_run_of_each_study() -> None:
    assert set(WORDS) == set(render.NAMES)
    assert all(callable(importlib.import_module(f"studies.{name}.run").main) for name in render.NAMES)


@pytest.mark.usefixtures("surroundings", "forked")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in WORDS])
def test_a_study_runs(
    name: str, text: Path, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, page = importlib.import_module(f"studies.{name}.run"), render.page_of(name)
    if hasattr(study, "START"):
        monkeypatch.setattr(study, "START", START)
    out = tmp_path / f"{name}_check.json"
    words = [{"TEXT": str(text), "PAIRS": str(squares)}.get(word, word) for word in WORDS[name]]
    app = typer.Typer()
    app.command()(study.main)
    ran = CliRunner().invoke(app, ["--check", "--out", str(out), *words], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    results = json.loads(out.read_text())
    assert {"device", "torch"} <= results["environment"].keys()
    assert not re.search(r'"[^"]*(/home|/root|/tmp|[A-Z]:\\)', out.read_text())
    runs = results.get("runs", [])
    assert not [
        run for run in runs if not re.search("not installed|takes a GPU", run.get("failed", "not installed"))
    ]
    for table in page.TABLES.keys() - LARGER.get(name, set()):
        assert isinstance(page.TABLES[table](results), str), table
