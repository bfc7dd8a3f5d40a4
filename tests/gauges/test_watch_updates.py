"""What is measured of updates, beside the equations in float64 and beside what steps measure themselves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import model, of_kind, train, watched

from narrowgauge import gauges, optim
from narrowgauge.gauges import effective_descent_quality, lost_updates, rms_ratio
from narrowgauge.gauges._watch._batched_rows import LONG, ROW, Sample, chunks

BF16 = torch.bfloat16
Oracle = Callable[[dict[str, Any], dict[str, Any], Tensor, Tensor], tuple[Tensor, Tensor | None]]


def adam(decoupled: bool) -> Oracle:
    """(update, corrected second moment) of torch's Adam, by its documentation, from its state after the step."""

    def update(group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        (b1, b2), t = group["betas"], float(state["step"])
        m = state["exp_avg"].double() / (1 - b1**t)
        v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double() / (1 - b2**t)
        u = m / (v.sqrt() + group["eps"])
        return -group["lr"] * (u + (group["weight_decay"] * w if decoupled else 0.0)), v

    return update


def sgd(group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> tuple[Tensor, None]:
    g = (-g if group["maximize"] else g) + group["weight_decay"] * w
    if not group["momentum"]:
        return -group["lr"] * g, None
    buffer = state["momentum_buffer"].double()
    return -group["lr"] * (g + group["momentum"] * buffer if group["nesterov"] else buffer), None


def adagrad(group: dict[str, Any], state: dict[str, Any], w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    total = state["sum"].double()
    lr = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
    return -lr * (g + group["weight_decay"] * w) / (total.sqrt() + group["eps"]), total


CASES: dict[str, tuple[Any, Oracle, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, adam(True), {"lr": 1e-3, "weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, adam(True), {"lr": 1e-3, "fused": True}),
    "AdamW, lr in a tensor": (torch.optim.AdamW, adam(True), {"lr": torch.tensor(1e-3), "foreach": False}),
    "Adam, decay, maximize": (torch.optim.Adam, adam(False), {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "Adam, decoupled": (torch.optim.Adam, adam(True), {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adam, amsgrad": (torch.optim.Adam, adam(False), {"lr": 1e-3, "amsgrad": True, "eps": 1e-3}),
    "SGD": (torch.optim.SGD, sgd, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD, momentum": (torch.optim.SGD, sgd, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD, nesterov": (torch.optim.SGD, sgd, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "SGD, in lists": (torch.optim.SGD, sgd, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD, maximize": (torch.optim.SGD, sgd, {"lr": 1e-4, "momentum": 0.9, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, adagrad, {"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.01}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("make", "oracle", "options"), CASES.values(), ids=CASES)
def test_torchs_optimizers_against_their_equations(make: Any, oracle: Oracle, options: Any, dtype: Any) -> None:
    net = model(dtype)
    optimizer = make(net.parameters(), **options)
    train(net, optimizer, 3)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    grads: dict[Tensor, Tensor] = {}
    # Copied before the step: SGD adds to gradients in lists.
    optimizer.register_step_pre_hook(lambda *_: grads.update((p, p.grad.double()) for p in net.parameters()))
    with gauges.watch(net, optimizer, every=1) as watch:
        train(net, optimizer, 1)
    rows = of_kind(watch.rows(), "update")
    assert len(rows) == 1 + len(before)
    total = torch.zeros(8, dtype=torch.float64)
    for row in rows[1:]:
        p = dict(net.named_parameters())[row["name"]]
        w = before[row["name"]]
        intended, v = oracle(optimizer.param_groups[0], optimizer.state[p], w.double(), grads[p])
        effective = p.detach().double() - w.double()
        assert row["measured"] == "rule"
        assert row["norm"] == pytest.approx(float(intended.norm()), rel=1e-6)
        edq = effective_descent_quality(intended, effective) / intended.norm()
        assert row["descent_quality"] == row["visible_descent_quality"] == pytest.approx(float(edq), rel=1e-6)
        assert row["lost"] == pytest.approx(float(lost_updates(w, intended, p.detach())), abs=1e-9)
        assert row["nonzero"] == int((intended != 0).sum())
        assert ("rms" in row) == (v is not None)
        if v is not None:
            eps = options.get("eps", optimizer.param_groups[0]["eps"])
            assert row["rms"] == pytest.approx(float(rms_ratio(grads[p], v, eps)), rel=1e-6)
        if dtype == torch.float32:
            assert row["descent_quality"] == pytest.approx(1.0, abs=1e-3)
        total += torch.tensor(row["sums"], dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(rows[0]["sums"], dtype=torch.float64), total, rtol=1e-7, atol=0)
    if dtype == BF16:
        assert any(row["lost"] > 0.02 for row in rows)


def test_our_own_steps_have_the_same_stats_without_a_watch() -> None:
    make: Any = lambda net: optim.AdamW8bit(net.named_parameters(), 1e-3, weights="split8", min_quantized_size=64)  # noqa: E731
    rows = watched(make, 3, dtype=BF16)
    net = model(BF16)
    optimizer = make(net)
    optimizer.gauges = True
    train(net, optimizer, 3)
    for name, stats in optimizer.last_stats.items():
        (row,) = of_kind(rows, "update", step=3, name=name)
        assert row["sums"] == pytest.approx(stats.sums.tolist(), rel=1e-8)
        wanted = {
            "descent_quality": stats.effective_descent_quality, "lost": stats.lost_updates, "rms": stats.rms,
            "visible_descent_quality": stats.visible_descent_quality, "lost_visible": stats.lost_visible_updates,
        }  # fmt: skip
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=1e-8)


def test_other_optimizers_are_measured_by_difference() -> None:
    class Mine(torch.optim.AdamW):
        """A subclass, whose step may differ."""

    for make in (torch.optim.RMSprop, Mine):
        net = model(BF16)
        optimizer = make(net.parameters(), 1e-3)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        with gauges.watch(net, optimizer, every=1) as watch:
            train(net, optimizer, 1)
        whole, *rows = of_kind(watch.rows(), "update")
        assert whole["measured"] == "difference"
        for row in rows:
            p = dict(net.named_parameters())[row["name"]]
            assert p.grad is not None
            change = p.detach().double() - before[row["name"]].double()
            moved = p.grad != 0
            assert row["measured"] == "difference"
            assert row["norm"] == pytest.approx(float(change.norm()), rel=1e-6)
            assert row["nonzero"] == int(moved.sum())
            assert row["lost"] == pytest.approx(float((moved & (change == 0)).sum() / moved.sum()), abs=1e-6)
            assert not {"descent_quality", "visible_descent_quality", "rms"} & set(row)
            assert math.isnan(row["sums"][1])


def test_parameters_of_different_ages_have_corrections_of_their_own() -> None:
    """A parameter that is first stepped later is corrected for its own age."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    net.blocks[1].requires_grad_(False)
    train(net, optimizer, 3)
    net.blocks[1].requires_grad_(True)
    with gauges.watch(net, optimizer, every=1) as watch:
        train(net, optimizer, 1)
    rows = of_kind(watch.rows(), "update")[1:]
    assert len(rows) == len(list(net.parameters()))
    assert [row["descent_quality"] for row in rows] == [pytest.approx(1.0, abs=1e-3)] * len(rows)
    young = [row for row in rows if row["name"].startswith("blocks.1")]
    # The first step of Adam is the learning rate long in every element.
    assert all(row["norm"] == pytest.approx(1e-3 * math.sqrt(row["nonzero"]), rel=0.05) for row in young)


def test_a_sample_of_long_tensors_tells_the_same() -> None:
    count = 4 * LONG + 37
    numbers = [torch.randn(count, generator=torch.Generator().manual_seed(n)).to(BF16) for n in range(4)]
    found = {}
    for updates in ("sampled", True, False):
        net = nn.Module()
        net.weight = p = nn.Parameter(numbers[0].clone())
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        with gauges.watch(net, optimizer, every=1, updates=updates) as watch:
            for grad in numbers[1:]:
                p.grad = grad
                optimizer.step()
        found[updates] = of_kind(watch.rows(), "update", name="weight")
        absmax = [float(grad.abs().max()) for grad in numbers[1:]]
        assert [row["absmax"] for row in of_kind(watch.rows(), "gradient")] == pytest.approx(absmax)
    assert found[False] == []
    for some, every in zip(found["sampled"], found[True], strict=True):
        assert some != every
        for key in ("norm", "descent_quality", "lost", "rms"):
            assert some[key] == pytest.approx(every[key], rel=0.03)
        assert some["nonzero"] == pytest.approx(every["nonzero"], rel=1e-3)


def test_samples_take_turns_and_cover_everything() -> None:
    x = torch.arange(LONG + 5)
    seen = torch.cat([Sample(index).of(x) for index in range(16)])
    assert torch.equal(seen.sort().values, torch.arange(LONG // ROW * ROW))
    assert torch.equal(Sample(3).of(x[:-6]), x[:-6])
    assert torch.equal(Sample(3, stride=1).of(x), x)
    assert chunks([5, 5, 5, 20, 1], limit=10) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
