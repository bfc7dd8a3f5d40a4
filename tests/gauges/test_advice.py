"""Advice: each rule speaks where its threshold is crossed, is silent just before, and says its numbers."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.gauges import Advice, advise
from narrowgauge.gauges._rules import RULES
from recorded import NAMES, changed, header, sound, state, step, tensor, update

Records = list[dict[str, Any]]


def rules(records: Records) -> list[str]:
    return [piece.rule for piece in advise(records)]


def only(records: Records) -> Advice:
    (piece,) = advise(records)
    return piece


def says(piece: Advice, *parts: str) -> None:
    for part in parts:
        assert part in str(piece)


def updates(names: Any, steps: range | None = None, **values: Any) -> Records:
    return changed(sound(), "update", names, steps, **values)


def spiking(rms_step: int, loss_steps: range, tensor: str = "wte.weight") -> Records:
    records = changed(sound(400), "update", [tensor], range(rms_step, rms_step + 1), rms=5.0)
    return changed(records, "step", None, loss_steps, loss=9.0)


def scaled(drops: int) -> Records:
    def scale(record: dict[str, Any]) -> float:
        return 65536.0 / 2 ** min(drops, record["step"] // 20)

    return changed(sound(), "step", loss_scale=scale, skipped=0)


def grown(factor: float) -> Records:
    return changed(sound(), "activation", mean=lambda r: factor ** (int(r["name"][2:]) / 2))


def states(**values: Any) -> Records:
    return sound() + [state(number, "wte.weight", "v", **values) for number in (50, 100, 150, 200)]


def in_float8(kind: str, form: str, loss: str, share: float, layers: str = "e4m3") -> Records:
    name = "h.1" if "activation" in kind else "h.1.fc.weight"
    records = changed(sound(), kind, [name], formats={form: {loss: share}})
    return [header(low_precision={"h.0.fc": [layers]}), *records[1:]]


def with_losses(losses: list[float]) -> Records:
    return changed(sound(len(losses)), "step", loss=lambda r: losses[r["step"] - 1])


def noisy(mean: float, deviation: float, count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, deviation) for _ in range(count)]


STALE = updates(NAMES, rms=0.2)
QUIET: dict[str, Records] = {
    "a sound run": sound(),
    "no records": [],
    "a header": [header()],
    "RMS_t below 2.3": updates(["wte.weight"], range(100, 101), rms=2.29),
    "a spike in the first twentieth": updates(["wte.weight"], range(10, 11), rms=9.0),
    "a model's quality above 0.95": updates([""], descent_quality=0.951),
    # Stochastic rounding: most elements stay, and in expectation nothing is missing.
    "stochastic rounding": updates(None, lost=0.9, lost_visible=0.9, descent_quality=1.01),
    # With gradients that fall, a second moment that looks back is larger for a reason.
    "falling gradients": changed(STALE, "gradient", mean=lambda r: 1.0 / r["step"]),
    "few stale moments": updates(NAMES[:2], rms=0.2),
    "three halvings": scaled(3),
    "features below 4 times": grown(3.9),
    "a state's error below 0.1": states(relative_norm=0.09),
    "a state's error that the weight is given": changed(sound(), "state", relative_norm=0.4, fed_back=1),
    "losses before a storage was widened": [
        *updates(["ln.weight"], lost=1.0, lost_visible=1.0, descent_quality=0.0),
        {"kind": "storages", "step": 200, "parameters": {"ln.weight": {"weights": "split8"}}},
    ],
    "underflow below 0.1": in_float8("gradient", "e4m3", "underflow", 0.099),
    "overflow below 0.001": in_float8("activation", "e5m2", "overflow", 0.00099),
    "underflow without float8": in_float8("gradient", "e4m3", "underflow", 0.2, layers="int8"),
    "underflow of a norm": [
        header(low_precision={"h.0.fc": ["e4m3"]}),
        *changed(sound(), "gradient", ["ln.weight"], formats={"e4m3": {"underflow": 1.0}})[1:],
    ],
}
LOUD: dict[str, tuple[Records, str, str, tuple[str, ...]]] = {
    "an RMS spike": (
        updates(["wte.weight"], range(100, 101), rms=4.1), "second moment out of date", "watch",
        ("wte.weight's RMS_t reached 4.1 at step 100; 1 RMS spike of at least 2.3", "no loss spike began 1 to 8",
         "StableAdamW", "lower beta2", "Sections 3.4 and 3.5"),
    ),
    "the highest value": (
        updates(["wte.weight"], range(100, 111), rms=lambda r: {100: 3.0, 105: 4.1}.get(r["step"], 2.5)),
        "second moment out of date", "watch", ("wte.weight's RMS_t reached 4.1 at step 105; 2 RMS spikes",),
    ),
    "a tensor that stands still": (
        updates(["ln.weight"], lost=1.0, lost_visible=1.0, descent_quality=0.0), "lost updates", "change",
        ("ln.weight does not move at all: every update is lost.", "split8", "Collage-light", "of their own"),
    ),
    "a model's quality": (
        updates([""], descent_quality=0.62), "lost updates", "change", ("62% of the update's length arrives",),
    ),
    "updates below the low words": (
        updates(["ln.weight"], lost=0.9, lost_visible=1.0, descent_quality=0.1), "lost updates", "watch",
        ("Low words are kept",),
    ),
    "low words that wait": (
        updates([""], lost=0.001, lost_visible=0.18, visible_descent_quality=0.7), "updates wait in low words",
        "note", ("18% of the updates do not show", "Nothing needs to be done."),
    ),
    "stale moments": (
        [header(groups=[{"parameters": list(NAMES), "states": "bf16"}]), *STALE[1:]],
        "second moment does not decay", "change", ("5 of 5 tensors", "Collage-plus"),
    ),
    "a loss of inf": (
        changed(sound(), "step", None, range(7, 8), loss=math.inf), "loss not finite", "change",
        ("The loss is inf at step 7, 1 step in all.",),
    ),
    "one culprit": (
        changed(sound(), "gradient", ["wte.weight"], range(50, 80), nonfinite=2), "gradients not finite", "change",
        ("at 6 measured steps of 40, each time in wte.weight.", "TensorLossScaler"),
    ),
    "one culprit, once": (
        changed(sound(), "gradient", ["wte.weight"], range(50, 51), nonfinite=2), "gradients not finite", "watch",
        ("at 1 measured step of 40, in wte.weight.",),
    ),
    "all tensors": (
        changed(sound(), "gradient", NAMES, range(50, 80), nonfinite=2), "gradients not finite", "change",
        ("in 5 tensors of 5", "Lower the learning rate; in fp16 lower the loss scale, or train in bf16."),
    ),
    "all tensors, scaled": (
        changed(changed(sound(), "gradient", NAMES, range(50, 80), nonfinite=2), "step", loss_scale=1024.0),
        "gradients not finite", "change", ("in 5 tensors of 5. Lower the loss scale or the learning rate",),
    ),
    "four halvings": (
        scaled(4), "loss scale falls", "change", ("lowered 4 times in 200 steps, from 65536 to 4096",),
    ),
    "growing features": (
        grown(4.0), "features grow with depth", "note", ("from 1 in h.0 to 4 in h.2", "LayerScale", "Section 2.3"),
    ),
    "a gradient's underflow": (
        in_float8("gradient", "e4m3", "underflow", 0.1), "gradients in float8", "note",
        ("1 of 4 gradients", "10% would round to zero in e4m3", "All plans of ng.linear have one."),
    ),
    "an activation's overflow": (
        in_float8("activation", "e5m2", "overflow", 0.001), "activations in float8", "note",
        ("0.1% would overflow in e5m2",),
    ),
    "its gradient's underflow": (
        in_float8("activation_gradient", "e5m2", "underflow", 0.3), "gradients of activations in float8", "note",
        ("30% would round to zero in e5m2",),
    ),
    "an embedding's state": (
        states(relative_norm=0.4), "coarse states", "change",
        ("wte.weight [v]: relative error of the state 40%", "StableEmbedding", "Section 2.3"),
    ),
    "zeros of v": (states(flushed=0.2), "coarse states", "change", ("rounded to zero 20%",)),
    "another state": (changed(sound(), "state", relative_norm=0.4), "coarse states", "change", ("log8",)),
    "a gradient of zero": (
        changed(sound(), "gradient", ["h.1.fc.weight"], absmax=0.0, mean=0.0), "no gradient", "watch",
        ("h.1.fc.weight had no gradient other than zero",),
    ),
    "an update of zero": (updates(["h.1.fc.weight"], norm=0.0, nonzero=0), "no gradient", "watch", ()),
}  # fmt: skip


@pytest.mark.parametrize("records", QUIET.values(), ids=QUIET)
def test_below_its_threshold_a_rule_is_silent(records: Records) -> None:
    assert advise(records) == []


@pytest.mark.parametrize(("records", "rule", "urgency", "parts"), LOUD.values(), ids=LOUD)
def test_a_rule_says_what_crossed_its_threshold(
    records: Records, rule: str, urgency: str, parts: tuple[str, ...]
) -> None:
    piece = only(records)
    assert (piece.rule, piece.urgency) == (rule, urgency)
    says(piece, *parts)


def test_the_numbers_are_the_evidence() -> None:
    def first(records: Records) -> tuple[Any, ...]:
        number = only(records).evidence[0]
        return number.quantity, number.name, number.step, number.value, number.threshold

    assert first(LOUD["an RMS spike"][0]) == ("RMS_t", "wte.weight", 100, 4.1, 2.3)
    assert first(scaled(4)) == ("times the loss scale was lowered", "", 80, 4, 3)
    assert first(LOUD["a model's quality"][0]) == ("effective descent quality", "", 200, 0.62, 0.95)
    assert first(LOUD["an update of zero"][0]) == ("norm of the update", "h.1.fc.weight", 200, 0.0, None)
    assert first(in_float8("gradient", "e5m2", "overflow", 0.1))[:2] == (
        "share of overflow in e5m2",
        "h.1.fc.weight",
    )


@pytest.mark.parametrize("distance", [1, 8])
def test_a_loss_spike_after_an_rms_spike_is_a_change_to_make(distance: int) -> None:
    piece = only(spiking(300, range(300 + distance, 303 + distance)))
    assert piece.urgency == "change"
    # The steps judged are 101 to 400, of which 8 follow the RMS spike.
    says(
        piece,
        f"1 loss spike of 1 followed one within 8 steps (step {300 + distance} after wte.weight at step 300)",
        f"by chance is {8 / 300:.3g}.",
    )  # fmt: skip
    assert (piece.evidence[0].quantity, piece.evidence[0].value) == ("loss", 9.0)


@pytest.mark.parametrize("tensor", ["wte.weight", "h.1.fc.weight"])
def test_loss_and_gradients_that_jump_at_one_step_are_one_piece_of_advice(tensor: str) -> None:
    """As of one bad batch; the loss of a step is older than its update."""
    piece = only(spiking(300, range(300, 304), tensor))
    assert (piece.rule, piece.urgency) == ("second moment out of date", "watch")
    says(piece, "no loss spike began 1 to 8 steps after one.", "jumped together at step 300.")
    assert piece.action.startswith("Look at the data of step 300. ")
    assert [e.quantity for e in piece.evidence] == ["loss", "RMS_t"]


def test_an_rms_spike_within_a_loss_spike_is_named_with_it() -> None:
    """A blow-up may begin with a small deviation of the loss."""
    records = changed(spiking(305, range(309, 311)), "step", None, range(302, 303), loss=3.0)
    piece = only(records)
    says(
        piece, "no loss spike began", "wte.weight's RMS spike of step 305 came within the loss spike that began at"
    )
    says(piece, "step 302.", "Look at the data of step 302.")
    clipped = [header(optimizer="StableAdamW"), *records[1:]]
    says(only(clipped), "came within the loss spike", "Updates are clipped already")


@pytest.mark.parametrize("distance", [-10, 9])
def test_a_loss_spike_out_of_reach_has_another_cause(distance: int) -> None:
    found = {piece.rule: piece for piece in advise(spiking(300, range(300 + distance, 303 + distance)))}
    assert set(found) == {"second moment out of date", "loss spikes of another cause"}
    assert {piece.urgency for piece in found.values()} == {"watch"}
    says(found["loss spikes of another cause"], "not measured at every step", "every=1")


def test_with_every_step_measured_no_spike_can_have_been_missed() -> None:
    records = [record for record in spiking(300, range(320, 323)) if record["kind"] != "update"]
    records += [update(number, name) for number in range(1, 401) for name in ("", *NAMES)]
    piece = only(records)
    assert "not measured" not in piece.finding
    says(piece, "data of these steps")


def test_only_embeddings_predict_where_there_are_any() -> None:
    """By name, or by the header: rows of `nn.Sequential` are numbers."""
    records = spiking(300, range(304, 307), tensor="h.1.fc.weight")
    assert rules(records) == ["second moment out of date", "loss spikes of another cause"]
    named = [header() | {"embeddings": ["h.1.fc.weight"]}, *records[1:]]
    assert rules(named) == rules(spiking(300, range(304, 307)))


def test_a_loss_that_is_not_finite_comes_first_with_where_it_began() -> None:
    records = changed(sound(), "step", None, range(120, 201), loss=math.nan)
    records = changed(records, "activation", ["h.1", "h.2"], range(115, 201), nonfinite=3)
    records = changed(records, "update", ["ln.weight"], lost=1.0, descent_quality=0.0)
    first, second = advise(records)
    assert (first.rule, second.rule) == ("loss not finite", "lost updates")
    assert first.finding == (
        "The loss is NaN at step 120 and every later step. "
        "The first tensors with inf or NaN: h.1 and h.2, at step 115."
    )


@pytest.mark.parametrize("how", ["counted by a scaler", "by the optimizer"])
def test_a_loss_of_inf_whose_step_was_skipped_undoes_nothing(how: str) -> None:
    records = changed(sound(), "step", None, range(10, 11), loss=math.inf)
    if how == "by the optimizer":
        records = [header(groups=[{"parameters": list(NAMES), "nonfinite": "skip"}]), *records[1:]]
    else:
        records = changed(records, "step", skipped=lambda r: int(r["step"] > 10))
    piece = only(records)
    assert (piece.rule, piece.urgency) == ("loss not finite", "watch")
    says(piece, "The loss is inf at step 10, 1 step in all.", "are skipped, and the loss is finite again.")
    assert "checkpoint" not in str(piece)
    ended = only(changed(records, "step", None, range(195, 201), loss=math.nan))
    assert ended.urgency == "change"
    says(ended, "Go back to a checkpoint")


FALL = [8.0 - 0.04 * n for n in range(100)]
RISING: dict[str, tuple[list[float], str]] = {
    "at once": ([5.6, 30.0, 71.0, *noisy(22, 2, 27)], "from 5.6 at step 1 to"),
    "wildly": ([6.0, *noisy(463, 120, 59)], "from 6 at step 1 to"),
    "after a fall": (FALL + noisy(6, 0.1, 60), "from 4.5 at step 81 to 6.04 at step 160."),
    "below zero": ([-10.0, -11.0, *noisy(-5, 0.5, 58)], "from -10 at step 1 to"),
}
NOT_RISING: dict[str, list[float]] = {
    **{f"flat and noisy {seed}": noisy(2.0, 0.2, 60, seed) for seed in range(20)},
    "a spike": FALL + noisy(70, 5, 20) + noisy(4, 0.1, 20),
    "back at its start": [5.6, *noisy(71, 5, 40), *noisy(5.7, 0.1, 19)],
    "a drift": FALL + noisy(4.7, 0.1, 60),
    "near zero": [5.0 * 0.9**n for n in range(80)] + noisy(0.1, 0.01, 20),
    "too few losses": [5.6, *noisy(71, 5, 18)],
}


@pytest.mark.parametrize(("losses", "found"), RISING.values(), ids=RISING)
def test_a_loss_that_rises_and_stays_comes_first(losses: list[float], found: str) -> None:
    piece = advise(changed(with_losses(losses), "update", ["ln.weight"], lost=1.0, descent_quality=0.0))[0]
    assert (piece.rule, piece.urgency) == ("loss rises", "change")
    says(piece, f"The loss rose {found}", "Lower the learning rate, or lengthen the warm-up.")
    assert piece.evidence[0].value > piece.evidence[0].threshold > piece.evidence[1].value


@pytest.mark.parametrize("losses", NOT_RISING.values(), ids=NOT_RISING)
def test_a_loss_that_is_flat_or_comes_back_does_not_rise(losses: list[float]) -> None:
    assert "loss rises" not in rules(with_losses(losses))


def test_where_the_loss_rises_no_other_advice_says_that_all_is_well() -> None:
    def said(losses: list[float]) -> str:
        records = changed(with_losses(losses), "update", [""], lost=0.001, lost_visible=0.18)
        return str(advise(changed(records, "update", ["wte.weight"], range(20, 21), rms=5.0)))

    soothing = ("Nothing needs to be done", "no loss spike began")
    assert all(words in said([2.0] * 60) for words in soothing)
    assert not any(words in said([5.6, *noisy(22, 2, 59)]) for words in soothing)
    assert "loss rises" not in said([5.6, *noisy(22, 2, 58), math.nan]), "it has a rule of its own"


def group(*names: str, **options: Any) -> dict[str, Any]:
    return {"parameters": list(names), **options}


def test_the_header_says_whether_updates_are_clipped_and_what_beta2_is() -> None:
    records = spiking(300, range(304, 307))[1:]
    clipped = only([header(groups=[group(*NAMES, clip_updates=True, betas=[0.9, 0.95])]), *records])
    assert clipped.action == "Updates are clipped already: lower beta2 (0.95 now) or the learning rate."
    # By group, whatever the optimizer is called.
    groups = [group(*NAMES[1:], clip_updates=True), group(NAMES[0], clip_updates=False, betas=[0.9, 0.999])]
    other = only([header(groups=groups, optimizer="StableAdamW"), *records])
    says(other, "Clip updates", "lower beta2 (0.999 now).")
    # Without groups by the optimizer's name; an RMS spike alone needs no advice then.
    says(only([header(optimizer="StableAdamW"), *records]), "clipped already")
    alone = LOUD["an RMS spike"][0]
    assert advise([header(optimizer="StableAdamW"), *alone[1:]]) == []
    assert only(alone).action.startswith("If loss spikes come, clip updates (")


def test_the_header_says_whether_gradients_with_nan_are_skipped() -> None:
    """They are no gradients of zero, whose parameters should be frozen."""
    records = changed(sound(), "step", None, range(120, 201), loss=math.nan)
    records = changed(records, "gradient", ["ln.weight"], range(1, 201), absmax=0.0, mean=0.0, nonfinite=8)
    for skip, words in (("skip", "Such gradients are skipped"), ("propagate", "Skip gradients with inf or NaN")):
        found = advise([header(groups=[group(*NAMES, nonfinite=skip)]), *records[1:]])
        assert [one.rule for one in found] == ["loss not finite", "gradients not finite"]
        says(found[0], f"{words} (nonfinite='skip').")
        assert ("or nonfinite='skip'" in found[1].action) == (skip == "propagate")


def test_the_header_says_whether_low_words_are_kept() -> None:
    records = updates(["ln.weight"], lost=0.9, lost_visible=0.9, descent_quality=0.1)[1:]
    assert "weights='split8'" in only([header(groups=[group(*NAMES, weights="plain")]), *records]).action
    kept = only([header(groups=[group(*NAMES, weights="kahan")]), *records])
    assert kept.action.startswith("Low words are kept (weights='kahan'), and these updates are smaller")
    assert kept.urgency == "watch"
    says(kept, "the recipe 'adamw8bit-split', or for norms recipe.apply(model, keep_fp32='norms')")
    assert ng.recipes.get("adamw8bit-split").weights == "split"


@pytest.mark.parametrize("states", ["bf16", "log8", {"m": "bf16", "v": "fp32"}])
def test_the_header_says_why_a_second_moment_is_too_large(states: Any) -> None:
    piece = only([header(groups=[group(*NAMES, states=states)]), *STALE[1:]])
    assert ("in bf16" in piece.action) == (states == "bf16")
    assert ("Earlier gradients were much larger" in piece.action) == (states != "bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_moment_of_torchs_optimizers_has_its_parameters_dtype(dtype: torch.dtype) -> None:
    net = torch.nn.Linear(4, 4, bias=False).to(dtype)
    for make in (torch.optim.AdamW, torch.optim.Adagrad):
        with ng.gauges.watch(net, make(net.parameters())) as watch:
            head = watch.rows()[0]
        stale = [r | {"name": r["name"] and "weight"} for r in STALE[1:] if r.get("name") in ("", NAMES[1])]
        piece = only([head, *stale])
        assert piece.rule == "second moment does not decay"
        assert ("in bf16" in piece.action) == (dtype is torch.bfloat16)
        assert ("Earlier gradients were much larger" in piece.action) == (dtype is torch.float32)


def test_what_is_not_trained_is_a_note() -> None:
    everything, without = group(*NAMES), group(*(name for name in NAMES if name != "ln.weight"))
    records = [r for r in sound() if r.get("name") != "ln.weight"][1:]
    for found, options in (
        ("ln.weight never had a gradient in 40 measured steps.", {"groups": [everything]}),
        ("ln.weight is frozen.", {"groups": [without], "frozen": ["ln.weight"]}),
        ("ln.weight is not among the optimizer's parameters.", {"groups": [without], "apart": ["ln.weight"]}),
    ):
        piece = only([header(**options), *records])
        assert (piece.rule, piece.urgency, piece.finding) == ("not trained", "note", found)
    assert advise([header(groups=[everything]), *sound()[1:]]) == []
    unmeasured = [r for r in records if r["kind"] != "gradient"]
    assert advise([header(groups=[everything]), *unmeasured]) == []


@pytest.mark.parametrize("strange", [3, "x", [3], [{}], [{"parameters": 3}], {"a": 1}, [{"parameters": [[]]}]])
def test_an_invalid_header_is_read(strange: Any) -> None:
    records = changed(sound(30), "update", ["wte.weight"], range(20, 21), rms=5.0)[1:]
    for key in ("groups", "frozen", "apart", "low_precision", "embeddings"):
        assert "second moment out of date" in rules([header(**{key: strange}), *records])
    assert rules([header(groups=[group(*NAMES, betas=strange, clip_updates=strange, weights=strange)]), *records])


def test_a_watch_says_how_the_run_was_set_up() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 8), ng.linear.LowPrecisionLinear(8, 8, plan=ng.linear.SWITCHBACK.with_format("e4m3")),
        torch.nn.Linear(8, 8), torch.nn.Linear(8, 8),
    )  # fmt: skip
    net[2].requires_grad_(False)
    optimizer = ng.optim.AdamW(
        [
            {"params": net[0].parameters(), "lr": torch.tensor(0.5), "clip_updates": True},
            {"params": [*net[1].parameters(), *net[2].parameters()], "states": {"m": "bf16", "v": "fp32"}},
        ]
    )
    with ng.gauges.watch(net, optimizer) as watch:
        head = watch.rows()[0]
    first, second = head["groups"]
    assert first["parameters"] == ["0.weight", "0.bias"]
    assert (first["rule"], first["weights"], first["clip_updates"], first["lr"]) == ("adamw", "plain", True, 0.5)
    assert first["betas"] == [0.9, 0.999]
    assert second["states"] == {"m": "bf16", "v": "fp32"}
    assert head["frozen"] == ["2.weight", "2.bias"]
    assert head["apart"] == ["3.weight", "3.bias"]
    assert head["low_precision"] == {"1": ["e4m3"]}
    with ng.gauges.watch(net, torch.optim.SGD(net[0].parameters(), 0.1)) as watch:
        assert watch.rows()[0]["groups"][0]["momentum"] == 0


def test_the_same_records_in_another_order_give_the_same_advice() -> None:
    records = changed(spiking(300, range(304, 307)), "update", ["ln.weight"], lost=1.0, descent_quality=0.0)
    records = changed(records, "gradient", NAMES, formats={"e4m3": {"underflow": 0.5}})
    records[0] = header(low_precision={"h.0.fc": ["e4m3"]})
    first = advise(records)
    assert [piece.urgency for piece in first] == ["change", "change", "note"]
    shuffled = records[1:]
    random.Random(0).shuffle(shuffled)
    assert list(map(str, advise([records[0], *shuffled]))) == list(map(str, first))


def test_a_watch_a_path_or_one_record_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2)
    with ng.gauges.watch(net, torch.optim.SGD(net.parameters(), 0.1)) as watch:
        for wrong in (watch, "gauges.jsonl", tmp_path, header()):
            got = type(wrong).__name__
            with pytest.raises(TypeError, match=rf"advise\(watch.rows\(\)\) or .*read_records.*, got {got}$"):
                advise(wrong)  # type: ignore[arg-type]


def test_evidence_is_bounded_and_reads_as_a_sentence() -> None:
    names = [f"h.{i}.fc.weight" for i in range(60)]
    records = [header(parameters={name: [8, 8] for name in names})]
    for number in range(1, 9):
        records.append(step(number))
        records += [update(number, name, lost=1.0, descent_quality=0.0) for name in names]
        records += [tensor("gradient", number, name) for name in names]
    piece = only(records)
    assert len(piece.evidence) == 20
    assert "h.0.fc.weight, h.1.fc.weight, h.10.fc.weight and 57 more do not move" in piece.finding
    assert str(piece.evidence[0]) == "h.0.fc.weight: effective descent quality 0 at step 8, threshold 0.9"
    assert str(piece) == f"{piece.finding} {piece.action} ({piece.source})"


def test_the_page_lists_every_rule() -> None:
    root = Path(__file__).parents[2]
    table = (root / "docs" / "gauges.md").read_text().split("| rule | condition | |")[1].split("\n\n")[0]
    listed = set(re.findall(r"^\| ([a-z0-9 ]+) \|", table, re.MULTILINE))
    assert listed == set(RULES) - {"activations in float8", "gradients of activations in float8"}


def test_of_a_real_training_in_bf16_norms_lose_their_updates_and_low_words_keep_them() -> None:
    def train(weights: str) -> dict[str, Advice]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
        ).bfloat16()
        optimizer = ng.optim.AdamW(model.named_parameters(), lr=1e-3, weights=weights, weight_decay=0.0)
        with ng.gauges.watch(model, optimizer, every=2) as gauges:
            for _ in range(12):
                x = torch.randn(32, 16, dtype=torch.bfloat16)
                loss = (model(x) - x[:, :4]).float().square().mean()
                gauges.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return {piece.rule: piece for piece in advise(gauges.rows())}

    plain = train("plain")
    assert "1.weight does not move at all" in plain["lost updates"].finding
    split = train("split")
    assert "lost updates" not in split
    assert split["updates wait in low words"].urgency == "note"
