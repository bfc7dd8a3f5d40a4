"""`max_grad_norm` as an option: one number for all groups, over all paths at once, saved, changed, and refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge import optim
from narrowgauge.optim import SGD, AdamW


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((3,), (2, 2), (1,))]


def give(ps: list[torch.nn.Parameter], value: float = 1.0) -> None:
    for p in ps:
        p.grad = torch.full_like(p, value)


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_what_is_no_length_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="max_grad_norm must be a number above 0, inf, or None, got"):
        AdamW(parameters(), max_grad_norm=bad)
    ps = parameters()
    optimizer = AdamW(ps, max_grad_norm=1.0)
    give(ps)
    optimizer.param_groups[0]["max_grad_norm"] = bad
    with pytest.raises(ValueError, match="max_grad_norm must be"):
        optimizer.step()
    assert all(torch.equal(p, torch.zeros_like(p)) for p in ps)


def test_it_is_one_number_for_all_groups() -> None:
    ps = parameters()
    groups = [{"params": ps[:1], "lr": 2.0}, {"params": ps[1:], "weight_decay": 0.1}]
    with pytest.raises(ValueError, match=r"max_grad_norm must be the same in all groups, got 2\.0 and 1\.0"):
        SGD([{**groups[0], "max_grad_norm": 2.0}, groups[1]], lr=1.0, max_grad_norm=1.0)
    optimizer = SGD(copy.copy(groups), lr=1.0, max_grad_norm=1.0)
    for group in optimizer.param_groups:
        group["max_grad_norm"] = 4.0
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(8))]})  # as the others are now
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [4.0] * 3
    with pytest.raises(ValueError, match="max_grad_norm must be"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "max_grad_norm": 1.0})
    assert len(optimizer.param_groups) == 3
    give([p for group in optimizer.param_groups for p in group["params"]], 2.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == 8.0  # 16 elements of 2
    assert torch.allclose(ps[0], torch.full_like(ps[0], -2.0))
    assert torch.allclose(ps[1], torch.full_like(ps[1], -1.0))
    optimizer.param_groups[1]["max_grad_norm"] = None
    with pytest.raises(ValueError, match=r"max_grad_norm must be the same in all groups, got 4\.0 and None"):
        optimizer.step()


def test_the_norm_is_of_the_last_step_and_there_is_none_before() -> None:
    ps = parameters()
    optimizer = SGD(ps, lr=1.0, max_grad_norm=math.inf)  # measures, and clips nothing
    with pytest.raises(RuntimeError, match="grad_norm: no step has measured one"):
        _ = optimizer.grad_norm
    optimizer.step()  # no gradients at all
    norm = optimizer.grad_norm
    assert (norm.shape, norm.dtype, float(norm)) == ((), torch.float32, 0.0)
    give(ps, 2.0)
    ps[1].grad = None
    optimizer.step()
    assert float(optimizer.grad_norm) == 4.0
    assert float(norm) == 0.0  # what was read does not change
    assert torch.equal(ps[0], torch.full((3,), -2.0))
    give(ps, 0.0)
    optimizer.step()
    assert float(optimizer.grad_norm) == 0.0
    assert torch.equal(ps[0], torch.full((3,), -2.0))


@pytest.mark.parametrize("arithmetic", ["fp32", "strict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strict_arithmetic_begins_with_the_clipped_gradient(arithmetic: str, dtype: torch.dtype) -> None:
    ends = []
    for limit in (0.5, None):
        ps = parameters(dtype)
        optimizer = AdamW(ps, arithmetic=arithmetic, max_grad_norm=limit)
        optimizer._engine.backends = ()
        for step in range(3):
            for i, p in enumerate(ps):
                grad = torch.linspace(-1, 2, p.numel()).view(p.shape).to(dtype) * (i + step + 1)
                p.grad_dtype = None
                p.grad = grad
            if limit is None:
                norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in ps))
                for p in ps:
                    p.grad = p.grad.float() * float(np.float32(min(1.0, 0.5 / (norm + 1e-6))))
            optimizer.step()
        ends.append(torch.cat([p.detach().reshape(-1) for p in ps]))
    assert torch.equal(*ends)


def test_a_checkpoint_brings_its_own_and_an_old_one_none() -> None:
    ps = parameters()
    optimizer = AdamW(ps, max_grad_norm=2.0)
    give(ps)
    optimizer.step()
    saved = optimizer.state_dict()
    other = AdamW(parameters(), max_grad_norm=1.0)
    with pytest.warns(UserWarning, match=r"took max_grad_norm=2\.0 from the checkpoint, for 1\.0"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["max_grad_norm"] == 2.0
    old = copy.deepcopy(saved)
    del old["param_groups"][0]["max_grad_norm"]
    other = AdamW(parameters(), max_grad_norm=1.0)
    other.load_state_dict(old)
    assert other.param_groups[0]["max_grad_norm"] == 1.0
    torchs = torch.optim.AdamW(parameters())
    with pytest.warns(UserWarning, match=r"dropped max_grad_norm=2\.0"):
        torchs.load_state_dict(optimizer.torch_state_dict())
    other.load_state_dict(torchs.state_dict())
    assert other.param_groups[0]["max_grad_norm"] == 1.0
    again = copy.deepcopy(optimizer)
    give([p for group in again.param_groups for p in group["params"]])
    again.step()
    assert float(again.grad_norm) == pytest.approx(math.sqrt(8))


def test_it_is_switched_on_and_off_while_training() -> None:
    ps, qs = parameters(), parameters()
    mine, theirs = AdamW(ps, lr=0.1), AdamW(qs, lr=0.1)
    for limit in (None, 0.5, 0.1, None, math.inf):
        mine.param_groups[0]["max_grad_norm"] = limit
        for some in (ps, qs):
            give(some, 0.7)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(qs, limit)
        mine.step()
        theirs.step()
    assert all(torch.allclose(p, q, rtol=1e-5) for p, q in zip(ps, qs, strict=True))


def test_kernels_for_lists_and_the_eager_step_share_one_norm(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")
    if device == "cpu":
        monkeypatch.setattr(optim._engine, "unavailable", lambda device: None)
    ps = [torch.nn.Parameter(torch.zeros(size, device=device)) for size in (9, 16)]
    groups = [{"params": ps[:1]}, {"params": ps[1:], "arithmetic": "strict"}]
    optimizer = SGD(groups, lr=1.0, max_grad_norm=1.0)
    for step in range(3):
        give(ps, 2.0)
        ps[1].grad[0] = math.inf if step == 1 else 2.0
        optimizer.step()
        assert float(optimizer.grad_norm) == (6.0 if step == 1 else 10.0)
    rows = optimizer.describe().rows
    assert [row.path.replace(",", "").split()[:2] for row in rows] == [["fused", "Triton"], ["eager", "torch"]]
    assert torch.allclose(ps[0], torch.full_like(ps[0], -(0.2 + 1 / 3 + 0.2)))
    assert torch.allclose(ps[1], torch.full_like(ps[1], -0.4))
