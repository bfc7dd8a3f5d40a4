"""RMS_t of a few parameters at every step: the numbers of due steps, in between, and what is made of them."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from watched import batch, loss_of, model, of_kind, train, watched

from narrowgauge import gauges, optim
from narrowgauge.gauges._history import History
from narrowgauge.gauges._segments import LONG
from narrowgauge.gauges._step_rms import StepRms, parameters_with_rms

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
    # Both are one series, whoever reads.
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


def test_a_spike_between_due_steps_raises_the_alarm_at_its_step() -> None:
    heard: list[dict[str, Any]] = []
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    with gauges.watch(net, optimizer, 5, on_alarm=heard.append, warmup=3) as watch:
        for step in range(8):
            optimizer.zero_grad()
            (loss_of(net, *batch(step)) * (1000 if step == 6 else 1)).backward()
            optimizer.step()
    assert {(alarm["of"], alarm["step"]) for alarm in heard} == {("rms", 7)}
    assert {alarm["name"] for alarm in heard} == {"embed.weight", "blocks.0.0.weight"}
    assert [row for row in watch.rows() if row["kind"] == "spike"] == heard


def test_skipped_steps_have_none() -> None:
    net = model()
    optimizer = optim.AdamW(net.parameters(), 1e-3)
    with gauges.watch(net, optimizer, every=10) as watch:
        train(net, optimizer, 1)
        for p in net.parameters():
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()
    assert ["rms" in row for row in of_kind(watch.rows(), "step")] == [True, False]


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
    net = Vision()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match="rms_of: got 'nope', takes names"):
        gauges.watch(net, optimizer, rms_of=["nope"])
    with pytest.raises(TypeError, match="rms_of: got 3"):
        gauges.watch(net, optimizer, rms_of=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rms_every: got -1"):
        gauges.watch(net, optimizer, rms_every=-1)


def test_a_file_has_them_and_tensorboard_too(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with gauges.watch(net, optimizer, 3, path=tmp_path, tensorboard=tmp_path / "events") as watch:
        train(net, optimizer, 4, watch)
    rows = of_kind(gauges.read_records(tmp_path), "step")
    assert ["rms" in row for row in rows] == [True, True, False, True]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("update/rms/embed.weight")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage", [3, "x", [1], {"embed.weight": "x"}, {"embed.weight": [1]}, {"embed.weight": None}]
)
def test_whatever_stands_there_is_read(damage: Any) -> None:
    history = History([{"kind": "run", "version": 1}, {"kind": "step", "step": 1, "loss": 1.0, "rms": damage}])
    assert history.loss.values.tolist() == [1.0]
    assert not len(history.series("update", "rms", "embed.weight").steps)
    gauges.advise(history)


class Measuring:
    """What is known of one of narrowgauge's optimizers whose kernels have measured a list of parameters."""

    def __init__(self, ps: dict[str, torch.Tensor]) -> None:
        self.names = list(ps)
        self.ps, self.asked, self.last_stats = ps, 0, self
        self.rows = torch.arange(8.0 * len(ps), dtype=torch.float64).view(-1, 8)

    def measured(self) -> None: ...

    def foresee(self) -> None: ...

    def tables(self) -> list[tuple[list[str], torch.Tensor]]:
        return [(self.names, self.rows), (["of another list"], self.rows[:1])]

    def names_of(self, ps: Any) -> dict[torch.Tensor, str]:
        self.asked += 1
        return {p: name for name, p in self.ps.items() if p in ps}


def test_what_kernels_have_measured_is_looked_up_once() -> None:
    ps = {name: nn.Parameter(torch.zeros(2, 2)) for name in "abcd"}
    optimizer = Measuring(ps)
    rms = StepRms(optimizer, [ps["d"], ps["b"]])  # type: ignore[arg-type]
    home, sums = torch.device("cpu"), []
    for n in range(3):
        rms._begun, rms._sampled = True, SimpleNamespace(abandon=lambda: None)  # type: ignore[assignment]
        optimizer.rows = optimizer.rows + n
        sums.append(rms.end(home))
        assert sums[-1].tolist() == [optimizer.rows[3, -2:].tolist(), optimizer.rows[1, -2:].tolist()]
    assert optimizer.asked == 4  # of each list: of the other, made anew, each time
    optimizer.names = list(reversed(optimizer.names))
    rms._begun, rms._sampled = True, SimpleNamespace(abandon=lambda: None)  # type: ignore[assignment]
    assert rms.end(home).tolist() == [optimizer.rows[0, -2:].tolist(), optimizer.rows[2, -2:].tolist()]
