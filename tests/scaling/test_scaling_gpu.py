"""On a GPU: the CPU's numbers, and nothing waits for the device that need not."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from narrowgauge.optim import AdamW
from narrowgauge.scaling import DynamicLossScaler, StaticLossScaler, TensorLossScaler

pytestmark = pytest.mark.gpu


@contextmanager
def waiting_for_the_device(allowed: int) -> Iterator[None]:
    """Fail if the host waits for the device more often than is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch's own remark that this mode is a prototype, once a process, is no wait.
    waits = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
    assert len(waits) <= allowed, waits


def test_a_wait_is_noticed() -> None:
    with pytest.raises(AssertionError, match="synchronizing"), waiting_for_the_device(allowed=0):
        torch.ones((), device="cuda").item()


def parameters(dtype: torch.dtype = torch.float32, device: str = "cuda") -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (str(i), torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)))
        for i, shape in enumerate([(70, 30), (33,), (), (5, 7, 3)])
    ]


def give(params: list[tuple[str, torch.nn.Parameter]], step: int, bad: int | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for i, (_, p) in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.device) * 1024.0
        if i == bad:
            grad.view(-1)[-1] = math.inf
        p.grad = grad.to(p.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_with_our_optimizer_nothing_is_copied_to_the_host(clip: bool, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    weights = "plain" if dtype is torch.float32 else "master"
    # A rate whose steps a bf16 weight shows.
    optimizer, scaler = AdamW(params, lr=0.1, weights=weights), TensorLossScaler(init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))

    def step() -> None:
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_([p for _, p in params], 1.0)
        scaler.step(optimizer)
        scaler.update()

    give(params, 0)
    step()  # states are made
    give(params, 1, bad=0)
    torch.cuda.synchronize()
    before = [p.detach().clone() for _, p in params]
    with waiting_for_the_device(allowed=0):
        step()
    assert [torch.equal(b, p) for b, (_, p) in zip(before, params, strict=True)] == [True, False, False, False]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert scaler.skipped == {"0": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler, TensorLossScaler])
def test_a_step_that_unscales_and_clips_waits_for_nothing(kind, dtype: torch.dtype) -> None:
    params, twins = parameters(dtype), parameters(dtype)
    options = {"lr": 0.1, "weights": "plain" if dtype is torch.float32 else "master", "max_grad_norm": 0.5}
    optimizer, twin = AdamW(params, **options), AdamW(twins, **options)
    scaler = kind(init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))
    whole = kind is not TensorLossScaler
    for step in range(5):
        give(params, step, bad=2 if step == 3 else None)
        for (_, p), (_, q) in zip(params, twins, strict=True):
            q.grad_dtype = None
            q.grad = p.grad.float() / 1024.0
        if step == 0:
            scaler.step(optimizer)  # states are made
            scaler.update()
        else:
            if step == 4 and kind is DynamicLossScaler:
                scaler.update(1024.0)
            torch.cuda.synchronize()
            with waiting_for_the_device(allowed=0):
                scaler.step(optimizer)
                scaler.update()
        if not (whole and step == 3):
            twin.step()
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(params, twins, strict=True))
    assert torch.equal(optimizer.grad_norm, twin.grad_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (scaler.skipped, scaler.skipped_steps) == ({"2": 1}, int(whole))


def test_a_skip_is_told_of_when_its_flags_have_arrived() -> None:
    params, scaler = parameters(), StaticLossScaler(init_scale=1024.0)
    optimizer = AdamW(params)
    scaler.scale(torch.ones((), device="cuda"))
    give(params, 0, bad=1)
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.synchronize()
    give(params, 1)
    with pytest.warns(UserWarning, match="a step was skipped: 1 had inf or NaN under the loss scale 1024;"):
        scaler.step(optimizer)


@pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler, TensorLossScaler])
def test_with_torchs_optimizer_the_host_waits_once_a_step(kind) -> None:
    params = parameters()
    optimizer, scaler = torch.optim.SGD(params, lr=0.1, foreach=True), kind(init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))
    give(params, 0)
    with waiting_for_the_device(allowed=1):
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler])
def test_with_torchs_fused_optimizer_it_never_waits(kind) -> None:
    params = parameters()
    optimizer, scaler = torch.optim.AdamW(params, fused=True), kind(init_scale=1024.0)
    scaler.scale(torch.ones((), device="cuda"))
    give(params, 0)
    scaler.step(optimizer)
    scaler.update()
    give(params, 1, bad=3)
    before = [p.detach().clone() for _, p in params]
    with waiting_for_the_device(allowed=0):
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(b, p) for b, (_, p) in zip(before, params, strict=True))
    # A fixed scale warns of what it skipped when it is asked: to warn in the step it would have to wait.
    warned = pytest.warns(UserWarning, match="a step was skipped") if kind is StaticLossScaler else nullcontext()
    with warned:
        assert (scaler.skipped, scaler.skipped_steps) == ({"3": 1}, 1)


@pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler, TensorLossScaler])
@pytest.mark.parametrize("scale", [1024.0, 3.0])
def test_the_gpu_gives_the_cpus_numbers(kind, scale: float) -> None:
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for device in ("cpu", "cuda"):
            params = parameters(device=device)
            optimizer, scaler = torch.optim.SGD(params, lr=0.5), kind(init_scale=scale)
            scaler.scale(torch.ones((), device=device))
            for step in range(4):
                give(params, step, bad=1 if step == 2 else None)
                scaler.unscale_(optimizer)
                grads = [None if p.grad is None else p.grad.cpu() for _, p in params]
                scaler.step(optimizer)
                scaler.update()
            ends.append((grads, scaler.skipped, scaler.skipped_steps, scaler.get_scale()))
    assert ends[0][1:] == ends[1][1:]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
