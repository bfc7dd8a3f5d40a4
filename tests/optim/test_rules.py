"""Each rule's equation, with nothing narrow: against torch's namesake, or the paper's equation in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge import optim
from narrowgauge.rules._nadam import product_of_mu

Step = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int], torch.Tensor]


def gradients(shape: tuple[int, ...], steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) * (0.5 + 0.1 * step % 3) for step in range(steps)]


def run(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], steps: int = 40) -> torch.Tensor:
    """Two parameters, one without a gradient at every third step, so that their step counts differ."""
    start = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=start)) for shape in ((12, 8), (5, 9))]
    optimizer = make(parameters)
    for step in range(steps):
        for p in parameters:
            p.grad = gradients(tuple(p.shape), steps)[step]
        if step % 3 == 2:
            parameters[1].grad = None
        optimizer.step()
    return torch.cat([p.detach().reshape(-1).double() for p in parameters])


NAMESAKES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    ("AdamW", {"maximize": True, "betas": (0.0, 0.0)}),
    ("SGD", {"lr": 0.02, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-6}),
    ("RMSprop", {"alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 2e-3, "alpha": 0.9, "momentum": 0.8, "centered": True, "maximize": True}),
    ("NAdam", {"betas": (0.8, 0.95), "weight_decay": 0.1, "momentum_decay": 0.1}),
    ("NAdam", {"momentum_decay": 0.0, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("Adafactor", {"lr": 0.1, "weight_decay": 0.1, "d": 1.5, "eps": (1e-4, 1e-2)}),
    ("Muon", {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "lr": 0.02}),
    ("Muon", {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.5}),
]


@pytest.mark.parametrize(("name", "options"), NAMESAKES, ids=str)
def test_a_namesake_goes_where_torch_goes(name: str, options: dict[str, Any]) -> None:
    ours = run(lambda ps: getattr(optim, name)(ps, **options))
    theirs = run(lambda ps: getattr(torch.optim, name)(ps, **options))
    # Both round to float32 at each of 40 steps; Muon's singular values are found in bf16.
    assert float((ours - theirs).abs().max()) < (4e-4 if name == "Muon" else 5e-6)


def run_long(make, steps: int, dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40, 30, generator=generator).to(dtype))
    optimizer = make([p], **options)
    for number in range(steps):
        # A falling gradient with a few coordinates that rarely see one.
        grad = torch.randn(40, 30, generator=generator) * 10.0 ** (-3 * number / steps)
        grad[:4] *= float(number % 50 == 0)
        p.grad = grad.to(dtype)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-3},
        {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
        {"lr": 3e-4, "weight_decay": 0.1},
        {"lr": 1e-3, "maximize": True},
        {"lr": torch.tensor(1e-3)},
    ],
    ids=str,
)
def test_it_is_torchs_adamw_and_nearer_to_the_exact_one(options: dict) -> None:
    ours, torchs = run_long(optim.AdamW, 500, **options), run_long(torch.optim.AdamW, 500, **options)
    exact = run_long(torch.optim.AdamW, 500, torch.float64, **options)
    # 500 steps, each of which may round the weight by half a unit of float32.
    torch.testing.assert_close(ours, torchs, rtol=500 * 2.0**-24, atol=1e-6)
    # torch multiplies the weight by 1 - lr * weight_decay, rounded to float32, which drifts; a sum does not.
    assert (ours - exact).abs().max() <= (torchs - exact).abs().max() * 1.01 + 1e-7


def adamw(w, g, s, t, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, wd=0.01):
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    return s["m"] / (1 - b1**t) / ((s["v"] / (1 - b2**t)).sqrt() + eps) + wd * w


def stable_adamw(w, g, s, t, lr=1e-3, b1=0.9, b2=0.99, eps=1e-6, wd=0.01):
    """The SwitchBack paper's Algorithm 2 as it is written: debiased betas, no bias correction."""
    h1, h2 = b1 * (1 - b1 ** (t - 1)) / (1 - b1**t), b2 * (1 - b2 ** (t - 1)) / (1 - b2**t)
    s["v"] = h1 * s.get("v", 0) + (1 - h1) * g
    s["u"] = h2 * s.get("u", 0) + (1 - h2) * g**2
    rms = (g**2 / s["u"].clamp_min(eps**2)).mean().sqrt()
    eta = lr / max(1.0, float(rms))
    return -eta * wd * w - eta * s["v"] / (s["u"].sqrt() + eps)


def lamb(w, g, s, t, lr=1e-3, **options):
    u = adamw(w, g, s, t, **options)
    return -lr * w.norm() / u.norm() * u


def lars(w, g, s, t, lr=0.1, mu=0.9, wd=0.01, trust=1e-3, nesterov=False):
    scaled = trust * w.norm() / (g.norm() + wd * w.norm() + 1e-8) * (g + wd * w)
    s["m"] = mu * s["m"] + scaled if "m" in s else scaled
    return -lr * (scaled + mu * s["m"] if nesterov else s["m"])


def lion(w, g, s, t, lr=1e-4, b1=0.9, b2=0.99, wd=0.1):
    m = s.get("m", torch.zeros_like(g))
    s["m"] = b2 * m + (1 - b2) * g
    return -lr * ((b1 * m + (1 - b1) * g).sign() + wd * w)


def adagrad_momentum(w, g, s, t, lr=0.01, mu=0.9):
    s["v"] = s.get("v", 0) + g**2
    s["m"] = mu * s.get("m", 0) + g / (s["v"].sqrt() + 1e-10)
    return -lr * s["m"]


def scheduled(w, g, s, t, lr=1e-3, b1=0.9, exponent=0.5):
    b2 = 1 - t**-exponent
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    return -lr * s["m"] / (1 - b1**t) / (s["v"].sqrt() + 1e-8)


def ademamix(w, g, s, t, lr=1e-3, b1=0.9, b2=0.999, b3=0.9999, alpha=5.0, t_alpha=30, t_beta3=30, wd=0.01):
    a, b = alpha, b3
    if t_alpha:
        a = min(t * alpha / t_alpha, alpha)
        ln1, ln3, x = math.log(b1), math.log(b3), t / t_beta3
        b = min(math.exp(ln1 * ln3 / ((1 - x) * ln3 + x * ln1)), b3)
    s["m1"] = b1 * s.get("m1", 0) + (1 - b1) * g
    s["m2"] = b * s.get("m2", 0) + (1 - b) * g
    s["nu"] = b2 * s.get("nu", 0) + (1 - b2) * g**2
    u = (s["m1"] / (1 - b1**t) + a * s["m2"]) / ((s["nu"] / (1 - b2**t)).sqrt() + 1e-8)
    return -lr * (u + wd * w)


def adan(w, g, s, t, lr=1e-3, b1=0.98, b2=0.92, b3=0.99, wd=0.1):
    d = g - s.get("g", g)
    s["g"] = g
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * d
    s["n"] = b3 * s.get("n", 0) + (1 - b3) * (g + b2 * d) ** 2
    eta = lr / ((s["n"] / (1 - b3**t)).sqrt() + 1e-8)
    return (w - eta * (s["m"] / (1 - b1**t) + b2 * s["v"] / (1 - b2**t))) / (1 + lr * wd) - w


def caution(u, g):
    """Algorithm 1 of Cautious Optimizers, with the scale of its Section 4."""
    phi = (u * g > 0).to(g.dtype)
    return u * phi * phi.numel() / (phi.sum() + 1)


def cautiously(equation: Step, lr: float, wd: float = 0.0) -> Step:
    """An equation whose update is -lr u, and decay beside it."""
    return lambda w, g, s, t: -lr * (caution(-equation(w, g, s, t) / lr, g) + wd * w)


def cautious_lamb(w, g, s, t, lr=1e-3, wd=0.01):
    u = adamw(w, g, s, t, eps=1e-6, wd=0.0)
    return -lr * w.norm() / (u + wd * w).norm() * (caution(u, g) + wd * w)


def cautious_adan(w, g, s, t, lr=1e-3, wd=0.1):
    u = -adan(w, g, s, t, lr=lr, wd=0.0) / lr
    return (w - lr * caution(u, g)) / (1 + lr * wd) - w


def cautious_stable_adamw(w, g, s, t, lr=1e-3, wd=0.01):
    u = adamw(w, g, s, t, b2=0.99, eps=1e-6, wd=0.0)
    rms = (g**2 / (s["v"] / (1 - 0.99**t)).clamp_min(1e-12)).mean().sqrt()
    return -lr / max(1.0, float(rms)) * (caution(u, g) + wd * w)


def sgd(w, g, s, t, lr=0.02, mu=0.9, wd=0.1):
    g = g + wd * w
    s["m"] = mu * s["m"] + g if "m" in s else g
    return -lr * (g + mu * s["m"])


def rmsprop(w, g, s, t, lr=2e-3, alpha=0.99, mu=0.8):
    s["v"] = alpha * s.get("v", 0) + (1 - alpha) * g**2
    s["m"] = mu * s.get("m", 0) + g / (s["v"].sqrt() + 1e-8)
    return -lr * s["m"]


def nadam(w, g, s, t, lr=2e-3, b1=0.9, b2=0.999):
    mu, after = (b1 * (1 - 0.5 * 0.96 ** (i * 4e-3)) for i in (t, t + 1))
    s["p"] = s.get("p", 1.0) * mu
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    ahead = (1 - mu) / (1 - s["p"]) * g + after / (1 - s["p"] * after) * s["m"]
    return -lr * ahead / ((s["v"] / (1 - b2**t)).sqrt() + 1e-8)


def adafactor(w, g, s, t, lr=1e-2, eps2=1e-3, d=1.0, factored=True):
    """Shazeer and Stern 2018, Algorithm 4, with the relative step and decay rate of Algorithm 6, and no eps1."""
    b2 = 1 - t**-0.8
    if factored:
        s["r"] = b2 * s.get("r", 0) + (1 - b2) * (g**2).sum(1)
        s["c"] = b2 * s.get("c", 0) + (1 - b2) * (g**2).sum(0)
        v = s["r"][:, None] * s["c"] / s["r"].sum()
    else:
        v = s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    u = g / v.sqrt()
    step = max(eps2, float(w.square().mean().sqrt())) * min(lr, t**-0.5)
    return -step * u / max(1.0, float(u.square().mean().sqrt()) / d)


def schedule_free(w, g, s, t, lr=0.01, b1=0.9, b2=0.999, wd=0.1, warmup=7):
    """Defazio et al. 2024, Algorithm 1, with x and z as sequences; lr has no bias correction, which is beside v."""
    z, x = s.get("z", w.clone()), s.get("x", w.clone())
    rate = lr * min(1, t / warmup)
    s["sum"] = s.get("sum", 0.0) + rate**2
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g**2
    s["z"] = z - rate * (g / ((s["v"] / (1 - b2**t)).sqrt() + 1e-8) + wd * w)
    c = rate**2 / s["sum"]
    s["x"] = (1 - c) * x + c * s["z"]
    return (1 - b1) * s["z"] + b1 * s["x"] - w


EQUATIONS: list[tuple[str, Step, dict[str, Any]]] = [
    ("StableAdamW", stable_adamw, {"betas": (0.9, 0.99)}),
    ("AdamW", stable_adamw, {"betas": (0.9, 0.99), "eps": 1e-6, "clip_updates": True}),
    ("LAMB", lambda w, g, s, t: lamb(w, g, s, t, eps=1e-6), {}),
    ("LARS", lars, {"lr": 0.1, "weight_decay": 0.01}),
    (
        "LARS",
        lambda w, g, s, t: lars(w, g, s, t, nesterov=True),
        {"lr": 0.1, "weight_decay": 0.01, "nesterov": True},
    ),
    ("Lion", lion, {"weight_decay": 0.1}),
    ("Adagrad", adagrad_momentum, {"momentum": 0.9}),
    ("AdamW", scheduled, {"beta2_schedule": 0.5, "weight_decay": 0.0}),
    ("AdEMAMix", ademamix, {"t_alpha": 30, "t_beta3": 30}),
    ("AdEMAMix", lambda w, g, s, t: ademamix(w, g, s, t, t_alpha=None), {}),
    ("Adan", adan, {"weight_decay": 0.1}),
    ("Adafactor", adafactor, {"eps": (0.0, 1e-3)}),
    (
        "Adafactor",
        lambda w, g, s, t: adafactor(w, g, s, t, factored=False),
        {"eps": (0.0, 1e-3), "states": "fp32"},
    ),
    ("ScheduleFreeAdamW", schedule_free, {"lr": 0.01, "warmup_steps": 7, "weight_decay": 0.1}),
]
# Of every rule with a momentum, decoupled decay beside the mask and coupled decay before it.
CAUTIOUS: list[tuple[str, Step, dict[str, Any]]] = [
    ("AdamW", cautiously(lambda w, g, s, t: -1e-3 * adamw(w, g, s, t, wd=0.0), 1e-3, 0.01), {}),
    (
        "Adam",
        cautiously(lambda w, g, s, t: -1e-3 * adamw(w, g + 0.1 * w, s, t, wd=0.0), 1e-3),
        {"weight_decay": 0.1},
    ),
    ("StableAdamW", cautious_stable_adamw, {"betas": (0.9, 0.99)}),
    ("SGD", cautiously(sgd, 0.02), {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("LAMB", cautious_lamb, {}),
    ("Lion", cautiously(lambda w, g, s, t: lion(w, g, s, t, wd=0.0), 1e-4, 0.1), {"weight_decay": 0.1}),
    ("Adagrad", cautiously(adagrad_momentum, 0.01), {"momentum": 0.9}),
    ("RMSprop", cautiously(rmsprop, 2e-3), {"lr": 2e-3, "momentum": 0.8}),
    ("NAdam", cautiously(nadam, 2e-3), {}),
    ("AdEMAMix", cautiously(lambda w, g, s, t: ademamix(w, g, s, t, t_alpha=None, wd=0.0), 1e-3, 0.01), {}),
    ("Adan", cautious_adan, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(
    ("name", "equation", "options"),
    [*EQUATIONS, *((name, step, options | {"cautious": True}) for name, step, options in CAUTIOUS)],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.usefixtures("eager")
def test_a_rule_is_its_papers_equation(name: str, equation: Step, options: dict[str, Any]) -> None:
    class Oracle(torch.optim.Optimizer):
        """The equation in float64."""

        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            super().__init__(parameters, {})
            self.exact = [p.detach().double() for p in parameters]
            self.memory: list[dict[str, torch.Tensor]] = [{} for _ in parameters]
            self.count = [0 for _ in parameters]

        @torch.no_grad()
        def step(self) -> None:
            for i, p in enumerate(self.param_groups[0]["params"]):
                if p.grad is not None:
                    self.count[i] += 1
                    self.exact[i] += equation(self.exact[i], p.grad.double(), self.memory[i], self.count[i])
                    p.copy_(self.exact[i])

    ours, exact = run(lambda ps: getattr(optim, name)(ps, **options)), run(Oracle)
    assert float((ours - exact).abs().max()) < 5e-6
    assert float((exact - run(Oracle, 1)).abs().max()) > 1e-3


def test_update_clipping_shortens_the_step_by_the_ratio_that_it_measures() -> None:
    """A gradient that grows a hundredfold: RMS says by how much v lags, and the whole update is divided by it."""
    updates = {}
    for clip in (False, True):
        p = torch.nn.Parameter(torch.ones(50, 3))
        optimizer = optim.AdamW([p], lr=1e-2, clip_updates=clip, weight_decay=0.1)
        for step in range(30):
            p.grad = torch.ones_like(p) * (1.0 if step < 29 else 100.0)
            before = p.detach().clone()
            optimizer.step()
        updates[clip] = p.detach() - before
    state = optimizer.state[p]
    v_hat = state["v"] / (1 - 0.999**30)
    rms = float((p.grad.square() / v_hat).mean().sqrt())
    assert rms > 5
    assert torch.allclose(updates[True] * rms, updates[False], rtol=1e-3)


@pytest.mark.parametrize("eps", [0.0, 1e-25])
def test_update_clipping_keeps_a_coordinate_without_gradients_to_itself(eps: float) -> None:
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = optim.AdamW([p], eps=eps, clip_updates=True)
    p.grad = torch.arange(8.0)
    optimizer.step()
    assert torch.isfinite(p[1:]).all()
    assert (p[1:] < 1).all()


@pytest.mark.parametrize("arithmetic", ["fp32", "strict"])
def test_cautious_steps_go_where_the_gradient_does(arithmetic: str) -> None:
    """Of 80,000 float16 weights, more than float16 can count; half of the gradients turn round at the last step."""
    p = torch.nn.Parameter(torch.zeros(80_000, dtype=torch.float16))
    optimizer = optim.SGD([p], lr=2.0**-6, momentum=0.5, cautious=True, arithmetic=arithmetic)
    turned = torch.arange(80_000) % 2 == 0
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, torch.full_like(p, -(2.0**-6)))
    p.grad = torch.where(turned, -0.25, 1.0).to(p.dtype)
    optimizer.step()
    moved = p.detach() + 2.0**-6
    assert not moved[turned].any()
    torch.testing.assert_close(moved[~turned], torch.full_like(moved[~turned], -1.5 * 2.0**-5), rtol=1e-3, atol=0)


def test_cautious_muon_masks_the_orthogonalized_direction() -> None:
    p = torch.nn.Parameter(torch.ones(20, 30))
    q = torch.nn.Parameter(torch.ones(20, 30))
    bold, shy = optim.Muon([p], weight_decay=0.1), optim.Muon([q], weight_decay=0.1, cautious=True)
    p.grad = q.grad = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    bold.step()
    shy.step()
    lr = bold.param_groups[0]["lr"]
    u = (1 - p.detach().double()) / lr - 0.1
    wanted = -lr * (caution(u, p.grad.double()) + 0.1)
    assert 0.1 < float((u * p.grad <= 0).double().mean()) < 0.9
    torch.testing.assert_close(q.detach().double() - 1, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("SGD", {}, "cautious must be False for SGD without a momentum, got True"),
        ("Adagrad", {}, "cautious must be False for Adagrad without a momentum, got True"),
        ("RMSprop", {"centered": True}, "cautious must be False for RMSprop without a momentum, got True"),
        ("LARS", {}, "cautious must be False for LARS, whose momentum is made with sums, got True"),
        ("AdamW", {"cautious": 1.5}, "cautious must be True or False, got 1.5"),
        (
            "Adan",
            {"clip_updates": True, "cautious": False},
            "clip_updates must be False for Adan, whose rule has no",
        ),
    ],
    ids=str,
)
def test_what_a_rule_cannot_do_is_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(optim, name)([torch.nn.Parameter(torch.ones(3))], **{"cautious": True, **options})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("AdEMAMix", {"t_alpha": 0}, "t_alpha must be a number of steps above 0 or None, got 0"),
        ("AdEMAMix", {"t_beta3": -1.0}, "t_beta3 must be a number of steps above 0 or None, got -1.0"),
        ("AdEMAMix", {"t_beta3": 5, "betas": (0.9, 0.9, 0.0)}, r"betas\[2\] must be above 0 with t_beta3, got 0.0"),
        ("AdEMAMix", {"betas": (0.9, 0.999)}, "betas must be 3 numbers"),
        ("RMSprop8bit", {"centered": True}, "states of 'v' must be 'fp32' or 'expansion' with centered=True"),
        (
            "RMSprop",
            {"centered": True, "states": {"v": "fp32", "mean": "bf16"}},
            "states of 'mean' must be 'fp32' or 'expansion' with centered=True, .* got 'bf16'",
        ),
    ],
    ids=str,
)
def test_hyperparameters_that_make_no_sense_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(optim, name)([torch.nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize("decay", [0.0, 1e-12, 4e-3, 1.0, 100.0])
def test_nadams_product_is_the_one_that_torch_multiplies_up(decay: float) -> None:
    per_step, product = 0.96**decay, 1.0
    for step in range(1, 101):
        product *= 0.99 * (1 - 0.5 * 0.96 ** (step * decay))
        exact = torch.tensor(float(step), dtype=torch.float64)
        assert product_of_mu(0.99, per_step, step) == pytest.approx(product, rel=1e-6, abs=1e-11)
        assert float(product_of_mu(0.99, per_step, exact)) == pytest.approx(product, rel=1e-6, abs=1e-11)


def test_a_centered_root_of_equal_gradients_is_no_nan() -> None:
    """v and mean^2 are equal but for their rounding, which may make their difference negative."""
    p = torch.nn.Parameter(torch.ones(1000))
    optimizer = optim.RMSprop([p], centered=True, alpha=0.5)
    for _ in range(60):
        p.grad = torch.linspace(0.1, 3.0, 1000)
        optimizer.step()
    assert torch.isfinite(p).all()


@pytest.mark.usefixtures("eager")
def test_the_8bit_names_have_the_states_that_they_should() -> None:
    p = torch.nn.Parameter(torch.ones(5000))
    for kind, states in (
        (optim.RMSprop8bit, {"v": "log8"}),
        (optim.AdEMAMix8bit, {"m": "log8", "m2": "fp32", "v": "log8"}),
    ):
        optimizer = kind([p], cautious=kind is optim.AdEMAMix8bit)
        assert {slot.slot.name: slot.storage.name for slot in optimizer.plan_of(p).slots} == states
        (row,) = optimizer.describe().rows
        assert row.rule == ("rmsprop" if kind is optim.RMSprop8bit else "ademamix, cautious")
    assert {s.storage.name for s in optim.AdEMAMix8bit([p], states="8bit").plan_of(p).slots} == {"8bit"}


@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_muon_scales_a_step_by_what_adjust_lr_fn_says(shape: tuple[int, int]) -> None:
    """torch has ``"spectral_unclamped"`` from 2.14 on."""
    rows, columns = shape
    ratios = {
        "original": max(1, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(shape) ** 0.5,
        "spectral_unclamped": (rows / columns) ** 0.5,
    }  # fmt: skip
    steps = {}
    for name in ratios:
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        optim.Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn=name).step()
        steps[name] = p.detach() / ratios[name]
    for step in steps.values():
        assert torch.allclose(step, steps["original"], rtol=1e-6)


def test_muon_makes_singular_values_alike() -> None:
    p = torch.nn.Parameter(torch.zeros(30, 20))
    optimizer = optim.Muon([p], lr=1.0, weight_decay=0.0)
    p.grad = torch.randn(30, 20) @ torch.diag(torch.logspace(-2, 2, 20))
    optimizer.step()
    values = torch.linalg.svdvals(p.detach()) / (30 / 20) ** 0.5
    assert float(values.max()) < 1.3
    assert float(values.median()) > 0.6


@pytest.mark.parametrize("power", [-120, -80, -40, 40, 64, 100])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_does_not_see_the_scale_of_gradients(momentum: float, power: int) -> None:
    """A property of the equation: ||w|| / ||g|| g is the same for all multiples of g, in float32's whole range."""
    ends = []
    for scale in (1.0, 2.0**power):
        p = torch.nn.Parameter(torch.linspace(0.5, 1, 1000).view(10, 100))
        optimizer = optim.LARS([p], lr=1.0, eps=0.0, momentum=momentum)
        for step in range(3):
            p.grad = scale * torch.randn(10, 100, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], torch.linspace(0.5, 1, 1000).view(10, 100))


@pytest.mark.parametrize("power", [-90, 70, 100])
def test_lamb_moves_weights_of_any_size_by_their_share(power: int) -> None:
    ends = []
    for scale in (1.0, 2.0**power):
        p = torch.nn.Parameter(scale * torch.linspace(0.5, 1, 1000))
        optimizer = optim.LAMB([p], lr=0.1, weight_decay=0.0)
        for step in range(3):
            p.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(p.detach() / scale)
    assert torch.equal(*ends)


def test_lars_stays_finite_where_the_ratio_of_norms_does_not() -> None:
    p = torch.nn.Parameter(torch.ones(10, 10))
    optimizer = optim.LARS([p], lr=1.0, eps=0.0)
    p.grad = torch.full((10, 10), 1e-42)
    optimizer.step()
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("kind", [optim.LARS, optim.LARS8bit])
def test_lars_does_not_scale_biases_and_the_gains_of_norms(kind: type[optim.NarrowOptimizer]) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}

    def trained(make: Callable[..., torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
        optimizer = make(model.named_parameters(), **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return model, optimizer

    (ours, optimizer), (plain, _) = trained(kind), trained(torch.optim.SGD)
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6) == (name != "0.weight")
    rules = {row.parameter: row.rule for row in optimizer.describe().rows}
    assert {name for name, rule in rules.items() if rule == "lars"} == {"0.weight"}
    assert set(rules.values()) == {"lars", "sgd"}
