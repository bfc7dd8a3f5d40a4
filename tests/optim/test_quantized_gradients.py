"""Quantized gradients: unbiased ones converge as predicted, biased ones stall, and error feedback repairs it."""

import copy
import pickle

import pytest
import torch

from narrowgauge.formats import codebook
from narrowgauge.optim import SGD, AdamW, QuantizedGradients, step_in_backward
from narrowgauge.storage import quantize

pytestmark = pytest.mark.usefixtures("eager")

COARSE = codebook("linear", bits=4)
N = 16  # coordinates of the convex problem, in one block


def descend(rounding: str, error_feedback: bool, steps: int, runs: int = 1) -> tuple[torch.Tensor, float]:
    """SGD with step 1/k on |x - 1|^2 / 2, the gradient's first coordinate noisy; x, and the variance of Q.

    Each run is a row, which has a scale and random bits of its own.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.nn.Parameter(torch.zeros(runs, N))
    inner = torch.optim.SGD([x], lr=1.0)
    optimizer = QuantizedGradients(inner, COARSE, rounding, error_feedback, block_size=N)
    spread = 0.0
    for k in range(1, steps + 1):
        x.grad = (x - 1).detach()
        x.grad[:, 0] += 30 * torch.randn(runs, generator=generator)
        exact = x.grad.clone()
        inner.param_groups[0]["lr"] = 1.0 / k
        optimizer.step()
        spread += float((x.grad - exact)[:, 1:].double().square().mean()) / steps
    return x.detach(), spread


def test_unbiased_quantization_converges_at_the_predicted_rate() -> None:
    """With steps 1/k the result is the mean of what the gradients pointed at: its variance is that of Q over K."""
    steps = 400
    x, spread = descend("stochastic", False, steps, runs=40)
    error = x[:, 1:] - 1
    measured = float(error.double().square().mean())
    predicted = spread / steps
    assert measured == pytest.approx(predicted, rel=0.25)
    assert abs(float(error.mean())) < 4 * (predicted / error.numel()) ** 0.5


def test_biased_quantization_stalls_and_error_feedback_repairs_it() -> None:
    """Beside a coordinate that is thirty times noisier, all others round to zero."""
    biased, _ = descend("nearest", False, 400)
    assert float((biased[:, 1:] - 1).abs().mean()) > 0.3
    repaired, _ = descend("nearest", True, 400)
    assert float((repaired[:, 1:] - 1).abs().mean()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_feedback_loses_nothing(dtype: torch.dtype) -> None:
    """What arrived and what is owed add up to what came in."""
    p = torch.nn.Parameter(torch.zeros(600, dtype=dtype))
    optimizer = QuantizedGradients(torch.optim.SGD([p], lr=1.0), COARSE, error_feedback=True)
    total, arrived = torch.zeros(2, 600, dtype=torch.float64)
    for step in range(50):
        p.grad = torch.randn(600, generator=torch.Generator().manual_seed(step)).to(dtype)
        total += p.grad.double()
        optimizer.step()
        arrived += p.grad.double()
    assert torch.allclose(arrived + optimizer._residuals[0].double(), total, atol=1e-4)


def test_gradients_are_quantizes_own() -> None:
    p = torch.nn.Parameter(torch.zeros(7, 100))
    optimizer = QuantizedGradients(torch.optim.SGD([p], lr=0.1), "dynamic", block_size=64)
    grad = torch.randn(7, 100)
    p.grad = grad.clone()
    optimizer.step()
    assert torch.equal(p.grad, quantize(grad, codebook("dynamic"), 64).dequantize())


def test_a_gradient_that_is_not_finite_is_for_the_optimizer_to_refuse() -> None:
    p = torch.nn.Parameter(torch.zeros(8))
    inner = AdamW([("p", p)], weight_decay=0.0)
    optimizer = QuantizedGradients(inner, error_feedback=True)
    for bad in (False, True, False):
        p.grad = torch.linspace(-1, 1, 8)
        if bad:
            p.grad[3] = torch.nan
        optimizer.step()
    assert inner.skipped == {"p": 1}
    assert torch.isfinite(optimizer._residuals[0]).all()


def test_a_gradient_that_overflows_with_its_residual_leaves_all_residuals() -> None:
    """The optimizer refuses all of it, so what it would have been given must still be owed."""
    p = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))
    inner = AdamW([("p", p)], weight_decay=0.0)
    optimizer = QuantizedGradients(inner, COARSE, error_feedback=True)
    owed = torch.full((8,), 0.25)
    owed[0] = 1e3
    optimizer._residuals[0] = owed.clone()
    p.grad = torch.full((8,), 100.0, dtype=torch.float16)
    p.grad[0] = torch.finfo(torch.float16).max
    optimizer.step()
    assert inner.skipped == {"p": 1}
    assert torch.equal(optimizer._residuals[0], owed)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_resumed_run_is_the_one_that_never_stopped(rounding: str) -> None:
    def make():
        p = torch.nn.Parameter(torch.ones(300))
        return p, QuantizedGradients(AdamW([p]), COARSE, rounding, error_feedback=True)

    def drive(p, optimizer, steps):
        for step in steps:
            p.grad = torch.randn(300, generator=torch.Generator().manual_seed(step))
            optimizer.step()

    whole, optimizer = make()
    drive(whole, optimizer, range(8))
    first, saved = make()
    drive(first, saved, range(5))
    second, resumed = make()
    with torch.no_grad():
        second.copy_(first)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    drive(second, resumed, range(5, 8))
    assert torch.equal(second, whole)


def test_a_copy_goes_on_as_the_original() -> None:
    p = torch.nn.Parameter(torch.ones(300))
    optimizer = QuantizedGradients(AdamW([p]), COARSE, "stochastic", error_feedback=True)
    p.grad = torch.linspace(-1, 1, 300)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        q = twin.param_groups[0]["params"][0]
        assert twin.optimizer.param_groups is twin.param_groups
        wanted, other = copy.deepcopy((p, optimizer))
        wanted.grad, q.grad = torch.ones(300), torch.ones(300)
        other.step()
        twin.step()
        assert not torch.equal(q, p)
        assert torch.equal(q, wanted)


def test_schedules_closures_and_groups_reach_the_optimizer() -> None:
    p, q = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    inner = torch.optim.SGD([p], lr=1.0)
    optimizer = QuantizedGradients(inner)
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.sum() + q.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 8
    schedule.step()
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.05]
    assert torch.equal(p.detach(), torch.zeros(4))
    assert torch.equal(q.detach(), torch.full((4,), 0.5))


def test_bad_arguments_and_states_are_named() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    for options, words in (
        ({"codebook": "dynamical"}, "codebook must be one of .*, got 'dynamical'"),
        ({"codebook": codebook("dynamic", signed=False)}, "codebook must have negative values"),
        ({"rounding": "up"}, "rounding must be .*, got 'up'"),
        ({"block_size": 0}, "block_size must be .*, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            QuantizedGradients(inner, **options)
    with pytest.raises(ValueError, match=r"optimizer must .*, got one with step_in_backward"):
        QuantizedGradients(step_in_backward(torch.nn.Linear(2, 2), SGD))
    with pytest.raises(ValueError, match=r"state_dict must be of QuantizedGradients"):
        QuantizedGradients(inner).load_state_dict(inner.state_dict())
    saved = QuantizedGradients(inner).state_dict()
    (group,) = saved["param_groups"]
    for changed, words in (
        (saved | {"param_groups": []}, r"state_dict must have groups of \[1\] parameters, got \[\]"),
        (saved | {"param_groups": [group | {"gradients_quantized": -1}]}, r"'gradients_quantized' .*, got \[-1\]"),
        (saved | {"state": {0: {"gradient_residual": torch.zeros(3)}}}, r"parameter 0 must be .* shape \(2,\)"),
        (saved | {"state": {0: {"gradient_residual": torch.full((2,), torch.nan)}}}, "parameter 0 must be finite"),
    ):
        with pytest.raises(ValueError, match=words):
            QuantizedGradients(inner, error_feedback=True).load_state_dict(changed)


def test_a_state_of_before_is_read() -> None:
    """The layout of 2026: the residual in the parameter's entry, the count of steps in each group."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = QuantizedGradients(torch.optim.SGD([p], lr=0.1), COARSE, error_feedback=True)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["gradients_quantized"] = 3
    saved["state"] = {0: {"gradient_residual": torch.tensor([0.25, -0.5])}}
    optimizer.load_state_dict(saved)
    p.grad = torch.zeros(2)
    optimizer.step()
    assert torch.equal(p.grad + optimizer._residuals[0], torch.tensor([0.25, -0.5]))
    assert optimizer.state_dict()["param_groups"][0]["gradients_quantized"] == 4
