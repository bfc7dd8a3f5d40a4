"""RMS_t of a few parameters at every step: the numbers of due steps, in between, and what is made of them."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from watched import model, of_kind, train, watched

from narrowgauge import gauges, optim
from narrowgauge.distributed import CPUOffload
from narrowgauge.gauges._history import History
from narrowgauge.gauges._watch._batched_rows import LONG
from narrowgauge.gauges._watch._sources import parameters_with_rms
from narrowgauge.gauges._watch._step_rms import StepRms
from narrowgauge.optim._eager import next_number, squared_ratios
from narrowgauge.optim._plan import ParamStep
from narrowgauge.scaling import DynamicLossScaler

BF16 = torch.bfloat16
SMALL: dict[str, Any] = {"min_quantized_size": 64, "lr": 3e-3}
MAKERS = {
    "AdamW": (torch.float32, lambda net: torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.1)),
    "AdamW, fused": (BF16, lambda net: torch.optim.AdamW(net.parameters(), 3e-3, fused=True)),
    "Adam": (BF16, lambda net: torch.optim.Adam(net.parameters(), 3e-3, amsgrad=True, maximize=True)),
    "Adagrad": (torch.float32, lambda net: torch.optim.Adagrad(net.parameters(), 0.01)),
    "ours": (BF16, lambda net: optim.AdamW8bit(net.named_parameters(), weights="split8", **SMALL)),
    "ours, clipped": (BF16, lambda net: optim.StableAdamW(net.parameters(), weights="split", max_grad_norm=0.5)),
    "ours, in backward": (BF16, lambda net: optim.step_in_backward(net, optim.AdamW8bit, weights="split", **SMALL)),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "make"), MAKERS.values(), ids=MAKERS)
def test_steps_in_between_have_what_due_steps_would_have(dtype: torch.dtype, make: Any) -> None:
    few, all_of_them = (watched(make, 7, every, dtype, updates=True, warmup=0) for every in (3, 1))
    at = {row["step"]: row.get("rms", {}) for row in of_kind(few, "step")}
    names = ["embed.weight", "blocks.0.0.weight"]
    for row in of_kind(all_of_them, "update"):
        if row["name"] in names and row["step"] % 3:
            assert at[row["step"]][row["name"]] == pytest.approx(row["rms"], rel=1e-5)
    assert [list(found) for found in at.values()] == [names, names, [], names, names, [], names]
    assert not any("rms" in row for row in of_kind(all_of_them, "step"))
    # A history has both as one series.
    series = History(few).series("update", "rms", "embed.weight")
    assert series.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_without_updates_and_now_and_then() -> None:
    make = MAKERS["AdamW"][1]
    rows = of_kind(watched(make, 6, 2, updates=False, rms_every=3, rms_of=["blocks.1.3.bias"]), "step")
    assert [list(row.get("rms", {})) for row in rows] == [[], [], ["blocks.1.3.bias"]] * 2
    assert not any("rms" in row for row in of_kind(watched(make, 3, 2, rms_every=0), "step"))
    rows = watched(lambda net: torch.optim.SGD(net.parameters(), 0.1), 3, 2)
    assert not any("rms" in row for row in of_kind(rows, "step"))


class Table(nn.Module):
    """A loss of one long embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(LONG // 512, 1024)

    def forward(self) -> torch.Tensor:
        return (self.embed.weight * torch.linspace(-1, 1, 1024)).square().mean()


def test_long_tensors_are_sampled() -> None:
    """Rows of 1024, one in sixteen, others at every step: the gradient of the sampled rows decides."""
    for make in (torch.optim.AdamW, optim.AdamW):
        net = Table()
        optimizer = make(net.parameters(), 1e-3)
        exact = []
        with gauges.watch(net, optimizer, every=100) as watch:
            for _ in range(4):
                optimizer.zero_grad()
                net().backward()
                optimizer.step()
                state = optimizer.state[net.embed.weight]
                v = state["exp_avg_sq"] if "exp_avg_sq" in state else state["v"]
                corrected = v / (1 - 0.999 ** float(state["step"]))
                exact.append(float(gauges.rms_ratio(net.embed.weight.grad, corrected, 1e-8)))
        found = [row["rms"]["embed.weight"] for row in of_kind(watch.rows(), "step")]
        assert found == pytest.approx(exact, rel=0.02)
        assert found != pytest.approx(exact, rel=1e-9)  # it is a sample


class Vision(nn.Module):
    """A transformer's front: patches, positions without a layer, a table of classes, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.patch = nn.Conv2d(3, 8, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.classes = nn.Embedding(4, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])


def test_embeddings_and_the_first_layer_are_chosen() -> None:
    def chosen(net: nn.Module, wanted: Any = None) -> list[str]:
        names = {p: name for name, p in net.named_parameters()}
        return [names[p] for p in parameters_with_rms(net, names, wanted)]

    assert chosen(Vision()) == ["classes.weight", "pos_embed", "patch.weight"]
    assert chosen(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == ["0.weight"]
    assert chosen(nn.LayerNorm(3)) == []
    assert chosen(Vision(), ["blocks.1.bias", "norm.weight"]) == ["blocks.1.bias", "norm.weight"]


STATES = ("fp32", "bf16", "expansion", "8bit", "fp8", "4bit", "log8", "log4")


def third_step(shape: tuple[int, ...], **options: Any) -> tuple[Any, torch.Tensor]:
    """An optimizer after two steps, and a parameter with its third gradient."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(shape, dtype=BF16))
    optimizer = optim.AdamW([p], 1e-3, min_quantized_size=64, **options)
    for _ in range(3):
        if p.grad is not None:
            optimizer.step()
        p.grad = torch.randn_like(p) * torch.randn_like(p).exp()
    return optimizer, p


def squares_over_moments(optimizer: Any, p: torch.Tensor) -> torch.Tensor | None:
    """`squared_ratios` of the step that comes."""
    plan, group, grad = optimizer.plan_of(p), optimizer.param_groups[0], p.grad
    assert grad is not None
    step = ParamStep(0, plan, group, p.detach(), grad, optimizer.state[p] or plan.init(p.detach(), group))
    return squared_ratios(step, next_number(step))


def taken(optimizer: Any, ps: list[torch.Tensor], turn: int = 0) -> torch.Tensor:
    """The sums of a step."""
    rms = StepRms(optimizer, ps)
    with torch.no_grad():
        rms.begin(turn)
        optimizer.step()
        sums = rms.end(torch.device("cpu"))
    assert sums is not None
    return sums


SHAPES = [((300, 301), 256), ((65_537,), 64), ((96, 1024), 1024), ((200, 1039), 3), ((65_537,), 256)]
ROWS = zip(STATES, itertools.cycle(["plain", "split8", "expansion"]), itertools.cycle(SHAPES), strict=False)


@pytest.mark.parametrize(("states", "weights", "shape", "block"), [(s, w, *shape) for s, w, shape in ROWS])
def test_rows_are_taken_with_what_is_kept_of_them(
    states: str, weights: str, shape: tuple[int, ...], block: int
) -> None:
    """One row in sixteen, of whole blocks, another at every turn."""
    for turn in (0, 19):
        optimizer, p = third_step(shape, states=states, weights=weights, block_size=block)
        whole = squares_over_moments(optimizer, p)
        assert whole is not None
        n, row = p.numel(), math.lcm(1024, block if states in ("8bit", "fp8", "4bit", "log8", "log4") else 1)
        rows = whole.reshape(-1)[: n // row * row].view(-1, row)[turn % 16 :: 16]
        assert 1 < len(rows) < n // row
        (sums,) = taken(optimizer, [p], turn)
        assert float(sums[1]) == n
        assert float(sums[0]) == pytest.approx(float(rows.mean(dtype=torch.float64)) * n, rel=1e-6)


def test_short_parameters_are_taken_whole_and_rules_without_second_moment_have_none() -> None:
    optimizer, p = third_step((50, 100), states="8bit")
    whole = squares_over_moments(optimizer, p)
    assert whole is not None
    wanted = [pytest.approx(float(whole.sum(dtype=torch.float64)), rel=1e-6), 5000.0]
    assert taken(optimizer, [p], 7).tolist() == [wanted]
    q = nn.Parameter(p.detach().clone())
    q.grad = p.grad
    assert taken(optim.Lion([q], 1e-3), [q]).tolist() == [[0.0, 0.0]]
    other = nn.Parameter(torch.ones(3))
    assert taken(optimizer, [other, p]).tolist()[0] == [0.0, 0.0], "of another optimizer"


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}, {"maximize": True}])
def test_the_sums_are_those_that_the_step_measures(options: dict[str, Any]) -> None:
    for states in ("fp32", "8bit"):
        (sampled, p), (measured, q) = (third_step((64, 128), states=states, **options) for _ in range(2))
        measured.gauges = True
        sums = taken(sampled, [p])
        measured.step()
        (stats,) = measured.last_stats.values()
        torch.testing.assert_close(sums[0], stats.sums[-2:], rtol=1e-5, atol=0)
        assert torch.equal(p, q)
        assert len(sampled.last_stats) == 0


@pytest.mark.parametrize("kind", [DynamicLossScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_and_a_held_step_has_zeros(kind: Any, fused: bool) -> None:
    """Both scalers leave unscaling to the step: ours always, torch's with fused=True."""
    plain, p = third_step((64, 128))
    scaled, q = third_step((64, 128), fused=fused)
    (wanted,) = taken(plain, [p])
    rms, found = StepRms(scaled, [q]), []

    def begin(*_: Any) -> None:
        rms.begin(0)

    begin.unscales = True  # type: ignore[attr-defined]  # as the hook of `watch` says of itself
    scaled.register_step_pre_hook(begin)
    scaled.register_step_post_hook(lambda *_: found.append(rms.end(torch.device("cpu"))))
    scaler = kind("cpu", init_scale=4.0)
    assert q.grad is not None
    for bad in (False, True):
        q.grad.mul_(4.0)
        if bad:
            q.grad[0, 0] = torch.inf
        scaler.scale(torch.zeros(()))
        scaler.step(scaled)
        scaler.update()
    torch.testing.assert_close(found[0][0], wanted, rtol=1e-5, atol=0)
    assert all(sums.tolist() == [[0.0, 0.0]] for sums in found[1:])
    assert len(found) == 2 or (kind is torch.amp.GradScaler and not fused)


def test_a_decay_in_the_gradient_is_in_its_second_moment() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(30, 30))
    optimizer = optim.Adam([p], 1e-3, weight_decay=0.3, weights="plain")
    for _ in range(3):
        p.grad = torch.randn_like(p)
        before = squares_over_moments(optimizer, p)
        assert before is not None
        assert float(taken(optimizer, [p])[0, 0]) == pytest.approx(float(before.sum()), rel=1e-5)


@pytest.mark.parametrize("gradients", ["kept", "freed"])
def test_offloaded_steps_have_what_others_have(gradients: Any) -> None:
    rows = []
    for offloaded in (False, True):
        net = model(BF16)
        options: dict[str, Any] = {"weights": "split8", **SMALL}
        optimizer: Any = (
            CPUOffload(optim.AdamW8bit, net.parameters(), gradients=gradients, **options)
            if offloaded
            else optim.AdamW8bit(net.parameters(), **options)
        )
        with gauges.watch(net, optimizer, every=100) as watch:
            train(net, optimizer, 4, watch)
        rows.append([row["rms"] for row in of_kind(watch.rows(), "step")])
    assert rows[0] == rows[1]
    assert all(len(row) == 2 for row in rows[0])
