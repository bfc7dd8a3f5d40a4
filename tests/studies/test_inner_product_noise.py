"""The study of noisy inner products: exact where arithmetic can be done by hand, and end to end on a tiny run."""

import json
from pathlib import Path
from typing import Any

import _gather
import inner_product_noise as study
import pytest
import torch

from narrowgauge.formats import coder


@pytest.fixture(scope="module")
def results(trained: Any) -> dict[str, Any]:
    layers = _gather.gather_linears(trained, 128)
    return study.study(trained, layers[:2])


def test_it_measures_all_products_formats_and_scales(results: dict[str, Any]) -> None:
    json.dumps(results, allow_nan=False)
    assert list(results["summary"]) == ["output", "grad_input", "grad_weight", "normal"]
    assert len(results["layers"]) == 2 * 3 + 1
    for row in results["layers"]:
        schemes = [key for key, value in row.items() if isinstance(value, dict)]
        assert len(schemes) == (6 if row["product"].startswith("grad") else 4)
        assert row["k"][0] == 64
        assert row["k"] == sorted(set(row["k"]))
        for scheme in schemes:
            assert all(
                0 < noise < signal
                for noise, signal in zip(row[scheme]["noise"], row[scheme]["signal"], strict=True)
            )


def test_on_independent_numbers_equation_12_holds() -> None:
    operands = study.control(4096, 0, "cpu")
    found = study.measure(operands, 0)
    for scheme in ("int8 tensor", "e4m3 row", "e4m3 tensor"):
        assert found[scheme]["noise_slope"] == pytest.approx(1.0, abs=0.06)
        for noise, predicted in zip(found[scheme]["noise"], found[scheme]["predicted"], strict=True):
            assert noise == pytest.approx(predicted, rel=0.1)
    assert found["int8 row"]["noise_slope"] > 1.1  # the largest of k numbers grows with k
    assert found["int8 tensor"]["signal_slope"] == pytest.approx(1.0, abs=0.05)


def test_the_error_of_int8_is_uniform_in_a_step() -> None:
    found = study.noise(study.control(2048, 1, "cpu"), 2048, 1)["int8 tensor"]
    step = found["crest_a"] * found["a"] ** 0.5 / 127
    assert found["error_a"] == pytest.approx(step**2 / 12, rel=0.02)


def test_an_operand_on_the_codes_is_not_noisy() -> None:
    x = torch.tensor([[127.0, -3.0, 0.0, 64.0]])
    values = study.quantized(x, coder("linear", True, x.device), x.abs().amax(dim=1, keepdim=True))
    torch.testing.assert_close(values, x.double(), rtol=1e-6, atol=0.0)
    nothing = study.quantized(torch.zeros(2, 3), coder("linear", True, x.device), torch.zeros(2, 1))
    assert torch.equal(nothing, torch.zeros(2, 3, dtype=torch.float64))


def test_scales_of_rows_follow_the_rows_and_that_of_the_matrix_does_not() -> None:
    a = torch.ones(4, 256)
    a[0, 200] = 100.0
    operands = study.Operands("x", "output", a, torch.randn(4, 256, generator=torch.Generator().manual_seed(0)))
    found = study.noise(operands, 256, 0)
    assert found["int8 tensor"]["zero_a"] == 0.0
    assert found["int8 tensor"]["crest_a"] > 1.9 * found["int8 row"]["crest_a"]


def test_slopes_and_means() -> None:
    assert study.slope([64, 128, 256], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert study.geometric_mean([1.0, 100.0]) == pytest.approx(10.0)


def test_the_command_writes_results(training: Any, tmp_path: Path) -> None:
    out = tmp_path / "new" / "tiny.json"
    study.main(out, training.data, vocabulary=256, steps=2, batch=2, sequence=32, tokens=128)
    assert json.loads(out.read_text())["tokens"] == 128
