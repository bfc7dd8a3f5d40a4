"""`examples/compare_own_model.py` runs, and leaves the files that it says."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compare_own_model.py"


@pytest.mark.usefixtures("surroundings")
def test_comparing_recipes_on_ones_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--smoke", "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    recipes = json.loads((tmp_path / "results.json").read_text())["recipes"]
    printed = capsys.readouterr().out
    assert all(f"{row['validation_loss']:.4f}" in printed for row in recipes.values())
    assert recipes["A"]["lost_updates"] > 0.1 > recipes["adamw8bit-split8"]["lost_updates"]
    assert recipes["lion8bit@lr=1e-4"]["lr"] == 1e-4
    assert printed.endswith(f"{tmp_path / 'report.html'}\n")
