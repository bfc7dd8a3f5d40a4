"""The 8-bit study: its storages are what they are called, its runs differ in what they are said to, and it runs."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _eight_bit_adam as one_run
import _eight_bit_adam_plan as planned
import _eight_bit_adam_pool as pool
import eight_bit_adam as study
import pytest
import torch
import typer
from _eight_bit_adam import STABLE, USUAL, Parts

from narrowgauge.formats import codebook
from narrowgauge.nn import StableEmbedding
from narrowgauge.storage import quantize
from narrowgauge.trainers import Batches, load_corpus, next_token_loss, tokenize, validation_windows

BASE = dataclasses.replace(planned.BASELINE, lr=4e-3)


@pytest.fixture(scope="module")
def shared(training: Any) -> pool.Shared:
    text = tokenize(load_corpus(training.data), training.vocabulary)
    windows = validation_windows(text.validation, training.sequence, 4)
    return pool.Shared(training, text.train.numpy(), windows.numpy())


@pytest.fixture
def tensors(shared: pool.Shared) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield torch.from_numpy(shared.tokens), torch.from_numpy(shared.validation)
    pool._shared = pool._tensors = None


@pytest.mark.parametrize(("name", "blocks"), list(itertools.product(("linear", "dynamic"), (False, True))))
def test_states_are_on_their_codebook_with_their_scales(name: str, blocks: bool) -> None:
    """After one step m is (1 - beta1) g and v is (1 - beta2) g^2: what quantizing those gives."""
    p = torch.nn.Parameter(torch.zeros(70, 80))
    optimizer = one_run.QuantizedAdam([p], 1e-3, (0.9, 0.99), codebook=name, blocks=blocks)
    p.grad = torch.randn(70, 80, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    for slot, signed, moment in (("m", True, 0.1 * p.grad), ("v", False, 0.01 * p.grad**2)):
        expected = quantize(moment, codebook(name, signed), 256 if blocks else None)
        state = optimizer.state[p]
        assert state[f"{slot}.scales"].numel() == (22 if blocks else 1)
        torch.testing.assert_close(state[f"{slot}.scales"], expected.scales, rtol=1e-5, atol=0.0)
        # An element whose float32 differs in its last bit may fall on the other side of a boundary.
        assert (state[f"{slot}.codes"] != expected.codes).float().mean() < 1e-3


def test_one_moment_can_stay_wide_and_v_can_be_kept_from_zero() -> None:
    """Of a gradient of 1 and many of 0.01, the squares are below half a linear code; m is above half of one."""

    def stepped(**options: Any) -> tuple[one_run.QuantizedAdam, dict[str, torch.Tensor]]:
        p = torch.nn.Parameter(torch.zeros(4096))
        optimizer = one_run.QuantizedAdam([p], 1e-3, codebook="linear", blocks=False, **options)
        p.grad = torch.full((4096,), 0.01)
        p.grad[0], p.grad[1] = 1.0, 0.0
        optimizer.step()
        return optimizer, optimizer.state[p]

    optimizer, _ = stepped()
    assert optimizer.lost() == 4094 / 4096  # m of the second is zero too
    optimizer, state = stepped(narrow="v")
    assert optimizer.lost() == 4094 / 4096
    assert state["m"].dtype == torch.float32
    optimizer, state = stepped(narrow="m")
    assert optimizer.lost() is None
    assert float(state["v"][2]) == pytest.approx(1e-7, rel=1e-3)
    optimizer, state = stepped(zero=False)
    assert optimizer.lost() == 0.0
    assert codebook("linear", signed=False)[0] == 0.0
    assert state["v.codes"].unique().tolist() == [1, 255]


def test_a_nudge_is_millionths(training: Any) -> None:
    still, nudged = (one_run.build(training, dataclasses.replace(BASE, nudge=nudge)) for nudge in (0, 4))
    for a, b in zip(still.parameters(), nudged.parameters(), strict=True):
        torch.testing.assert_close(b, a * (1 + 4e-6), rtol=3e-7, atol=0.0)
    assert any(not torch.equal(a, b) for a, b in zip(still.parameters(), nudged.parameters(), strict=True))


def test_a_seed_has_one_start_whatever_the_embedding(training: Any) -> None:
    def trunk(parts: Parts, seed: int) -> dict[str, torch.Tensor]:
        model = one_run.build(training, dataclasses.replace(BASE, embedding=parts, seed=seed))
        assert model.lm_head.weight is not model.transformer.wte.weight
        return {name: value for name, value in model.state_dict().items() if "wte" not in name}

    first = trunk(STABLE, 0)
    for parts in planned.COMPONENTS:
        assert all(torch.equal(value, first[name]) for name, value in trunk(parts, 0).items())
    assert not torch.equal(trunk(STABLE, 1)["lm_head.weight"], first["lm_head.weight"])


def test_embeddings_are_the_usual_one_and_parts_of_the_stable_one(training: Any) -> None:
    def table(parts: Parts) -> torch.nn.Embedding:
        return one_run.build(training, dataclasses.replace(BASE, embedding=parts)).transformer.wte

    every = torch.arange(training.vocabulary)
    usual, stable = table(USUAL), table(STABLE)
    assert isinstance(stable, StableEmbedding)
    assert float(usual(every).detach().var()) == pytest.approx(1.0, rel=0.03)
    bound = math.sqrt(6 / (training.vocabulary + usual.embedding_dim))
    assert float(table(Parts(False, True, False)).weight.detach().abs().max()) == pytest.approx(bound, rel=1e-3)
    normed = table(Parts(True, False, False))
    assert torch.equal(normed.weight, usual.weight)
    by_hand = one_run.PartlyStableEmbedding(training.vocabulary, usual.embedding_dim, STABLE)
    by_hand.weight.data.copy_(stable.weight)
    assert torch.equal(by_hand(every), stable(every))


@pytest.mark.parametrize("parts", planned.COMPONENTS, ids=str)
def test_the_table_has_32_bit_states_if_and_only_if_it_is_said(training: Any, parts: Parts) -> None:
    trial = dataclasses.replace(BASE, embedding=parts)
    model = one_run.build(training, trial)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    optimizer = one_run.make_optimizer(model, trial, torch.tensor(1e-3))
    for _, plan in optimizer.plans():
        narrow = sizes[plan.name] >= 4096 and not (plan.name == "transformer.wte.weight" and parts.wide)
        assert {s.storage.name for s in plan.slots} == {"dynamic" if narrow else "fp32"}
    model = one_run.build(training, planned.in_32_bits(trial))
    optimizer = one_run.make_optimizer(model, planned.in_32_bits(trial), torch.tensor(1e-3))
    assert {s.storage.name for _, plan in optimizer.plans() for s in plan.slots} == {"fp32"}


def test_runs_share_start_and_batches_and_differ_in_states(training: Any, tensors: Any) -> None:
    found = {
        name: one_run.train(trial, training, *tensors, graph=False)
        for name, trial in {
            "32-bit": planned.in_32_bits(BASE),
            "dynamic": BASE,
            "linear": dataclasses.replace(BASE, codebook="linear"),
            "other seed": dataclasses.replace(BASE, seed=1),
        }.items()
    }
    assert found["32-bit"]["first_loss"] == found["dynamic"]["first_loss"] == found["linear"]["first_loss"]
    assert found["other seed"]["first_loss"] != found["dynamic"]["first_loss"]
    assert len({run["training_loss"] for run in found.values()}) == 4
    assert found["dynamic"]["state_bytes"] < found["32-bit"]["state_bytes"]


def test_a_32_bit_run_is_torchs_adam(training: Any, tensors: Any) -> None:
    trial = planned.in_32_bits(BASE)
    model = one_run.build(training, trial)
    adam = torch.optim.Adam(model.parameters(), trial.lr, (trial.beta1, trial.beta2), trial.eps)
    batches = Batches(tensors[0], training.batch, training.sequence, trial.seed)
    losses = []
    for number in range(training.steps):
        adam.param_groups[0]["lr"] = trial.lr * one_run.schedule(number, training)
        adam.zero_grad()
        loss = next_token_loss(model, next(batches))
        torch.autograd.backward(loss)
        adam.step()
        losses.append(float(loss.detach()))
    found = one_run.train(trial, training, *tensors, graph=False)
    assert found["first_loss"] == losses[0]
    assert found["training_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["unstable"] is None


def test_what_counts_as_unstable() -> None:
    falling = [6.0 - 0.01 * i for i in range(100)]
    assert one_run.unstable(falling, 2048) is None
    assert one_run.unstable([*falling, *[5.4] * 20], 2048) is None
    assert "0.5 nats above" in str(one_run.unstable([*falling, *[5.7] * 20], 2048))
    assert "uniform" in str(one_run.unstable([*falling, *[7.7] * 20], 2048))
    assert "step 101 " in str(one_run.unstable([*falling, math.inf, 5.0], 2048))
    assert one_run.unstable([*falling, 50.0, *falling], 2048) is None  # a spike that it comes back from


def test_a_run_that_explodes_is_unstable(training: Any, tensors: Any) -> None:
    longer = dataclasses.replace(training, steps=30)
    trial = dataclasses.replace(planned.in_32_bits(BASE), lr=1e30, embedding=USUAL)
    found = one_run.train(trial, longer, *tensors, graph=False)
    assert "not finite" in found["unstable"]
    assert math.isnan(found["validation_loss"])


def test_the_rate_rises_and_falls(training: Any) -> None:
    longer = dataclasses.replace(training, steps=100, warmup=10)
    rates = [one_run.schedule(number, longer) for number in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[99] == pytest.approx(0.11)


def test_settings_of_the_ablation_are_balanced() -> None:
    trials = planned.ablation(planned.ARMS[-1], 4e-3)
    assert len(set(trials)) == 9
    for one, other in itertools.combinations(("eps", "beta1", "beta2", "lr"), 2):
        assert len({(getattr(t, one), getattr(t, other)) for t in trials}) == 9


def test_every_run_is_planned_once() -> None:
    trials = planned.everything(4e-3)
    assert len(trials) == len(set(trials))
    assert planned.replace(BASE, lr=4e-3) in trials
    assert set(planned.sweep()) & set(planned.plan(4e-3))  # the sweep's are the figure's
    assert all(study.trial_of(json.loads(json.dumps(dataclasses.asdict(trial)))) == trial for trial in trials)
    for name, value, wide, narrow in planned.sensitivity(4e-3):
        for a, b in zip(wide, narrow, strict=True):
            changed = {f for f in ("lr", "beta1", "beta2", "eps") if getattr(b, f) != getattr(BASE, f)}
            assert changed <= {name}
            assert getattr(b, name) == value
            assert dataclasses.replace(a, codebook=b.codebook, blocks=b.blocks) == b


@pytest.mark.usefixtures("forked")
def test_processes_find_what_one_process_finds_and_report_what_fails(shared: pool.Shared, tensors: Any) -> None:
    trials = [BASE, dataclasses.replace(BASE, codebook="nonsense"), planned.in_32_bits(BASE)]
    found: list[dict[Any, Any]] = [{}, {}]
    for jobs, results in zip((1, 2), found, strict=True):
        pool.run_all(trials, shared, jobs, results.__setitem__)
        assert results.keys() == set(trials)
        assert "nonsense" in results[trials[1]]["error"]
    for trial in (trials[0], trials[2]):
        alone, together = found[0][trial], found[1][trial]
        assert alone["error"] is together["error"] is None
        # Another number of threads adds up in another order.
        assert alone["validation_loss"] == pytest.approx(together["validation_loss"], abs=1e-3)
    late = dataclasses.replace(shared, deadline=0.0)
    pool.run_all(trials[:1], late, 1, found[0].__setitem__)
    assert "time was up" in found[0][BASE]["error"]


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    record = study.Record(path, {"steps": 8})
    record.add(BASE, {"validation_loss": 2.5, "unstable": None, "error": None})
    record.add(planned.in_32_bits(BASE), pool.failed(RuntimeError("lost\nmuch more")))
    again = study.Record(path, {"steps": 8})
    assert list(again.found) == [BASE]  # what failed is tried again
    assert again.found[BASE]["validation_loss"] == 2.5
    with pytest.raises(typer.BadParameter, match="other settings"):
        study.Record(path, {"steps": 9})


def test_the_best_rate_is_that_of_the_lowest_loss(tmp_path: Path) -> None:
    record = study.Record(tmp_path / "x.jsonl", {})
    for trial in planned.sweep():
        loss = math.nan if trial.lr == 8e-3 else abs(math.log(trial.lr / 4e-3))
        record.add(trial, {"validation_loss": loss, "unstable": None, "error": None})
    assert study.best_rate(record) == 4e-3


def test_the_command_writes_results(training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "RATES", (4e-3, 8e-3))
    monkeypatch.setattr(planned, "plan", lambda lr: planned.components(STABLE, lr)[:2])
    out = tmp_path / "new" / "tiny.json"
    study.main(out, training.data, vocabulary=256, steps=12, batch=4, sequence=32, warmup=2)
    results = json.loads(out.read_text())
    assert results["training"]["lr"] in (4e-3, 8e-3)
    assert len(results["runs"]) == 4
    assert all(run["error"] is None and run["validation_loss"] > 0 for run in results["runs"])


@pytest.mark.gpu
@pytest.mark.parametrize("codebook", [None, "dynamic", "linear"])
def test_a_graph_does_what_its_steps_do(training: Any, tensors: Any, codebook: str | None) -> None:
    there = dataclasses.replace(training, device="cuda")
    on_gpu = [t.to("cuda") for t in tensors]
    trial = dataclasses.replace(BASE, codebook=codebook, lr=1e-3)
    eager, replayed = (one_run.train(trial, there, *on_gpu, graph=graph) for graph in (False, True))
    assert replayed["training_loss"] == pytest.approx(eager["training_loss"], abs=1e-3)
    assert replayed["validation_loss"] == pytest.approx(eager["validation_loss"], abs=5e-3)
