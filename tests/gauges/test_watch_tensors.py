"""Gradients, features and moments of a watched training, beside the functions that measure one tensor."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from watched import batch, loss_of, model, of_kind, train, watched

from narrowgauge import distributed, gauges, optim, scaling
from narrowgauge.gauges import FeatureStats, feature_stats
from narrowgauge.gauges._formats import TARGETS, targets
from narrowgauge.gauges._magnitudes import FORMATS
from narrowgauge.gauges._records import unpacked
from narrowgauge.gauges._watch._batched_magnitudes import as_records, table_of
from narrowgauge.gauges._watch._batched_rows import LONG, BlockSample, Sample
from narrowgauge.gauges._watch._features import Features

BF16 = torch.bfloat16


def same(row: dict[str, Any], *calls: Tensor, formats: Any = FORMATS) -> None:
    """A record is what `feature_stats` says of the tensors."""
    wanted = FeatureStats.total([feature_stats(x, formats) for x in calls])
    assert (row["elements"], row["nonfinite"]) == (wanted.elements, wanted.nonfinite)
    assert row["absmax"] == pytest.approx(wanted.peak, rel=1e-8)
    assert row["mean"] == pytest.approx(wanted.mean_magnitude, rel=1e-6)
    assert row["formats"].keys() == wanted.losses.keys()
    for name, loss in wanted.losses.items():
        assert row["formats"][name] == pytest.approx(vars(loss), abs=1e-8, nan_ok=True), name


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16, torch.float64])
def test_tables_are_feature_stats_of_every_tensor(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (70, 40), (1,), (2048,), (5, 0), (LONG - 1,)]
    tensors = [(torch.randn(s, generator=generator) * 10.0 ** (i - 3)).to(dtype) for i, s in enumerate(shapes)]
    tensors[1][0, :3] = torch.tensor([float("inf"), float("nan"), 0.0])
    tensors[3].zero_()
    names = list(map(str, range(len(shapes))))
    every = targets(list(TARGETS))
    rows = as_records("gradient", names, every, 7)(table_of(tensors, every, Sample(3)))
    assert [row["name"] for row in rows] == ["0", "1", "2", "3", "5"]  # what has no elements has no record
    for row in rows:
        assert (row["kind"], row["step"]) == ("gradient", 7)
        same(row, tensors[int(row["name"])], formats=every)


def test_shares_of_long_tensors_are_those_of_a_sample() -> None:
    x = torch.randn(20 * LONG, generator=torch.Generator().manual_seed(0)) * 1e-2
    (row,) = as_records("gradient", ["x"], every := targets(["e4m3", "int8"]), 1)(table_of([x], every, Sample(5)))
    wanted = feature_stats(x, every)
    assert (row["elements"], row["nonfinite"]) == (wanted.elements, wanted.nonfinite)
    assert row["absmax"] == pytest.approx(wanted.peak, rel=1e-9)
    for name in ("e4m3", "int8"):
        assert row["formats"][name] != vars(wanted.losses[name])
        assert row["formats"][name]["underflow"] == pytest.approx(wanted.losses[name].underflow, rel=0.05)


def test_gradients_are_those_that_the_optimizer_sees() -> None:
    net = model(BF16)
    optimizer = optim.AdamW8bit(net.named_parameters(), min_quantized_size=64)
    with gauges.watch(net, optimizer, every=2) as watch:
        train(net, optimizer, 2)
    for name, p in net.named_parameters():
        assert p.grad is not None
        same(of_kind(watch.rows(), "gradient", name=name)[0], p.grad)


def test_gradients_freed_in_backward_are_measured_before() -> None:
    usual = watched(lambda net: optim.AdamW(net.named_parameters()), 3, dtype=BF16)
    within = watched(lambda net: optim.step_in_backward(net, optim.AdamW), 3, dtype=BF16)
    for kind in ("update", "gradient", "activation"):
        assert of_kind(within, kind) == of_kind(usual, kind)
        assert of_kind(within, kind)


def test_features_and_their_gradients() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    seen: dict[tuple[str, str], Tensor] = {}

    def keep(name: str) -> Any:
        def forward(module: nn.Module, args: Any, output: Tensor) -> None:
            seen["activation", name] = output.detach().clone()
            output.register_hook(lambda grad: seen.update({("activation_gradient", name): grad.clone()}))

        return forward

    names = ["embed", "blocks.0", "blocks.1", "head"]
    for name in names:
        net.get_submodule(name).register_forward_hook(keep(name))
    with gauges.watch(net, optimizer, every=2, activations=names) as watch:
        train(net, optimizer, 2)
    for (kind, name), x in seen.items():
        same(of_kind(watch.rows(), kind, step=2, name=name)[0], x)
    assert len(seen) == 8


def test_accumulated_batches_count_together() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    seen = []
    net.blocks[0].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with gauges.watch(net, optimizer, every=1) as watch:
        torch.manual_seed(0)
        for step in range(3):
            loss_of(net, *batch(step, rows=step + 2)).backward()
        optimizer.step()
    same(of_kind(watch.rows(), "activation", name="blocks.0")[0], *seen)


def test_a_pass_that_will_be_made_again_is_not_measured() -> None:
    """Nor what the context was left by; a watch that measures no features has it too."""
    rows = []
    for again in (False, True):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with gauges.watch(net, optimizer, every=1) as watch:
            if again:
                with contextlib.suppress(KeyError), torch.no_grad(), watch.paused():
                    net(batch(0)[0])
                    raise KeyError
            train(net, optimizer, 2, watch)
        rows.append([row for row in watch.rows() if row["kind"].startswith("activation")])
    assert rows[0] == rows[1]
    assert rows[0]
    with gauges.watch(net, optimizer, every=1, activations=False) as watch, watch.paused():
        net(batch(0)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_features_are_counted_once(reentrant: bool) -> None:
    net, twin = model(), model()
    for block in net.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=reentrant)
    found = []
    for each in (net, twin):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        with gauges.watch(each, optimizer, every=1, activations=["blocks.0", "blocks.0.0"]) as watch:
            losses = train(each, optimizer, 2)
        found.append((losses, *(of_kind(watch.rows(), kind) for kind in ("activation", "activation_gradient"))))
    assert found[0] == found[1]
    assert [*map(len, found[0])] == [2, 4, 4]


def test_the_default_modules() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    flat = nn.Module()
    flat.one, flat.norm, flat.act = nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()
    flat.forward = lambda x: flat.norm(flat.act(flat.one(x)))  # type: ignore[method-assign]

    def seen(module: nn.Module, **options: Any) -> list[dict[str, Any]]:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with gauges.watch(module, optimizer, every=1, **options) as watch:
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return watch.rows()

    for module, names in ((net, {"0", "2"}), (flat, {"one", "norm"})):
        assert {row["name"] for row in of_kind(seen(module), "activation")} == names
    kinds = {row["kind"] for row in seen(net, activations=False, gradients=False)}
    assert kinds == {"run", "step", "update", "missing"}  # the loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_compiled_models_train_the_same_and_keep_loss_and_updates() -> None:
    """Features inside of what is compiled are not seen; a module of its own, compiled, is seen from outside."""
    plain = train(net := model(), torch.optim.AdamW(net.parameters()), 3)
    for how in ("whole", "in place", "blocks"):
        net = model()
        run: nn.Module = net
        if how == "whole":
            run = torch.compile(net, backend="eager", fullgraph=True)
        elif how == "in place":
            net.compile(backend="eager", fullgraph=True)
        else:
            for place, block in enumerate(net.blocks):
                net.blocks[place] = torch.compile(block, backend="eager", fullgraph=True)
        optimizer = torch.optim.AdamW(net.parameters())
        with gauges.watch(run, optimizer, every=1) as watch:
            assert train(run, optimizer, 3, watch) == plain
        rows = watch.rows()
        assert len(of_kind(rows, "step")) == len(of_kind(rows, "update", name="")) == 3
        assert {row["name"] for row in of_kind(rows, "update")} - {""} == {n for n, _ in model().named_parameters()}
        names = {row["name"] for row in of_kind(rows, "activation")}
        features = {"embed", "blocks.0", "blocks.1"}
        assert names == (features if how == "blocks" else set())
        assert [set(row["names"]) for row in of_kind(rows, "missing")] == ([] if how == "blocks" else [features])


MOMENTS: dict[str, Any] = {
    "8bit": {"states": "8bit"},
    "fp8": {"states": "fp8", "weights": "split"},
    "4bit": {"states": "4bit"},
    "log8": {"states": "log8", "weights": "split8"},
    "log4, maximize": {"states": "log4", "weights": "stochastic", "maximize": True},
    "v alone": {"states": {"m": "fp32", "v": "8bit"}},
    "clipped": {"states": "8bit", "clip_updates": True},
}


@pytest.mark.parametrize("options", MOMENTS.values(), ids=MOMENTS)
def test_moments_are_previewed_to_the_bit(options: dict[str, Any]) -> None:
    """The codes whose errors are recorded are the ones that the step writes.

    A sample of them is one row in sixteen, another at every turn. Formats that round by chance do so by other
    random numbers there.
    """
    p = nn.Linear(1030, 96, bias=False).to(BF16).weight
    optimizer = optim.AdamW([p], 1e-3, min_quantized_size=64, block_size=64, **options)
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        p.grad = torch.randn(p.shape, generator=generator).to(BF16)
        if step < 2:
            optimizer.step()
    view = optimizer.parameter_view(p)
    assert view is not None
    whole = optimizer.preview(p, lambda x: x)
    stochastic = any(slot.storage.stochastic for slot in view.plan.slots)
    for turn in (0, 19):
        for moment, part in zip(whole, optimizer.preview(p, BlockSample.of_view(view, turn).of), strict=True):
            assert (part.slot, part.format) == (moment.slot, moment.format)
            for key in ("exact",) if stochastic else ("exact", "codes", "kept"):
                rows = getattr(moment, key).reshape(-1)[: 96 * 1024].view(96, 1024)[turn % 16 :: 16]
                assert torch.equal(getattr(part, key), rows.flatten()), key
    optimizer.step()
    slots = {slot.slot.name: slot for slot in optimizer.plan_of(p).slots}
    assert len(whole) == (1 if isinstance(options["states"], dict) else 2)
    for moment in whole:
        slot = slots[moment.slot]
        state = slot.tensors(optimizer.state[p])
        assert torch.equal(slot.storage.codes(state, p.shape).reshape(-1), moment.codes.reshape(-1))
        assert torch.equal(slot.decode(optimizer.state[p], p.shape), moment.kept)
        assert 0 < (moment.exact - moment.kept).norm() / moment.exact.norm() < 0.5


def test_records_of_moments() -> None:
    """Each look is at the next parameter."""
    rows = watched(
        lambda net: optim.AdamW(net.named_parameters(), states="8bit", min_quantized_size=1000),
        12,
        dtype=BF16,
        states_every=2,
    )
    states = of_kind(rows, "state")
    large = [name for name, p in model().named_parameters() if p.numel() >= 1000]
    assert len(large) == 5
    assert [(r["step"], r["name"], r["slot"]) for r in states] == [
        (2 * look, large[look % 5], slot) for look in range(1, 7) for slot in ("m", "v")
    ]
    for row in states:
        assert row["format"] == "8bit"
        assert len(row["usage"]) == 256
        assert sum(row["usage"]) == model().get_parameter(row["name"]).numel()
        assert 0 < row["relative_norm"] < 0.2
        assert 0 <= row["flushed"] < 1
    maps = of_kind(rows, "adam_error")
    assert [row["step"] for row in maps] == [2, 4, 6, 8, 10, 12]
    for row, state in zip(maps, states[::2], strict=True):
        assert row["name"] == ""
        usage, error = (unpacked(row[key], (256, 256)) for key in ("usage", "error"))
        assert usage is not None
        assert error is not None
        assert usage.sum() == sum(state["usage"])
        assert not error[usage == 0].any()
        assert error.sum() / usage.sum() == pytest.approx(row["mean_relative"], rel=0.05)


def test_infinite_gradients_have_no_moments_but_are_counted() -> None:
    net = model(BF16)
    optimizer = optim.AdamW8bit(net.named_parameters(), min_quantized_size=64)
    names = [name for name, p in net.named_parameters() if p.numel() >= 64]
    with gauges.watch(net, optimizer, every=1, states_every=1) as watch:
        for step in range(len(names)):
            optimizer.zero_grad()
            loss_of(net, *batch(step)).backward()
            net.embed.weight.grad[2, 3:5] = float("inf")
            optimizer.step()
    rows = watch.rows()
    assert {row["name"] for row in of_kind(rows, "state")} == set(names) - {"embed.weight"}
    assert len(of_kind(rows, "adam_error")) == len(names) - 1
    gradient = of_kind(rows, "gradient", name="embed.weight")[0]
    assert gradient["nonfinite"] == 2
    assert gradient["mean"] > 0
    update = of_kind(rows, "update", name="embed.weight")[0]  # its step was skipped
    assert (update["norm"], update["nonzero"]) == (0, 0)


def test_what_will_not_arrive_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Features that no hook saw, and quantized moments of a step that decides on its gradients by itself."""
    net = model()
    net.idle = nn.ModuleList([nn.Linear(2, 2)])
    optimizer = optim.AdamW8bit(net.parameters(), min_quantized_size=64, max_grad_norm=1.0)
    with caplog.at_level("INFO", "narrowgauge.gauges"), gauges.watch(net, optimizer, 1, states_every=1) as watch:
        train(net, optimizer, 2)
    missing = of_kind(watch.rows(), "missing")
    assert [(row["of"], row["step"]) for row in missing] == [("state", 1), ("activation", 1), ("loss", 1)]
    assert missing[0]["why"].startswith("max_grad_norm")
    assert missing[1]["names"] == ["idle.0"]
    assert not of_kind(watch.rows(), "state")
    assert caplog.text.count("no records of quantized moments: ") == 1
    assert caplog.text.count("no records of features: ") == 1
    assert caplog.text.count("no loss: the model returns none; call gauges.loss before step()") == 1
    assert "inside a compiled region" in caplog.text


def test_options_that_change_and_empty_parameters_end_no_training() -> None:
    net = nn.ParameterDict({"w": torch.randn(40, 64), "none": torch.zeros(0, 4)})
    optimizer = optim.AdamW(net.values(), 1e-3, min_quantized_size=0, states="8bit")
    with gauges.watch(net, optimizer, 1, states_every=1) as watch:
        for step in range(4):
            net["w"].grad, net["none"].grad = torch.full((40, 64), 0.1 * (step + 1)), torch.zeros(0, 4)
            if step == 2:
                optimizer.param_groups[0]["block_size"] = 128
            optimizer.step()
    assert [row["step"] for row in of_kind(watch.rows(), "state")] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_sampled_preview_counts_every_update_and_a_step_that_raised_is_recorded_when_it_is_taken() -> None:
    net = nn.Linear(1030, 96, bias=False)
    optimizer = optim.AdamW(net.parameters(), 1e-3, states="8bit")
    with gauges.watch(net, optimizer, 1, states_every=1) as watch:
        for step in range(3):
            net.weight.grad = torch.randn(net.weight.shape)
            if step == 1:  # the watch has previewed moments of a step that is not taken
                handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # type: ignore[arg-type, return-value]
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                handle.remove()
            optimizer.step()
    states = of_kind(watch.rows(), "state")
    assert [row["step"] for row in states] == [1, 1, 2, 2, 3, 3]
    assert {sum(row["usage"]) for row in states} == {6 * 1024}
    maps = [unpacked(row["usage"], (256, 256)) for row in of_kind(watch.rows(), "adam_error")]
    assert [usage.sum() for usage in maps if usage is not None] == [pytest.approx(96 * 1030, rel=1e-5)] * 3


def test_a_step_that_a_loss_scaler_holds_has_no_moments() -> None:
    net = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    optimizer = optim.AdamW(net.parameters(), 1e-3, states="8bit", min_quantized_size=64)
    scaler = scaling.DynamicLossScaler(init_scale=2.0)
    with gauges.watch(net, optimizer, 1, states_every=1, scaler=scaler) as watch:
        for step in range(3):
            for p in net.parameters():
                p.grad = torch.ones(64, 64)
            if step == 1:
                net[1].weight.grad[3, 3] = torch.inf
            scaler.scale(torch.zeros(()))
            scaler.step(optimizer)
            scaler.update()
    assert [row["step"] for row in of_kind(watch.rows(), "state")] == [1, 1, 3, 3]
    assert [row["step"] for row in of_kind(watch.rows(), "adam_error")] == [1, 3]


@pytest.mark.parametrize("kind", [optim.LARS, optim.LAMB, optim.Muon, optim.StableAdamW])
def test_moments_of_rules_with_sums_are_taken_whole(kind: Any) -> None:
    """Of clipped updates the moments do not depend on the sum."""
    p = nn.Parameter(torch.ones(96, 1024))
    optimizer = kind([p], 1e-3, states="8bit")
    p.grad = torch.ones_like(p)
    view = optimizer.parameter_view(p)
    counts = {moment.exact.numel() for moment in optimizer.preview(p, BlockSample.of_view(view, 0).of)}
    assert counts == ({6 * 1024} if kind is optim.StableAdamW else {96 * 1024})


def test_wrappers_leave_the_names_of_records_and_checkpoints_alone(tmp_path: Path) -> None:
    """Of activation checkpointing and `torch.compile`: records and checkpoints name a parameter as without them."""

    def run(net: nn.Module, folder: str) -> tuple[dict[str, set[str]], set[str], dict[str, Any]]:
        optimizer = optim.AdamW(net.parameters())
        with gauges.watch(net, optimizer, every=1) as watch:
            train(net, optimizer, 1)
        header, *rows = watch.rows()
        names = {
            kind: {row["name"] for row in of_kind(rows, kind)} for kind in ("update", "gradient", "activation")
        }
        path = distributed.save_checkpoint(tmp_path / folder, model=net, optimizer=optimizer, step=1)
        saved = set(re.findall(r'"model/([^"]+)"', (path / "checkpoint.json").read_text()))
        return names, saved, {key: header[key] for key in ("parameters", "depth", "embeddings")}

    plain = run(model(), "plain")
    wrapped = model()
    for index, block in enumerate(wrapped.blocks):
        wrapped.blocks[index] = checkpoint_wrapper(block)
    assert run(wrapped, "wrapped") == plain
    names, *others = run(torch.compile(wrapped, backend="eager"), "compiled")
    assert names == plain[0] | {"activation": set()}
    assert others == [*plain[1:]]


def test_features_of_many_accumulated_batches_keep_a_bounded_sample() -> None:
    net = torch.nn.Linear(256, 256)
    features = Features({"net": net}, targets(list(FORMATS)[:1]))
    features.attach()
    features.expect(due=True)
    for _ in range(24):
        net(torch.ones(128, 256)).square().mean().backward()
    for kind in ("activation", "activation_gradient"):
        calls = features._seen[kind]["net"]
        assert 2**18 <= sum(call.sample.numel() for call in calls) < 2**19 < 24 * 128 * 256
        assert sum(call.elements for call in calls) == 24 * 128 * 256
    assert all(float(part.table[0, 1]) == 24 * 128 * 256 for part in features.parts(1, torch.device("cpu")))
