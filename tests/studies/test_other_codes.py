"""Other codes in training: rounding is to a tensor's own quantiles, and the tables are of the runs."""

import json
from dataclasses import replace
from pathlib import Path

import _other_codes_tables as tables
import other_codes
import pytest
import torch
import typer
from _eight_bit_adam import build, make_optimizer
from _eight_bit_adam_plan import BASELINE
from _quantile_adam import QuantileAdam, rounded
from typer.testing import CliRunner

from narrowgauge.optim import Adam

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("codes")
    (folder / "text.txt").write_text("\n".join(p.read_text() for p in sorted(DOCS.glob("*.md"))))
    app, threads = typer.Typer(), torch.get_num_threads()
    app.command()(other_codes.main)
    arguments = ["--check", "--seeds", "2", "--lr", "0.01", "--data", str(folder / "text.txt")]
    torch.set_num_threads(1)
    told = CliRunner().invoke(app, [*arguments, "--out", str(folder / "other_codes_cpu.json")])
    torch.set_num_threads(threads)
    assert told.exit_code == 0, told.output
    return json.loads((folder / "other_codes_cpu.json").read_text())


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_to_the_nearest_of_a_tensors_quantiles(signed: bool) -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    x = x if signed else x.square()
    codes = rounded(x.clone(), signed)
    values, counts = codes.unique(return_counts=True)
    assert len(values) <= 256
    assert codes.abs().max() == x.abs().max()  # the largest is a value
    nearest = (x.double()[:, None] - values.double()).abs().min(1).values
    torch.testing.assert_close((x.double() - codes.double()).abs(), nearest, rtol=0, atol=1e-6)
    inner = counts[2:-2]  # equally often, which is what makes them quantiles
    assert inner.max() < 2 * inner.float().mean()
    assert torch.equal(rounded(torch.zeros(3), signed), torch.zeros(3))


def test_the_moments_of_a_step_are_rounded_but_the_embeddings() -> None:
    training = other_codes.CHECK
    trial = replace(BASELINE, codebook="quantile", lr=1e-3)
    model, reference = build(training, trial), build(training, trial)
    lr = torch.tensor(1e-3, dtype=torch.float64)
    optimizer, exact = (
        make_optimizer(model, trial, lr),
        make_optimizer(reference, replace(trial, codebook=None), lr),
    )
    assert isinstance(optimizer, QuantileAdam)
    assert isinstance(exact, Adam)
    generator = torch.Generator().manual_seed(0)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
    optimizer.step()
    exact.step()
    few = 0
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)  # rounded after the step
        kept = torch.equal(optimizer.state[p]["m"], exact.state[q]["m"])
        assert kept == (p.numel() < 4096 or "wte" in name), name
        if not kept:
            few += 1
            assert len(optimizer.state[p]["v"].unique()) <= 256
            torch.testing.assert_close(optimizer.state[p]["m"], exact.state[q]["m"], rtol=0.5, atol=0.05)
    assert few > 4


def test_rows_are_runs_of_their_own(results: dict) -> None:
    assert len(results["runs"]) == 2 * len(other_codes.ROWS)
    assert results["unfinished"] == []
    for seed in range(2):
        ends = {run["row"]: run["training_loss"] for run in results["runs"] if run["seed"] == seed}
        assert ends["quantile"] != ends["32-bit"]
        assert len({ends[name] for name in ("dynamic", "inverse dynamic", "inverse dynamic, blocks")}) == 3


def test_tables_are_of_the_runs(results: dict) -> None:
    losses = {(run["row"], run["seed"]): run["validation_loss"] for run in results["runs"]}
    wanted = [losses["quantile", seed] - losses["32-bit", seed] for seed in range(2)]
    assert tables.costs(results, "quantile", 0.01) == pytest.approx(wanted)
    assert tables.facts(results)["quantile_best"] == f"{sum(wanted) / 2:+.4f}"
    assert f"{sum(wanted) / 2:+.4f} (" in tables.losses(results)
    assert tables.rates(results) == [0.01]
    assert tables.facts(results)["unstable"] == "0 of 6"
    assert "All runs were made." in tables.origin(results)
    diverged = [run | {"diverged": (run["row"], run["seed"]) == ("quantile", 1)} for run in results["runs"]]
    assert tables.costs(results | {"runs": diverged}, "quantile", 0.01) == pytest.approx(wanted[:1])
    assert tables.facts(results | {"runs": diverged})["unstable"] == "1 of 6"
