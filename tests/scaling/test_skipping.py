"""Skipping by tensor: the others step as if nothing were, clipping sees the finite ones only, skips are counted."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge.optim as ours
from narrowgauge.scaling import DynamicLossScaler, StaticLossScaler, TensorLossScaler
from pairwise import by_pairs

WARNED = r"layer0\.weight: .*inf or NaN"
OPTIMIZERS = {
    "ours": partial(ours.AdamW, lr=0.1),
    "ours, 8-bit": partial(ours.AdamW8bit, lr=0.1),
    "ours, propagate": partial(ours.AdamW, lr=0.1, nonfinite="propagate"),
    "torch AdamW": partial(torch.optim.AdamW, lr=0.1),
    "torch AdamW fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "torch AdamW foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "torch SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
}
# Most steps skip, and say so.
quiet = pytest.mark.filterwarnings("ignore:.*inf or NaN:UserWarning")


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer0.weight": (8, 6), "layer0.bias": (8,), "head": (3, 8), "temperature": ()}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give(params: dict[str, torch.nn.Parameter], scale: float, step: int, bad: dict[str, float]) -> None:
    """Gradients as the backward pass of a scaled loss leaves them."""
    generator = torch.Generator().manual_seed(100 + step)
    for name, p in params.items():
        p.grad = torch.randn(p.shape, generator=generator) * scale
        if name in bad:
            p.grad.view(-1)[-1] = bad[name]


def ready(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    scaler.scale(torch.ones(()))
    return scaler


def snapshot(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state.get(p, {})
    return [p.detach().clone(), *(v.clone() for k, v in sorted(state.items()) if k != "skipped" and v is not None)]


@quiet
@by_pairs(make=OPTIMIZERS, clip={"plain": False, "clipped": True}, bad=[math.inf, -math.inf, math.nan])
def test_only_the_bad_tensor_misses_its_step(make, clip: bool, bad: float) -> None:
    params, twins = parameters(), parameters()
    optimizer, twin = make(list(params.items())), make(list(twins.items()))
    skips_itself = optimizer.param_groups[0].get("nonfinite") == "skip"
    scaler = ready(TensorLossScaler())
    for step in range(4):
        hit = {"layer0.weight": bad} if step in (1, 2) else {}
        give(params, 65536.0, step, hit)
        give(twins, 1.0, step, {})
        before = snapshot(params["layer0.weight"], optimizer)
        # What it should be: a step without that tensor. Its zeros in the norm may change the order of the sum.
        for name in hit:
            twins[name].grad = torch.zeros_like(twins[name]) if skips_itself else None
        if clip:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
            assert norm == torch.nn.utils.clip_grad_norm_(twins.values(), 0.5)
        for name in hit:
            twins[name].grad = None
        scaler.step(optimizer)
        scaler.update()
        twin.step()
        after = snapshot(params["layer0.weight"], optimizer)
        if hit:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            assert not torch.equal(before[0], after[0])
        for name in params:
            pairs = zip(snapshot(params[name], optimizer), snapshot(twins[name], twin), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (step, name)
    assert scaler.skipped == {"layer0.weight": 2}
    assert scaler.get_scale() == 65536.0
    assert scaler.skipped_steps == 0


@quiet
@by_pairs(make=OPTIMIZERS, kind={"dynamic": DynamicLossScaler, "static": StaticLossScaler})
def test_the_others_skip_the_step_whole_and_name_the_tensor(make, kind) -> None:
    params = parameters()
    optimizer, scaler = make(list(params.items())), ready(kind(init_scale=8.0))
    for step in range(3):
        give(params, scaler.get_scale(), step, {"head": math.nan} if step else {})
        before = {name: snapshot(p, optimizer) for name, p in params.items()}
        scaler.step(optimizer)
        scaler.update()
        for name, p in params.items():
            same = [torch.equal(a, b) for a, b in zip(before[name], snapshot(p, optimizer), strict=False)]
            assert all(same) if step else not same[0]
    assert scaler.skipped == {"head": 2}
    assert scaler.skipped_steps == 2
    assert scaler.get_scale() == (2.0 if kind is DynamicLossScaler else 8.0)


class Reads(TorchDispatchMode):
    """Counts what brings a number to the host, which on a GPU would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_for_an_optimizer_that_skips_nothing_is_read(clip: bool, monkeypatch) -> None:
    """What reaches the optimizer is inf or NaN in the flagged tensor and nowhere else, and the host never knew."""
    params = parameters()
    optimizer, scaler = ours.AdamW(list(params.items())), ready(TensorLossScaler())
    monkeypatch.setattr(optimizer, "step", lambda: None)  # on the CPU it reads its own flags
    give(params, 65536.0, 0, {"head": math.inf})
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    with Reads() as reads:
        torch.ones(()).item()
        assert reads.count == 1  # it does see reads
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert reads.count == 1
    assert [name for name, p in params.items() if not p.grad.isfinite().all()] == ["head"]


@quiet
def test_loading_replaces_the_counts_and_keeps_those_of_the_optimizer() -> None:
    params, others = parameters(), parameters()
    optimizers = [ours.AdamW(list(params.items())), torch.optim.SGD(others.values(), lr=0.1)]
    scaler = ready(TensorLossScaler())
    for step in range(2):
        give(params, 65536.0, step, {"head": math.inf})
        give(others, 65536.0, step, {"head": math.inf})
        if step == 1:
            scaler.load_state_dict({**scaler.state_dict(), "skipped": {"0.2": 5}})
            assert scaler.skipped == {"head": 1, "0.2": 5}
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.skipped == {"head": 2, "0.2": 6}
    assert scaler.state_dict()["skipped"] == {"0.2": 6}  # the optimizer saves its own


def test_raise_raises_and_groups_may_differ() -> None:
    params = parameters()
    groups = [
        {"params": [(name, p)], "nonfinite": "raise" if name == "head" else "propagate"}
        for name, p in params.items()
    ]
    for clip in (False, True):
        optimizer, scaler = ours.AdamW(groups), ready(TensorLossScaler())
        give(params, 65536.0, 0, {"layer0.weight": math.inf})
        with pytest.warns(UserWarning, match=WARNED):
            scaler.step(optimizer)
        scaler.update()
        assert scaler.skipped == {"layer0.weight": 1}
        give(params, 65536.0, 0, {"head": math.nan})
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        with pytest.raises(FloatingPointError, match="head"):
            scaler.step(optimizer)
        assert all(p.isfinite().all() for p in params.values())


def test_each_tensor_is_warned_about_once() -> None:
    params = parameters()
    optimizer, scaler = torch.optim.SGD(list(params.items()), lr=0.1), ready(TensorLossScaler())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            give(params, 65536.0, step, {"layer0.weight": math.inf, **({"head": math.nan} if step == 2 else {})})
            scaler.step(optimizer)
            scaler.update()
    assert [str(w.message).split(":")[0] for w in caught] == ["layer0.weight", "head"]
    assert "65536; if this goes on (see skipped), lower init_scale or the learning rate" in str(caught[0].message)
    assert all(w.filename == __file__ for w in caught)


def test_a_static_scale_says_once_what_to_do() -> None:
    params = parameters()
    optimizer, scaler = torch.optim.SGD(list(params.items()), lr=0.1), ready(StaticLossScaler())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            give(params, 8.0, step, dict.fromkeys(params, math.inf))
            scaler.step(optimizer)
            scaler.update()
    assert len(caught) == 1
    assert "layer0.weight, layer0.bias, head and temperature had inf or NaN" in str(caught[0].message)
    assert "lower init_scale" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_dynamic_scale_is_quiet_until_it_falls_below_one() -> None:
    params = parameters()
    optimizer, scaler = torch.optim.SGD(list(params.items()), lr=0.1), ready(DynamicLossScaler(init_scale=4.0))
    for step in range(4):
        give(params, 1.0, step, {"head": math.nan})
        if step == 2:
            with pytest.warns(
                UserWarning, match=r"falls to 0.5, and head still had inf or NaN: .*not the cause"
            ) as w:
                scaler.step(optimizer)
            assert w[0].filename == __file__
        else:
            scaler.step(optimizer)
        scaler.update()


@quiet
@pytest.mark.parametrize("kind", [DynamicLossScaler, StaticLossScaler, TensorLossScaler])
def test_several_optimizers_with_groups_added_later(kind) -> None:
    """Names that two optimizers share are told apart, and each takes its own step."""
    first, second = parameters(), parameters()
    optimizers = [torch.optim.SGD(list(first.values())[:2], lr=0.1), torch.optim.SGD(second.values(), lr=0.1)]
    scaler = ready(kind(init_scale=8.0))
    for step in range(2):
        if step == 1:
            optimizers[0].add_param_group({"params": list(first.values())[2:]})
        give(first, scaler.get_scale(), step, {"layer0.weight": math.inf, "head": math.inf})
        give(second, scaler.get_scale(), step, {"layer0.weight": math.inf} if step == 0 else {})
        before = [p.detach().clone() for p in second.values()]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(b, p) for b, p in zip(before, second.values(), strict=True)]
        if step == 1:
            assert all(moved)
        else:
            assert moved == ([False, True, True, True] if kind is TensorLossScaler else [False] * 4)
    assert scaler.skipped == {"0.0": 2, "1.0": 1, "1/0.0": 1}
    assert scaler.skipped_steps == (0 if kind is TensorLossScaler else 3)
    assert scaler.get_scale() == (2.0 if kind is DynamicLossScaler else 8.0)  # one backoff an iteration


@quiet
@pytest.mark.parametrize("kind", [DynamicLossScaler, TensorLossScaler])
def test_sparse_gradients_in_an_optimizer_that_takes_them(kind) -> None:
    def table() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(5, 3, sparse=True)

    net, twin = table(), table()
    scaler = kind(init_scale=1024.0)
    optimizers = [torch.optim.SparseAdam(m.parameters(), lr=0.1) for m in (net, twin)]
    rows = torch.tensor([1, 3, 3])
    for bad in (False, True):
        for m, optimizer in zip((net, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(rows).square().sum()
            (scaler.scale(loss) if m is net else loss).backward()
        if bad:
            net.weight.grad._values()[0, 0] = math.inf
        else:
            optimizers[1].step()
        scaler.step(optimizers[0])
        scaler.update()
    assert torch.equal(net.weight, twin.weight)
    assert scaler.skipped == {"0.0": 1}
