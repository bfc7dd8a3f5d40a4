"""The examples that need torch alone run as they stand, and so does the notebook; each prints what it says."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from narrowgauge.gauges import read_records
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.storage import _states

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LINK = re.compile(r"\]\(([^)#\s]+)\)")

pytestmark = pytest.mark.usefixtures("one_thread")


def run(name: str, *arguments: str) -> dict[str, Any]:
    """Run an example in this process; what it has made."""
    before, sys.argv = sys.argv, [name, "--smoke", *arguments]
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def test_every_example_is_in_the_list_and_in_a_page() -> None:
    listed = {}
    for line in (EXAMPLES / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            name, _, guides = line.strip("| ").split(" | ")
            listed[name.strip("`")] = LINK.findall(guides)
    assert set(listed) == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    for name, guides in listed.items():
        assert guides, name
        for guide in guides:
            assert f"`examples/{name}`" in (EXAMPLES / guide).read_text(), f"{guide} names {name}"


def test_own_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("own_loop.py", "--out", str(tmp_path))
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", out)]
    assert len(losses) == 3
    assert losses[-1] < 1  # of log 256 = 5.5
    assert "the optimizer keeps 307 kB, 3.09 bytes a parameter" in out
    rows = read_records(tmp_path / "gauges.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "update" and row["name"] == ""] == [10, 20, 30]
    with pytest.raises(SystemExit, match=r"^2$"):
        run("own_loop.py", "--out", str(tmp_path))
    assert "has a training; to train anew, give another folder: --out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["own_loop.py", "fsdp2.py"])
def test_without_a_text_argparse_says_what_is_needed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "the following arguments are required: --text" in capsys.readouterr().err


@pytest.fixture
def _no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_group_left")
def test_fsdp2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("fsdp2.py", "--out", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", capsys.readouterr().out)]
    assert losses[-1] < 2.5 < losses[0]
    assert {type(p).__name__ for p in made["model"].parameters()} == {"DTensor"}
    again = run("fsdp2.py", "--out", str(tmp_path))
    assert again["path"].name.endswith("10")
    assert capsys.readouterr().out == ""  # nothing was left to do
    for p, q in zip(made["model"].parameters(), again["model"].parameters(), strict=True):
        assert torch.equal(p.to_local(), q.to_local())


def test_own_rule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(NarrowOptimizer, "by_rule", dict(NarrowOptimizer.by_rule))
    made = run("own_rule.py")
    assert 0 < float(made["distance"]) < 0.02
    assert (made["w"] - made["start"]).abs().mean() > 0.03
    assert re.search(r"^1 +8,192 .*adabelief +plain +m:log8 v:log8", capsys.readouterr().out, re.MULTILINE)


def test_own_storage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_states, "_STORAGES", dict(_states._STORAGES))
    made = run("own_storage.py")
    assert made["loss"] == pytest.approx(made["wide_loss"], rel=0.01)
    out = capsys.readouterr().out
    assert "m:log8 v:root16  eager torch" in out
    assert "25,712 bytes of states, with fp32 66,864" in out


def test_watch_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the report needs the extra train")
    run("watch_others.py", "--out", str(tmp_path / "page.html"))
    out = capsys.readouterr().out
    lost, quality = map(int, re.findall(r"the whole model +(\d+)% of updates lost, EDQ +(\d+)%", out)[0])
    assert lost > 10
    assert quality < 95
    assert re.search(r"3\.weight +100% of updates lost, EDQ +0%", out)  # the gains of the norm, which are 1
    assert "3.weight does not move at all" in (tmp_path / "page.html").read_text()


def test_resume_and_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("resume_and_leave.py", "--out", str(tmp_path))
    out = capsys.readouterr().out
    assert "the same bits: True" in out
    assert "torch.optim.adamw.AdamW on torch.float32" in out
    for p, q in zip(made["model"].parameters(), made["resumed"].parameters(), strict=True):
        assert torch.equal(p, q)
    before, after = map(float, re.findall(r"loss (\d\.\d+)", out))
    assert after < before


def test_the_notebook_draws_what_it_says() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs the extra train")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    notebook = json.loads((EXAMPLES / "narrow_numbers.ipynb").read_text())
    assert notebook["nbformat"] == 4
    made: dict[str, Any] = {}
    plt.close("all")
    try:
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), made)
        figures = [plt.figure(number) for number in plt.get_fignums()]
        assert len(figures) == 5
        for figure in figures:
            for axes in figure.axes:
                assert any(len(line.get_xdata()) > 3 for line in axes.lines) or len(axes.patches) == 3
    finally:
        plt.close("all")

    text = "".join(line for cell in notebook["cells"] for line in cell["source"])
    assert "1/128 apart, fp16 numbers 1/1024, and e4m3 numbers 1/8" in text
    assert made["spacing"] == {"bf16": 1 / 128, "fp16": 1 / 1024, "e4m3": 1 / 8}
    ends = {name: path[-1] for name, path in made["paths"].items()}
    assert ends.pop("plain") == 1
    assert abs(ends.pop("stochastic") - 0.9) < 0.06  # three standard deviations of a thousand roundings
    assert all(abs(end - 0.9) < 0.008 for end in ends.values())
    assert "0.007 too low" in text
    stored = made["optimizer"].full_weights()[made["weights"]["split8"]].item()
    assert 0.9 - stored == pytest.approx(0.007, abs=5e-4)
    assert "the median error is 2 %" in text
    assert made["median"]["dynamic, blocks"] == pytest.approx(0.02, abs=0.005)
    assert made["became_zero"]["dynamic, blocks"] == 0
    assert made["became_zero"]["linear, blocks"] == pytest.approx(1 / 8, abs=0.01)
    assert "six to eight times that of the output" in text
    assert sorted(round(ratio) for ratio in made["ratio"].values()) == [6, 8]
    assert max(made["noise"]["SwitchBack", "grad_weight"]) < 1e-3
    master, plain, narrow = (made["recipes"][name] for name in ("D", "A", "adamw8bit-split8"))
    assert plain["training_loss"] - master["training_loss"] > 0.3
    assert abs(narrow["training_loss"] - master["training_loss"]) < 0.01
    assert narrow["bytes"]["measured"]["total"] < master["bytes"]["measured"]["total"] / 2
