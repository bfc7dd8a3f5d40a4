"""The history of a loss scale, of torch's scaler and of ours, and gradients without it."""

from typing import Any

import pytest
import torch
from watched import batch, loss_of, model, of_kind

from narrowgauge import gauges, optim
from narrowgauge.scaling import DynamicLossScaler, StaticLossScaler, TensorLossScaler

BAD = (3, 4, 8)  # iterations whose gradient overflows


def run(
    make: Any, scaler: Any, every: int = 2, watched: bool = True
) -> tuple[list[dict[str, Any]], list[float], Any]:
    """Twelve iterations, three of them with a gradient of inf; the records, the scales, the weights."""
    net = model()
    optimizer = make(net)
    scales = []
    torch.manual_seed(0)

    def loop(watch: Any = None) -> None:
        for step in range(1, 13):
            loss = loss_of(net, *batch(step))
            if watch is not None:
                watch.loss(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if step in BAD:
                net.head.weight.grad[0] = float("inf")
            scales.append(scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()

    if watched:
        with gauges.watch(net, optimizer, every, scaler=scaler) as watch:
            loop(watch)
        return watch.rows(), scales, net
    loop()
    return [], scales, net


def losses_given(scaler: Any, bad: tuple[int, ...], batches: int = 1) -> tuple[list[dict[str, Any]], list[float]]:
    """The records of eight iterations of torch's AdamW, of which some have a loss of inf; the losses of all."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 0.0)
    losses = []
    net.eval()
    net.blocks.train()  # features are those of training
    for block in net.blocks:
        block[2].p = 0.0
    with gauges.watch(net, optimizer, every=2, scaler=scaler) as watch:
        for step in range(8):
            optimizer.zero_grad()
            for part in range(batches):
                loss = loss_of(net, *batch(2 * step + part)) * (float("inf") if step in bad else 1.0)
                watch.loss(loss)
                losses.append(loss.item())
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return watch.rows(), losses


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, DynamicLossScaler, StaticLossScaler])
@pytest.mark.filterwarnings("ignore:a step was skipped")
def test_a_skipped_step_leaves_nothing_in_the_next_ones_records(kind: Any, batches: int) -> None:
    bad = (1, 4, 5)
    rows, losses = losses_given(kind("cpu", init_scale=8.0), bad, batches)
    wanted = [sum(losses[batches * n : batches * (n + 1)]) / batches for n in range(8) if n not in bad]
    assert [row["loss"] for row in of_kind(rows, "step")] == pytest.approx(wanted, rel=1e-6)
    # The weights stay: step 2 is iteration 2 and step 4 is iteration 6, in a run that skips nothing as well.
    plain, _ = losses_given(kind("cpu", init_scale=8.0), (), batches)
    features = of_kind(rows, "activation") + of_kind(rows, "activation_gradient")
    assert {row["step"] for row in features} == {2, 4}
    assert {row["elements"] for row in features} == {row["elements"] for row in of_kind(plain, "activation")}
    assert not any(row["nonfinite"] for row in features)


def dynamic(kind: Any) -> Any:
    options = {"init_scale": 1024.0, "growth_interval": 2}
    return kind("cpu", **options)


@pytest.mark.parametrize("own", [False, True])
def test_torchs_scaler_skips_are_counted_though_it_does_not_say(own: bool) -> None:
    make: Any = (
        (lambda net: optim.AdamW(net.parameters())) if own else (lambda net: torch.optim.AdamW(net.parameters()))
    )
    rows, scales, net = run(make, dynamic(torch.amp.GradScaler))
    _, _, plain = run(make, dynamic(torch.amp.GradScaler), watched=False)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = of_kind(rows, "step")
    taken = [n for n in range(1, 13) if n not in BAD]
    assert len(steps) == len(taken)
    assert [row["loss_scale"] for row in steps] == [scales[n - 1] for n in taken]
    assert [row["skipped"] for row in steps] == [sum(bad < n for bad in BAD) for n in taken]


def test_our_scaler_inside_of_the_step_counts_what_the_device_has_skipped() -> None:
    """Its steps are called, and hold: they count as steps, without an update."""
    make: Any = lambda net: optim.AdamW(net.parameters(), nonfinite="skip")  # noqa: E731
    rows, scales, net = run(make, dynamic(DynamicLossScaler), every=1)
    _, _, plain = run(make, dynamic(DynamicLossScaler), watched=False)
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = of_kind(rows, "step")
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["loss_scale"] for row in steps] == scales
    assert [row["skipped"] for row in steps] == [sum(bad < n for bad in BAD) for n in range(1, 13)]
    for row in of_kind(rows, "update", name=""):
        assert (row["nonzero"] == 0) == (row["step"] in BAD)
    bad = of_kind(rows, "gradient", step=3, name="embed.weight")[0]
    assert bad["nonfinite"] == 48


def test_the_gauges_hook_leaves_unscaling_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hooks may look at gradients and cost a pass over them; this one knows of the scale."""
    net = model()
    optimizer = optim.AdamW(net.parameters())
    scaler: Any = DynamicLossScaler("cpu", init_scale=64.0)
    monkeypatch.setattr(scaler, "unscale_", lambda optimizer: pytest.fail("a pass of its own"))
    with gauges.watch(net, optimizer, every=1, scaler=scaler) as watch:
        loss = loss_of(net, *batch(0))
        (wanted,) = torch.autograd.grad(loss, net.embed.weight, retain_graph=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    gradient = of_kind(watch.rows(), "gradient", name="embed.weight")[0]
    assert gradient["absmax"] == pytest.approx(float(wanted.abs().max()), rel=1e-5)
    feature = of_kind(watch.rows(), "activation_gradient", name="blocks.1")[0]
    assert feature["absmax"] > 0  # as it flows: with the scale


@pytest.mark.parametrize("make", [torch.optim.AdamW, optim.AdamW])
def test_steps_that_unscale_on_the_device(make: Any) -> None:
    """torch's GradScaler leaves it to optimizers with fused=True."""
    rows, scales, _ = run(lambda net: make(net.parameters(), fused=True), dynamic(torch.amp.GradScaler), every=1)
    steps = of_kind(rows, "step")
    assert [row["loss_scale"] for row in steps] == scales
    assert [row["skipped"] for row in steps] == [sum(bad < n for bad in BAD) for n in range(1, 13)]
    plain, _, _ = run(lambda net: make(net.parameters()), torch.amp.GradScaler("cpu", enabled=False), every=1)
    first, other = of_kind(rows, "gradient", step=1), of_kind(plain, "gradient", step=1)
    for one, two in zip(first, other, strict=True):
        assert one["absmax"] == pytest.approx(two["absmax"], rel=1e-5)
    for row in of_kind(rows, "update", name=""):
        assert (row["nonzero"] == 0) == (row["step"] in BAD)


@pytest.mark.filterwarnings("ignore:a step was skipped", "ignore:.* had inf or NaN")
@pytest.mark.parametrize("kind", [StaticLossScaler, TensorLossScaler])
def test_fixed_scales(kind: Any) -> None:
    rows, _, _ = run(lambda net: optim.AdamW(net.parameters()), kind("cpu", init_scale=512.0))
    assert {row["loss_scale"] for row in of_kind(rows, "step")} == {512.0}


def test_a_disabled_scaler_has_no_history() -> None:
    rows, _, _ = run(lambda net: torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu", enabled=False))
    assert {(row["loss_scale"], row["skipped"]) for row in of_kind(rows, "step")} == {(None, None)}


@pytest.mark.parametrize("first", [0, 6])
def test_a_training_that_the_scaler_has_stopped_raises_an_alarm(first: int, caplog: Any) -> None:
    net = torch.nn.Linear(4, 3)
    optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu")
    alarms: list[Any] = []
    with gauges.watch(net, optimizer, every=2, scaler=scaler, on_alarm=alarms.append) as record:
        for number in range(first + 50):
            loss = net(torch.ones(2, 4)).square().mean() * (float("nan") if number >= first else 1.0)
            record.loss(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        (alarm,) = alarms
    assert (alarm["of"], alarm["step"], alarm["value"]) == ("skipped steps", max(first, 1), 20)
    assert "the scaler skipped 20 steps in a row" in caplog.text
    (advice,) = [one for one in gauges.advise(record.rows()) if one.rule == "every step skipped"]
    assert (advice.urgency, "nothing is trained" in str(advice)) == ("change", True)
    went_on = [*record.rows(), {"kind": "step", "step": first + 1, "loss": 1.0, "skipped": None, "seconds": 0.1}]
    assert not [one for one in gauges.advise(went_on) if one.rule == "every step skipped"]
