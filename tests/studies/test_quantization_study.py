"""The study of quantization errors, end to end on a tiny run."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantization_error as study
import torch

from narrowgauge.gauges import AdamErrorMap, quantization_error


@pytest.fixture(scope="module")
def found(trained: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return study.study(trained, ("quantile", "dynamic"), ("tensor", "2048"))


def test_it_measures_every_map_and_block(found: tuple[dict[str, Any], dict[str, Any]], trained: Any) -> None:
    results, arrays = found
    json.dumps(results, allow_nan=False)
    assert results["elements"] == sum(t.m.numel() for t in trained.moments)
    for name in ("quantile", "dynamic"):
        for block in ("tensor", "2048"):
            row = results["maps"][name][block]
            assert 0 < row["absolute_error_of_m"][0] < 1
            assert row["m"]["relative"][0] <= 1  # zero is a code
            for condition in ("m", "both", "matched"):
                assert row[condition]["absolute"] > 0
                assert 0 <= row[condition]["overlap"] <= 1
    tensor, blocks = (results["maps"]["dynamic"][block]["m"] for block in ("tensor", "2048"))
    assert blocks["relative_norm"] < tensor["relative_norm"]
    assert arrays["dynamic 2048 both usage"].shape == (128, 128)
    usage = results["codes"]["dynamic tensor"]["m"]["usage"]
    assert len(usage) == 256
    assert sum(usage) == pytest.approx(1, abs=1e-3)


def test_the_matched_epsilon_makes_the_errors_of_m_the_papers(trained: Any) -> None:
    matched = study.matched_epsilon(trained.moments)
    errors = [
        float((t.m - study.quantized(t.m, "dynamic", True, None).dequantize()).abs().double().mean())
        for t in trained.moments
    ]
    assert sum(errors) / len(errors) * study.EPS / matched == pytest.approx(3.5e-10, rel=1e-6)


def test_quantiles_of_blocks_are_those_of_the_scaled_blocks(trained: Any) -> None:
    m = trained.moments[0].m
    for block in (None, 256):
        assert quantization_error(m, study.quantized(m, "quantile", True, block)).entropy > 7.7
    assert torch.equal(study.quantized(torch.zeros(9) + 1, "quantile", True, 4).dequantize(), torch.ones(9))


def test_rank_correlation_is_spearmans() -> None:
    cells = torch.zeros(4, 256, 256, dtype=torch.float64)
    for place, (use, error) in enumerate([(1, 5.0), (2, 4.0), (3, 3.0), (9, 1.0)]):
        cells[:, place, 0] = torch.tensor([use, use * error, 0.0, use])
    assert study.rank_correlation(AdamErrorMap(cells, torch.zeros(2))) == pytest.approx(-1.0)
    cells[1, 3, 0] = 9 * 4.0  # a tie: ranks 0, 1.5, 1.5, 3
    assert study.rank_correlation(AdamErrorMap(cells, torch.zeros(2))) == pytest.approx(-0.632, abs=1e-3)


def test_two_runs_that_are_one_do_not_differ(trained: Any) -> None:
    apart = study.two_runs(trained.moments, trained.moments)
    assert list(apart) == [2, 8]
    assert all(value == 0 for row in apart.values() for value in row.values())


def test_the_command_writes_results_and_maps(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "study", functools.partial(study.study, maps=("dynamic",), blocks=("tensor",)))
    out = tmp_path / "new" / "tiny.json"
    study.main(out, training.data, vocabulary=256, steps=8, batch=2, sequence=32)
    results = json.loads(out.read_text())
    assert list(results["two_runs"]) == ["1", "2"]
    assert 0 < results["two_runs"]["2"]["relative_median"] < 1
    with np.load(tmp_path / "new" / "tiny_maps.npz") as arrays:
        assert "dynamic tensor both usage" in arrays


def test_the_command_line_says_what_it_takes() -> None:
    ran = subprocess.run([sys.executable, study.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--vocabulary" in ran.stdout
