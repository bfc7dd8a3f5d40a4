"""The examples around timm, open_clip and peft run to their end, and train."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from libraries import library, open_clip_cleaned_up

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with open_clip_cleaned_up():
        yield


def run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--smoke"])
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_timm_vit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library("timm")
    run(monkeypatch, "timm_vit.py")
    found = re.fullmatch(r"epoch 0: loss (.*)\n(.*) bytes of states a parameter\n", capsys.readouterr().out)
    assert found is not None
    assert 1 < float(found[1]) < 2  # the classes are four, and the pictures noise: log(4) is 1.39
    assert 3 < float(found[2]) < 9  # two codes and a low byte; a few small parameters have float32 states


def test_open_clip_switchback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library("open_clip")
    library("open_clip_train.data")
    run(monkeypatch, "open_clip_switchback.py")
    assert "replacing linear layers with SwitchBackLinearGlobal" in capsys.readouterr().out


def test_peft_finetune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library("peft")
    library("transformers")
    run(monkeypatch, "peft_finetune.py")
    out = capsys.readouterr().out
    assert out.startswith("14 layers in 8 bits, 8,192 parameters to train\n")
    losses = [float(text) for text in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("name", "package", "missing"),
    [("timm_vit.py", "timm", "--data"), ("peft_finetune.py", "peft", "--model, --text")],
)
def test_without_data_argparse_says_what_is_needed(
    name: str, package: str, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library(package)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert f"the following arguments are required: {missing}\n" in capsys.readouterr().err


def test_the_first_lines_of_the_guide_run() -> None:
    """Those of open_clip's are a command line, which the example runs."""
    library("timm")
    page = (EXAMPLES.parent / "docs" / "guides" / "timm.md").read_text()
    space: dict[str, Any] = {}
    exec(page.partition("```py\n")[2].partition("```")[0], space)
    assert type(space["optimizer"]).__name__ == "AdamW8bit"
    assert {row.weights for row in space["optimizer"].describe().rows} == {"split8"}
