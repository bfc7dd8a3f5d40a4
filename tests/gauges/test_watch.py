"""Watching a loop changes nothing in it, says what it saw, and refuses what it cannot watch."""

import copy
import gc
import logging
import math
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import batch, loss_of, model, of_kind, train, watched

from narrowgauge import gauges, optim
from narrowgauge.gauges._watch._alarms import MOST_LOGGED, Alarms

BF16 = torch.bfloat16
SMALL: dict[str, Any] = {"min_quantized_size": 64, "lr": 3e-3}
OPTIMIZERS = {
    "torch AdamW": (torch.float32, lambda net: torch.optim.AdamW(net.parameters(), 3e-3)),
    "torch Adam, amsgrad, bf16": (BF16, lambda net: torch.optim.Adam(net.parameters(), 3e-3, amsgrad=True)),
    "torch SGD": (torch.float32, lambda net: torch.optim.SGD(net.parameters(), 0.1, 0.9, nesterov=True)),
    "torch Adagrad": (torch.float32, lambda net: torch.optim.Adagrad(net.parameters(), 0.01)),
    "torch RMSprop": (torch.float32, lambda net: torch.optim.RMSprop(net.parameters(), 1e-3)),
    "ours, fp32": (torch.float32, lambda net: optim.AdamW(net.named_parameters(), 3e-3)),
    "ours, 8 bits": (BF16, lambda net: optim.AdamW8bit(net.named_parameters(), **SMALL)),
    "ours, log8": (BF16, lambda net: optim.AdamW(net.parameters(), states="log8", weights="split8", **SMALL)),
    "ours, 4 bits": (BF16, lambda net: optim.Lion(net.parameters(), states="4bit", weights="stochastic", **SMALL)),
    "ours, expansions": (BF16, lambda net: optim.CollageAdamW(net.parameters(), 3e-3, variant="plus")),
    "ours, clipped": (BF16, lambda net: optim.StableAdamW(net.parameters(), weights="split", max_grad_norm=0.5)),
    "ours, in backward": (BF16, lambda net: optim.step_in_backward(net, optim.AdamW8bit, weights="split", **SMALL)),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "make"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_nothing_in_the_loop_changes(dtype: torch.dtype, make: Any) -> None:
    """Losses, weights and states, bit for bit, with dropout; and the optimizer is left as it was."""
    plain, seen = model(dtype), model(dtype)
    alone, looked_at = make(plain), make(seen)
    wanted = train(plain, alone, 6)
    with gauges.watch(seen, looked_at, every=2, states_every=3) as watch:
        assert train(seen, looked_at, 6, watch) == wanted
    for one, other in zip(plain.parameters(), seen.parameters(), strict=True):
        assert torch.equal(one, other)
    for key, value in alone.state_dict()["state"].items():
        for name, word in value.items():
            assert torch.equal(
                torch.as_tensor(word), torch.as_tensor(looked_at.state_dict()["state"][key][name])
            ), name
    assert vars(looked_at).keys() == vars(alone).keys()
    assert not looked_at._optimizer_step_pre_hooks
    assert not looked_at._optimizer_step_post_hooks
    assert not any(module._forward_hooks for module in seen.modules())
    assert len(of_kind(watch.rows(), "update", name="")) == 3
    if isinstance(looked_at, optim.NarrowOptimizer):
        assert looked_at.gauges is False
        assert len(looked_at.last_stats) == 0


def test_records_have_the_agreed_shape() -> None:
    rows = watched(OPTIMIZERS["ours, 8 bits"][1], 4, every=2, dtype=BF16, states_every=4)
    header = rows[0]
    names = [name for name, _ in model().named_parameters()]
    assert [header[key] for key in ("kind", "version", "every", "optimizer")] == ["run", 1, 2, "AdamW8bit"]
    assert list(header["parameters"]) == names  # in the model's order, the tied one once
    assert header["parameters"]["embed.weight"] == [40, 48]
    assert header["embeddings"] == ["embed.weight"]
    assert header["depth"]["embed.weight"] == header["depth"]["embed"] == 0
    assert header["depth"]["blocks.1"] == header["depth"]["blocks.1.0.weight"] == 2
    assert [row["step"] for row in of_kind(rows, "step")] == [1, 2, 3, 4]
    assert [row["name"] for row in of_kind(rows, "update", step=2)] == ["", *names]
    assert [row["name"] for row in of_kind(rows, "gradient", step=4)] == names
    modules = ["embed", "blocks.0", "blocks.1"]
    assert [row["name"] for row in of_kind(rows, "activation", step=4)] == modules
    assert [row["name"] for row in of_kind(rows, "activation_gradient", step=4)] == modules
    update = of_kind(rows, "update", step=2, name="embed.weight")[0]
    assert update["measured"] == "fused"
    assert update["elements"] == 40 * 48
    assert len(update["sums"]) == 8
    assert update["norm"] == pytest.approx(math.sqrt(update["sums"][0]))
    assert {"descent_quality", "visible_descent_quality", "lost", "lost_visible", "nonzero", "rms"} <= set(update)
    assert set(of_kind(rows, "gradient")[0]["formats"]) == {"fp16", "bf16", "e4m3", "e5m2", "int8"}
    assert {row["step"] for row in of_kind(rows, "state")} == {4}


class Scored(nn.Module):
    """A model that returns its loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = model(), how

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        loss = loss_of(self.net, ids, targets)
        found = {"dict": {"loss": loss, "logits": None}, "scalar": loss, "tuple": (loss, None)}
        return found.get(self.how, Output(loss))


class Output:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("how", ["dict", "scalar", "tuple", "attribute"])
def test_a_loss_that_the_model_returns_is_found(how: str) -> None:
    net = Scored(how)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    wanted = []
    with gauges.watch(net, optimizer) as watch:
        for step in range(3):
            halves = []
            for half in range(2):  # accumulated: their mean counts
                found = net(*batch(2 * step + half))
                if how == "tuple":
                    (found, _) = found
                loss = found["loss"] if how == "dict" else getattr(found, "loss", found)
                halves.append(loss.item())
                loss /= 2  # in place, as loops do
                loss.backward()
            with torch.no_grad():
                net(*batch(99))  # a validation in between is none of it
            net.eval()
            net(*batch(98))
            net.train()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(sum(halves) / 2)
    assert [row["loss"] for row in of_kind(watch.rows(), "step")] == pytest.approx(wanted, rel=1e-6)


def test_what_the_user_had_set_stays_and_is_used() -> None:
    net = model(BF16)
    optimizer = optim.AdamW(net.named_parameters(), weights="split")
    optimizer.gauges = True
    with gauges.watch(net, optimizer, every=2) as watch:
        train(net, optimizer, 3)
        assert optimizer.gauges is True
        assert len(optimizer.last_stats) == len(list(net.parameters()))
    assert optimizer.gauges is True
    assert len(of_kind(watch.rows(), "update", name="")) == 1


def test_frozen_parameters_and_those_without_gradient_have_no_records() -> None:
    for make in (torch.optim.AdamW, optim.AdamW):
        net = model()
        net.unused = nn.Linear(3, 3)
        net.blocks[0].requires_grad_(False)
        optimizer = make(net.parameters())
        with gauges.watch(net, optimizer, every=1) as watch:
            train(net, optimizer, 2)
        for kind in ("update", "gradient"):
            names = {row["name"] for row in of_kind(watch.rows(), kind, step=2)} - {""}
            assert names == {"embed.weight", *(f"blocks.1.{n}" for n, _ in net.blocks[1].named_parameters())}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("make", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD])
def test_sparse_gradients(make: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(30, 8, sparse=True))
    optimizer = make(net.parameters(), lr=0.1)
    with gauges.watch(net, optimizer, every=1) as watch:
        net(torch.tensor([[3, 5, 3]])).square().sum().backward()
        grad = net[0].weight.grad.to_dense()
        optimizer.step()
    gradient = of_kind(watch.rows(), "gradient")[0]
    assert gradient["elements"] == 16  # the rows that it has
    assert gradient["absmax"] == pytest.approx(grad.abs().max().item())
    update = of_kind(watch.rows(), "update", name="0.weight")[0]
    assert update["nonzero"] == 16
    assert update["lost"] == 0


def test_an_optimizer_over_more_than_the_model_names_the_rest_by_place() -> None:
    net, extra = model(), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.SGD([{"params": net.parameters()}, {"params": [extra]}], 0.1)
    with gauges.watch(net, optimizer, every=1) as watch:
        (loss_of(net, *batch(0)) + extra.sum()).backward()
        optimizer.step()
    assert of_kind(watch.rows(), "update", name="param_groups.1.0")[0]["norm"] == pytest.approx(0.1 * math.sqrt(5))


def test_storages_that_change_are_recorded_by_the_model_s_names() -> None:
    net = model(BF16)
    embedding, first, second = net.embed.weight, net.blocks[0][0], net.blocks[1][0]
    optimizer = optim.AdamW([{"params": [embedding, first.weight]}, {"params": [second.weight]}], weights="plain")
    optimizer.convert(embedding, weights="split")
    with gauges.watch(net, optimizer, every=1) as watch:
        train(net, optimizer, 1)
        optimizer.convert(first.weight, weights="split8", m="log8")
        optimizer.param_groups[1]["weights"] = "split"
        train(net, optimizer, 2)
    rows = watch.rows()
    assert rows[0]["groups"][0]["storages"] == {"embed.weight": {"weights": "split"}}
    assert [(row["step"], row["parameters"]) for row in rows if row["kind"] == "storages"] == [
        (2, {
            "blocks.0.0.weight": {"weights": "split8", "states": "fp32", "m": "log8"},
            "blocks.1.0.weight": {"weights": "split", "states": "fp32"},
        }),
    ]  # fmt: skip


def test_an_exception_inside_takes_the_hooks_off_and_closes_the_file(tmp_path: Path) -> None:
    net = model(BF16)
    optimizer = optim.AdamW8bit(net.named_parameters(), **SMALL)
    path = tmp_path / "gauges.jsonl"

    def interrupted() -> None:
        with gauges.watch(net, optimizer, every=2, path=path) as watch:
            train(net, optimizer, 3, watch)
            loss_of(net, *batch(0)).backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_hooks for module in net.modules())
    assert optimizer.gauges is False
    records = gauges.read_records(path)
    assert records.damage is None
    assert [row["step"] for row in of_kind(records, "step")] == [1, 2, 3]
    with gauges.watch(net, optimizer):  # free for another
        pass


def test_records_come_to_the_file_as_the_steps_do(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    path = tmp_path / "gauges.jsonl"
    with gauges.watch(net, optimizer, every=2, path=path) as watch:
        for step in range(1, 5):
            train(net, optimizer, 1, watch)
            # Written by a thread, in no hurry.
            deadline = time.monotonic() + 20
            while (records := gauges.read_records(path))[-1].get("step") != step:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert records.damage is None or "still writing it" in records.damage
            assert watch.rows() == list(gauges.read_records(path))
    whole = gauges.read_records(path)
    net, optimizer = copy.deepcopy((net, optimizer))
    with gauges.watch(net, optimizer, every=2, path=path, resume_from=2) as watch:
        train(net, optimizer, 2, watch)
    resumed = gauges.read_records(path)
    assert [(row["kind"], row.get("step"), row.get("name")) for row in resumed] == [
        (row["kind"], row.get("step"), row.get("name")) for row in whole
    ]
    with pytest.raises(FileExistsError, match="path must be a new file"), gauges.watch(net, optimizer, path=path):
        pass
    with gauges.watch(net, optimizer):  # what was refused has left nothing
        pass


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": "net"}, TypeError, "optimizer must be a torch.optim.Optimizer, got str"),
        ({"model": nn.ReLU()}, ValueError, "model must have parameters"),
        ({"model": nn.Sequential(nn.LazyLinear(3))}, ValueError, "model must have been called once: 0.weight"),
        ({"model": nn.Linear(2, 2)}, ValueError, "optimizer must have parameters of the model"),
        ({"every": 0}, ValueError, "every must be an integer"),
        ({"resume_from": -1}, ValueError, "resume_from must be an integer"),
        ({"on_alarm": 3}, TypeError, "on_alarm must be a function"),
        ({"updates": "all"}, ValueError, "updates must be 'sampled', True or False, got 'all'"),
        ({"activations": ["head", "nope"]}, ValueError, "activations must be .*, got 'nope'"),
        ({"activations": None}, ValueError, "activations must be .*, got None"),
        ({"rms_of": ["nope"]}, ValueError, "rms_of must be .*, got 'nope'"),
        ({"formats": ["e9m9"]}, ValueError, "formats must be .*, got 'e9m9'"),
        ({"scaler": 3}, TypeError, "scaler must be a torch.amp.GradScaler"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_bad_input_is_refused_by_name(options: dict[str, Any], error: type[Exception], words: str) -> None:
    net = model()
    with pytest.raises(error, match=words):
        gauges.watch(**{"model": net, "optimizer": torch.optim.SGD(net.parameters(), 0.1)} | options)


def test_one_watch_at_a_time_each_entered_once() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    watch = gauges.watch(net, optimizer)
    with watch:
        with pytest.raises(RuntimeError, match="optimizer is watched already"), gauges.watch(net, optimizer):
            pass
        with pytest.raises(RuntimeError, match="can be entered once"), watch:
            pass
    with pytest.raises(RuntimeError, match="can be entered once"), watch:
        pass
    other = gauges.watch(net, optimizer)
    for use in (lambda: other.loss(1.0), lambda: other.report("never.html")):
        with pytest.raises(RuntimeError, match="a watch must be entered before it sees anything"):
            use()


def test_alarms_are_called_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Also for a step between due ones; and of inf and NaN once a tensor."""
    for every in (1, 5):
        alarmed: list[dict[str, Any]] = []
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-4, betas=(0.9, 0.999))
        with (
            caplog.at_level(logging.WARNING, "narrowgauge.gauges"),
            gauges.watch(net, optimizer, every, on_alarm=alarmed.append, warmup=3) as watch,
        ):
            for step in range(8):
                loss = loss_of(net, *batch(step)) * (1000 if step == 6 else 1)
                optimizer.zero_grad()
                loss.backward()
                if step == 7:
                    net.embed.weight.grad[0, 0] = math.nan
                optimizer.step()
        spikes = [row for row in alarmed if row["kind"] == "spike"]
        assert {(row["of"], row["step"]) for row in spikes} == {("rms", 7)}
        assert {"embed.weight", "blocks.0.0.weight"} <= {row["name"] for row in spikes}
        assert all(row["value"] > row["threshold"] == 2.3 for row in spikes)
        bad = [row for row in alarmed if row["kind"] == "nonfinite" and row["of"] == "gradient"]
        wanted = {"kind": "nonfinite", "step": 8, "of": "gradient", "name": "embed.weight", "value": 1}
        assert bad == ([wanted] if every == 1 else [])
        assert [row for row in watch.rows() if row["kind"] in ("spike", "nonfinite")] == alarmed
    assert "step 7: RMS spike of embed.weight" in caplog.text
    assert "step 8: 1 elements of the gradient of embed.weight are inf or NaN" in caplog.text


def test_a_training_that_diverges_names_a_few_tensors(caplog: pytest.LogCaptureFixture) -> None:
    alarmed: list[dict] = []
    alarms = Alarms(alarmed.append, 0)
    with caplog.at_level(logging.WARNING, "narrowgauge.gauges"):
        for kind in ("gradient", "activation_gradient"):
            for n in range(MOST_LOGGED + 20):
                alarms.raised_by({"kind": kind, "step": 3, "name": f"h.{n}", "nonfinite": 7})
    alarms.notify()
    assert len(alarmed) == 2 * (MOST_LOGGED + 20)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * (MOST_LOGGED + 1)
    assert lines[MOST_LOGGED - 1] == f"step 3: 7 elements of the gradient of h.{MOST_LOGGED - 1} are inf or NaN"
    assert lines[MOST_LOGGED] == "step 3: inf or NaN in gradients of more tensors: see the records"
    assert lines[-1] == "step 3: inf or NaN in activation gradients of more tensors: see the records"


def test_a_tensor_whose_updates_are_all_lost_raises_one_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """bf16 cannot store a change of 1e-4 in the ones of a norm; in fp32, and in the matrix, updates arrive.

    Rounded stochastically, a step moves none of so few elements, and another one does.
    """
    low, high = torch.bfloat16, torch.float32
    for dtype, weights, wanted in ((low, "plain", [("1.weight", 6)]), (low, "stochastic", []), (high, "plain", [])):
        alarmed: list[dict[str, Any]] = []
        net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.LayerNorm(8, bias=False)).to(dtype)
        optimizer = optim.AdamW(net.parameters(), 1e-4, weights=weights, weight_decay=0.0)
        caplog.clear()
        with (
            caplog.at_level(logging.WARNING, "narrowgauge.gauges"),
            gauges.watch(net, optimizer, 2, on_alarm=alarmed.append) as watch,
        ):
            for step in range(12):
                optimizer.zero_grad()
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
                watch.loss(loss := net(x).square().sum())
                loss.backward()
                optimizer.step()
        assert [(row["name"], row["step"]) for row in alarmed] == wanted
        rows = [row for row in watch.rows() if row["kind"] == "update" and row["name"] == "1.weight"]
        assert (rows[-1]["lost"] == 1) == (dtype == low), "the case is one: every measured update is lost"
        assert alarmed == [row for row in watch.rows() if row["kind"] == "lost"]
        assert any("1.weight" in a.finding for a in gauges.advise(watch.rows())) == bool(wanted)
        said = "step 6: every update of 1.weight is lost, as in the two measurements before; "
        said += "see narrowgauge.gauges.advise(watch.rows())"
        assert [record.getMessage() for record in caplog.records] == [said] * len(wanted)


def test_an_update_that_arrives_begins_the_count_of_lost_ones_anew(caplog: pytest.LogCaptureFixture) -> None:
    def records(name: str, *shares: float) -> list[dict[str, Any]]:
        own = {"kind": "update", "name": name, "norm": 1.0}
        return [{**own, "step": s, "lost": lost} for s, lost in enumerate(shares, 1)]

    alarmed: list[dict[str, Any]] = []
    alarms = Alarms(alarmed.append, 0)
    for record in records("a", 1, 1, 0.99, 1, 1, 1, 1, 0, 1, 1, 1):
        alarms.raised_by(record)
    alarms.notify()
    assert [(row["name"], row["step"], row["value"], row["threshold"]) for row in alarmed] == [("a", 6, 1, 0.999)]
    for n in range(MOST_LOGGED + 3):
        alarms.replay(records(f"replayed {n}", 1, 1))
        for record in records(f"replayed {n}", 1, math.nan, 1):
            alarms.raised_by(record)
    lines = [record.getMessage() for record in caplog.records if record.name == "narrowgauge.gauges"]
    assert len(lines) == MOST_LOGGED + 1
    assert lines[-1] == "step 1: every update of more tensors is lost: see the records"


def test_a_resumed_run_is_judged_by_its_own_storages(tmp_path: Path) -> None:
    def run(weights: str, after: int | None) -> list[Any]:
        net = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
        optimizer = optim.AdamW(net.named_parameters(), 1e-5, weights=weights, weight_decay=0.0)
        path = tmp_path / "gauges.jsonl"
        with gauges.watch(net, optimizer, 1, path=path, resume_from=after, activations=False) as watch:
            for step in range(12):
                optimizer.zero_grad()
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
                watch.loss(loss := net(x).float().square().sum())
                loss.backward()
                optimizer.step()
        return [row["step"] for row in gauges.read_records(path) if row["kind"] == "storages"]

    assert run("split8", None) == []
    assert run("split8", 6) == []
    assert run("plain", 12) == [12]
    urgency = {a.rule: a.urgency for a in gauges.advise(gauges.read_records(tmp_path / "gauges.jsonl"))}
    assert urgency["lost updates"] == "change", "nothing is kept any more"
    assert all(row["step"] > 12 for row in gauges.read_records(tmp_path / "gauges.jsonl") if row["kind"] == "lost")


def test_a_parameter_that_was_unfrozen_is_not_called_frozen() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    net.requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with gauges.watch(net, optimizer, 1, activations=False) as watch:
        for step in range(8):
            net[0].requires_grad_(step > 1)
            x = torch.randn(4, 8, requires_grad=True)
            watch.loss(loss := net(x).square().sum())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (found,) = (a.finding for a in gauges.advise(watch.rows()) if a.rule == "not trained")
    assert found == "1.weight is frozen."


def test_a_loss_that_is_not_finite_raises_an_alarm_where_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    alarms, raised = Alarms(None, 0), []
    with caplog.at_level(logging.WARNING, "narrowgauge.gauges"):
        for step, loss in enumerate((1.0, math.nan, math.inf, 1.0, math.inf), 1):
            raised += alarms.raised_by({"kind": "step", "step": step, "loss": loss})
    assert [(alarm["kind"], alarm["of"], alarm["step"]) for alarm in raised] == [
        ("nonfinite", "loss", 2), ("nonfinite", "loss", 5)
    ]  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: the loss is nan", "step 5: the loss is inf"
    ]  # fmt: skip


def test_lost_updates_raise_no_alarm_where_the_learning_rate_has_decayed() -> None:
    alarms, raised = Alarms(None, 0), []
    norms = (0.1, math.inf, 100, 0.0, 1.0, 0.0, 1.0, 0.5, 0.049, 0.04, 0.03, 0.02, 0.06, 0.051, 0.05)
    for step, norm in enumerate(norms, 1):
        lost = 1.0 if step > 8 else 0.0
        raised += alarms.raised_by({"kind": "update", "step": step, "name": "w", "norm": norm, "lost": lost})
    assert [alarm["step"] for alarm in raised] == [15], "three in a row that are no twentieth of the longest"


def test_a_watch_that_ended_keeps_neither_model_nor_optimizer_alive_by_hooks() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with gauges.watch(net, optimizer) as watch:
        train(net, optimizer, 1)
    gone = weakref.ref(watch)
    del watch
    gc.collect()
    assert gone() is None


def test_closures_are_measured_when_they_return() -> None:
    for make in (torch.optim.AdamW, optim.AdamW):
        net, twin = model(), model()
        optimizer, other = make(net.parameters(), 1e-3), make(twin.parameters(), 1e-3)
        torch.manual_seed(1)

        def closure(net: nn.Module = net, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, *batch(0))
            loss.backward()
            return loss

        with gauges.watch(net, optimizer, every=1) as watch:
            assert optimizer.step(closure) is not None
        with gauges.watch(twin, other, every=1) as usual:
            train(twin, other, 1)
        for kind in ("update", "gradient"):
            assert of_kind(watch.rows(), kind) == of_kind(usual.rows(), kind)
            assert of_kind(watch.rows(), kind)


def test_a_new_path_without_suffix_is_a_folder(tmp_path: Path) -> None:
    model, run = nn.Linear(4, 4), tmp_path / "run" / "a"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gauges.watch(model, optimizer, every=1, path=run):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    found = len(gauges.read_records(run / "gauges.jsonl"))
    assert len(gauges.read_records(run)) == found > 1
    (run / "gauges.jsonl").rename(tmp_path / "records")  # a file without suffix that is there stays one
    assert len(gauges.read_records(tmp_path / "records")) == found
