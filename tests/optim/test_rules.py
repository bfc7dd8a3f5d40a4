"""Each rule's equation, with nothing narrow: against torch's namesake, or the paper's equation in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge import optim

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
    ("Adafactor", adafactor, {"eps": (0.0, 1e-3)}),
    (
        "Adafactor",
        lambda w, g, s, t: adafactor(w, g, s, t, factored=False),
        {"eps": (0.0, 1e-3), "states": "fp32"},
    ),
    ("ScheduleFreeAdamW", schedule_free, {"lr": 0.01, "warmup_steps": 7, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "equation", "options"), EQUATIONS, ids=lambda x: x if isinstance(x, str) else "")
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
        p = torch.nn.Parameter(torch.linspace(0.5, 1, 1000))
        optimizer = optim.LARS([p], lr=1.0, eps=0.0, momentum=momentum)
        for step in range(3):
            p.grad = scale * torch.randn(1000, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(p.detach())
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], torch.linspace(0.5, 1, 1000))


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
    p = torch.nn.Parameter(torch.ones(100))
    optimizer = optim.LARS([p], lr=1.0, eps=0.0)
    p.grad = torch.full((100,), 1e-42)
    optimizer.step()
    assert torch.isfinite(p).all()
