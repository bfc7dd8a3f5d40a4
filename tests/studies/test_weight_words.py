"""Narrow weights of the bench against their specifications, float64, and what each must conserve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.storage import weight_storage
from studies.state_codecs.bench import SETTINGS, Reference, Simulation, run
from studies.state_codecs.codecs import Relative
from studies.state_codecs.gradients import UNIT, Gradients, synthetic
from studies.state_codecs.weights import Digits, Kept, exact, factored, flashoptim, float32
from studies.weight_words.run import ROWS, at_rates, begin, name_of

WAYS = ("split4 stochastic", "split4 nearest", "bf16 stochastic", "e4m3+8 stochastic", "e4m3+4 stochastic")


@pytest.fixture
def weights() -> Tensor:
    """Weights as a model has them, with all digits of float32, and some that are zero."""
    w = 0.02 * torch.randn(UNIT, generator=torch.Generator().manual_seed(0))
    w[:8] = 0.0
    return w


def noise(shape: torch.Size, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_eleven_digits_are_the_pattern_with_twenty_bits(weights: Tensor) -> None:
    """`split4`: the float32 pattern plus twelve random bits, of which the upper twenty are kept."""
    chance = noise(weights.shape)
    bits = weights.view(torch.int32)
    magnitude = ((bits & 0x7FFFFFFF) + (chance * 4096).int()) & ~0xFFF
    expected = ((bits & -0x80000000) | magnitude).view(torch.float32)
    assert torch.equal(Digits(11, stochastic=True)(weights, chance), expected)


def test_fifteen_digits_are_split8_and_seven_are_bfloat16(weights: Tensor) -> None:
    chance = noise(weights.shape)
    assert torch.equal(Digits(15)(weights, chance), Kept("split8")(weights, chance))
    assert torch.equal(Digits(7)(weights, chance), weights.to(torch.bfloat16).float())
    p, low = weight_storage("split8").add(weights.bfloat16(), None, weights, torch.zeros(UNIT), lambda: chance)
    assert torch.equal(Kept("split8")(weights, chance), weight_storage("split8").read(p, low))


def test_e4m3_codes_are_those_of_torch(weights: Tensor) -> None:
    """With the scale that makes 448 the largest number that is not too large."""
    scale = 2.0 ** torch.floor(torch.log2(448 / weights.abs().max()))
    expected = (weights * scale).to(torch.float8_e4m3fn).float() / scale
    assert torch.equal(Digits(3, e4m3=True)(weights, noise(weights.shape)), expected)


def test_a_remainder_of_flashoptim_is_within_a_254th_of_bfloat16s_spacing(weights: Tensor) -> None:
    hi = weights.bfloat16().float()
    spacing = torch.exp2(torch.floor(torch.log2(hi.abs())) - 7)
    error = (flashoptim(weights, weights) - weights).abs()
    assert (error <= spacing / 254 / 2 * 1.01).all()
    assert error[8:].max() > 0


@pytest.mark.parametrize("name", [n for n in WAYS if "stochastic" in n])
def test_stochastic_rounding_is_right_in_the_mean(name: str, weights: Tensor) -> None:
    codec = ROWS[name_of(name, "8", "8")].simulation.weights
    assert codec is not None
    tries = 512
    found = torch.stack([codec(weights, torch.full_like(weights, (k + 0.5) / tries)) for k in range(tries)])
    away = (found.double().mean(0) - weights).abs()
    unit = found.amax(0) - found.amin(0)
    assert (away <= torch.where(unit > 0, unit, weights.abs() / 100) / tries).all()
    assert (unit[8:] > 0).float().mean() > 0.9


@pytest.mark.parametrize("rounding", [Digits(7), Digits(7, stochastic=True), Digits(11, stochastic=True)])
@pytest.mark.parametrize("lr", [1e-3, 1e-5])
def test_an_error_fed_into_m_is_not_lost(rounding: Digits, lr: float) -> None:
    """z = w - lr beta1 / (1 - beta1) / (1 - beta1^t) m / root moves as with exact weights, step by step."""
    settings = {**SETTINGS["adamw"], "lr": lr, "weight_decay": 0.0}
    beta1, beta2 = settings["betas"]
    p0 = begin(UNIT, 0)
    g = synthetic(["one scale"], UNIT, 40)
    runs = [
        Simulation(exact, exact, weights=codec, feed=feed).start("adamw", p0, {}, 256, settings)
        for codec, feed in ((rounding, "rescaled"), (float32, None))
    ]
    for t in range(1, 41):
        gradient, chance = g.at(t), noise(torch.Size((3, UNIT)), t)
        fed, other = runs
        other.p, other.m, other.v = fed.p.clone(), fed.m.clone(), fed.v.clone()  # from the same place
        places = []
        for each in runs:
            each.step(gradient, t, chance)
            root = (each.v.double() / (1 - beta2**t)).sqrt() + settings["eps"]
            places.append(each.p.double() - lr * beta1 / (1 - beta1) / (1 - beta1**t) * each.m.double() / root)
        assert (fed.p - other.p).abs().max() > 1e-6  # much was rounded off
        assert (places[0] - places[1]).abs().max() < 2e-8  # a few units in the last place of float32


def test_m_is_written_within_the_scales_it_has() -> None:
    """Numbers on a block's codes stay, others go to the nearest, and none beyond the largest."""
    for bits in (4, 8):
        codec = Relative(bits)
        x = torch.randn(16, 256, generator=torch.Generator().manual_seed(3))
        written = codec(x, x)
        assert torch.equal(codec.beside(written, written), written)
        top = written.abs().amax(1, keepdim=True)
        found = codec.beside(100 * x, written)
        assert torch.equal(found.abs().amax(1, keepdim=True), top)
        near = codec.beside(x + 0.01, written)
        assert (
            (near - x - 0.01).abs() <= torch.where((x + 0.01).abs() < top, top / (6 if bits == 4 else 250), 9)
        ).all()


def test_float32_weights_are_the_reference_and_rates_are_their_own() -> None:
    """Each copy of a case is the case run at its rate alone."""
    rates = (1e-3, 1e-4)
    start = begin(UNIT, 0)
    both, each = at_rates(synthetic(["drift"], UNIT, 30), rates)
    settings = {**SETTINGS["adamw"], "lr": lambda t: each}
    it = {"it": Simulation(exact, exact, weights=float32)}
    found = run(it, both, [30], settings=settings, start=start.repeat(2))["it"]
    assert found["drift 0.001"][30][0] < 1e-5 > found["drift 0.0001"][30][0] / 10
    for i, lr in enumerate(rates):
        one, many = synthetic(["drift"], UNIT, 30), at_rates(synthetic(["drift"], UNIT, 30), rates)[0]
        alone = Reference("adamw", start, {}, {**SETTINGS["adamw"], "lr": lr})
        together = Reference("adamw", start.repeat(2), {}, settings)
        for t in range(1, 31):
            alone.step(one.at(t), t, start)
            together.step(many.at(t), t, start)
        assert torch.equal(together.weights()[i * UNIT : (i + 1) * UNIT], alone.weights())


def test_errors_since_a_step_leave_out_what_came_before() -> None:
    """A weight that loses all it gets for ten steps, and nothing afterwards, has no error since then."""
    steps = {"count": 0}

    def lost_at_first(w: Tensor, chance: Tensor) -> Tensor:
        steps["count"] += 1
        return begin(UNIT, 0) if steps["count"] <= 10 else w

    gradients = synthetic(["one scale"], UNIT, 20)
    settings = {**SETTINGS["adamw"], "weight_decay": 0.0}
    it = {"it": Simulation(exact, exact, weights=lost_at_first)}
    found = run(it, gradients, [20], settings=settings, start=begin(UNIT, 0), since=10)["it"]["one scale"]
    assert found[20][0] < 1e-4


def test_a_factored_moment_is_exact_where_it_has_rank_one() -> None:
    rows, columns = torch.rand(2, 32, 1) + 0.1, torch.rand(2, 1, 64) + 0.1
    v = (rows * columns).view(-1, 256)
    torch.testing.assert_close(factored(v, v), v)
    assert (factored(v.square() + torch.rand(v.shape), v) - v.square()).abs().max() > 1e-3


def test_decay_alone_ends_where_it_should() -> None:
    nothing = Gradients({"none": slice(0, UNIT)}, lambda _: torch.zeros(UNIT), torch.device("cpu"))
    settings = {**SETTINGS["adamw"], "lr": 1e-2, "weight_decay": 0.1}
    rows = {name: ROWS[name_of(name, "4", "8")].simulation for name in ("split4 stochastic", "bf16 nearest")}
    start = begin(UNIT, 0)
    kept = run(
        rows,
        nothing,
        [50],
        settings=settings,
        start=start,
        measure=lambda d, way: [float(((d + way) @ start.double()) / start.double().square().sum())],
    )
    right = (1 - 1e-3) ** 50 - 1
    assert kept["split4 stochastic"]["none"][50][0] == pytest.approx(right, abs=2e-3)
    assert kept["bf16 nearest"]["none"][50][0] > right / 2
