"""The loss spike: the switch costs nothing by itself, the gradient is 30 times larger, and AdamW spikes."""

import json
from pathlib import Path

import _loss_spikes_tables as tables
import _pictures
import loss_spikes
import pytest
import torch
from torch.nn import functional as F

from narrowgauge.gauges import find_rms_spikes, find_spikes

RESULTS = Path(loss_spikes.__file__).parent / "results" / "loss_spikes_cpu.json"


@pytest.fixture(scope="module")
def results() -> dict:
    return loss_spikes.study(loss_spikes.Plan(steps=360), [0]) | {"command": "python studies/loss_spikes.py"}


def test_the_switch_makes_the_gradient_of_the_embedding_thirty_times_larger() -> None:
    torch.manual_seed(0)
    plan = loss_spikes.Plan()
    model, data = loss_spikes.TwoEmbeddings(), loss_spikes.Data(plan.batch, plan.brightness, 0)
    words, images, classes = data.next()
    grads = {}
    for share in (plan.quiet, 1.0):
        each = F.cross_entropy(model(words, images), classes, reduction="none")
        weight = torch.cat([torch.ones(plan.batch), torch.full((plan.batch,), share)])
        model.zero_grad()
        torch.autograd.backward((weight * each).sum() / plan.batch)
        grads[share] = {name: p.grad.clone() for name, p in model.named_parameters()}
    name = loss_spikes.EMBEDDING
    torch.testing.assert_close(grads[1.0][name], 30 * grads[plan.quiet][name])
    torch.testing.assert_close(grads[1.0]["embed_words.weight"], grads[plan.quiet]["embed_words.weight"])


def test_adamw_spikes_after_its_warning_and_stable_adamw_does_not(results: dict) -> None:
    ways = tables.by_way(results)
    (adam,), (stable,) = ways["AdamW, β2 0.999"], ways["StableAdamW, β2 0.999"]
    assert 301 in adam["embedding_spikes"]
    ((start, seen),) = tables.caused(adam, results)
    assert 301 < start <= seen <= 309
    assert tables.caused(stable, results) == []
    assert 301 in stable["embedding_spikes"]
    found = tables.match([adam], results, "embedding")
    assert (found.followed, found.loss_spikes) == (1, 1)


def test_clipping_by_the_first_moment_is_adamw_until_that_moment_grows() -> None:
    torch.manual_seed(0)
    start = torch.randn(64, dtype=torch.float64)
    arguments = (1e-2, (0.9, 0.999), 1e-6, 0.01)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    by_first, adamw = loss_spikes.ByFirstMoment([ours], *arguments), torch.optim.AdamW([theirs], *arguments)
    noise = torch.randn(40, 64, dtype=torch.float64)
    for gradient in noise:  # which has no mean, so that m is small against the root of u
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        by_first.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs)
    for _ in range(5):
        ours.grad, theirs.grad = torch.full_like(ours, 30.0), torch.full_like(theirs, 30.0)
        before = ours.detach().clone(), theirs.detach().clone()
        by_first.step()
        adamw.step()
    m = by_first.state[ours]["m"] / (1 - 0.9**45)
    u = by_first.state[ours]["v"] / (1 - 0.999**45)
    ratio = (m.square() / u).mean().sqrt()
    assert ratio > 1
    moved, free = (
        (p.detach() - b) / (m / (u.sqrt() + 1e-6) + 0.01 * b) for p, b in zip((ours, theirs), before, strict=True)
    )
    torch.testing.assert_close(moved, torch.full_like(moved, -1e-2 / float(ratio)))
    torch.testing.assert_close(free, torch.full_like(free, -1e-2))


def test_alarms_while_training_are_those_of_the_whole_run(results: dict) -> None:
    for run in results["runs"]:
        assert [start for start, _ in run["loss_spikes"]] == find_spikes(run["loss"], warmup=100)
        assert run["embedding_spikes"] == find_rms_spikes(run["embedding_rms"], warmup=100)


def test_runs_of_a_seed_are_one_run_until_the_optimizers_differ(results: dict) -> None:
    assert len({run["loss"][0] for run in results["runs"]}) == 1
    assert len({run["loss"][330] for run in results["runs"]}) == len(loss_spikes.WAYS)


def test_tables_and_picture_of_a_short_run(results: dict, tmp_path: Path) -> None:
    facts = tables.facts(results)
    assert (facts["adam_spikes"], facts["seeds"], facts["runs"]) == ("1", "1", "5")
    assert tables.optimizers(results).count("\n") == 7
    assert "1 of 1" in tables.matches(results)
    (tmp_path / "loss_spikes_cpu.json").write_text(json.dumps(results))
    _pictures.draw(tmp_path, tmp_path / "loss_spikes_cpu.png")
    assert (tmp_path / "loss_spikes_cpu.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_holds_for_what_is_committed() -> None:
    """Sentences of the page that no table says: each would be wrong, were the results others."""
    committed = json.loads(RESULTS.read_text())
    ways = tables.by_way(committed)
    spikes = {name: sum(bool(tables.caused(run, committed)) for run in runs) for name, runs in ways.items()}
    seeds = len(ways["AdamW, β2 0.999"])
    assert spikes["AdamW, β2 0.999"] == seeds
    assert spikes["StableAdamW, β2 0.999"] == spikes["AdamW, β2 0.95"] == 0
    assert 0 < spikes[f"AdamW, β2 0.999, {tables.CLIPPED}"] < seeds
    assert spikes[f"{loss_spikes.BY_FIRST_MOMENT}, β2 0.999"] == seeds
    early = [step for run in committed["runs"] for step in run["embedding_spikes"] if step <= 300]
    assert sum(step <= 150 for step in early) > len(early) / 2
