"""The parts of compressed gradients, in one process: arguments, layouts, messages, memories, one rank."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from narrowgauge import formats, storage
from narrowgauge.distributed import CompressedAllReduce, compressed_allreduce_hook
from narrowgauge.distributed._compressed_layout import Layout
from narrowgauge.distributed._compressed_passes import BlockCodec

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown codebook": ({"codebook": "dynamik"}, r"^codebook must be one of .*, got 'dynamik'"),
    "unsigned": (
        {"codebook": formats.codebook("dynamic", signed=False)},
        "^codebook must be signed, got no negative",
    ),
    "width twice": (
        {"codebook": formats.codebook("linear", bits=4), "bits": 4},
        r"^bits must be None beside a codebook of values, got 4$",
    ),
    "rounding": ({"rounding": "up"}, r"^rounding must be 'nearest' or 'stochastic', got 'up'$"),
    "block of 254": ({"block_size": 254}, r"^block_size must be a multiple of 4, got 254$"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compressed_allreduce_hook(**options)


def test_a_hook_is_what_register_comm_hook_takes_and_both_of_it() -> None:
    hook = compressed_allreduce_hook()
    state, function = hook
    assert state is None
    assert function is hook
    assert isinstance(hook, CompressedAllReduce)
    assert list(inspect.signature(hook).parameters) == ["state", "bucket"]
    assert hook.__qualname__ == "compressed_allreduce_hook"


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    exempt=st.lists(st.booleans(), min_size=5, max_size=5),
    ranks=st.integers(1, 6),
    block=st.sampled_from([4, 8, 32]),
)
def test_every_element_stands_in_one_place(sizes: list[int], exempt: list[bool], ranks: int, block: int) -> None:
    layout = Layout.of([str(k) for k in range(len(sizes))], sizes, exempt[: len(sizes)], ranks, block)
    buffer = torch.arange(1.0, 1 + sum(sizes))
    rows, back = torch.zeros(ranks, layout.width), torch.zeros_like(buffer)
    for piece in layout.compressed:
        assert piece.width % block == 0
        assert piece.width * (ranks - 1) < piece.numel + ranks * block  # no more than a block a rank of padding
        for place, flat in piece.views(rows, buffer[piece.begin : piece.end]):
            assert not place.any()
            place.copy_(flat)
        # The shards one after the other are the parameter and its padding.
        shards = piece.columns(rows).reshape(-1)
        assert torch.equal(shards[: piece.numel], buffer[piece.begin : piece.end])
        assert not shards[piece.numel :].any()
    for piece in layout.compressed:
        for place, flat in piece.views(rows, back[piece.begin : piece.end]):
            flat.copy_(place)
    for piece in layout.exempt:
        back[piece.begin : piece.end] = buffer[piece.begin : piece.end]
    assert torch.equal(back, buffer)
    assert int((rows != 0).sum()) == sum(piece.numel for piece in layout.compressed)


def wire(
    name: str = "dynamic", bits: int = 8, block: int = 64, rounding: Any = "nearest", seed: int = 0
) -> BlockCodec:
    return BlockCodec(formats.codebook(name, bits=bits), block, rounding, seed)


@pytest.mark.parametrize(("name", "bits"), [("dynamic", 8), ("linear", 8), ("dynamic", 4), ("linear", 3)])
def test_a_message_is_what_quantize_gives(name: str, bits: int) -> None:
    x = torch.randn(3, 640) * torch.logspace(-3, 3, 640)
    x[1, :64] = 0
    coded = wire(name, bits)
    message = coded.encode(x, None)
    assert message.dtype == torch.uint8
    assert message.shape == (3, coded.nbytes(640)) == (3, 10 * 4 + 640 * (8 if bits == 8 else 4) // 8)
    wanted = storage.quantize(x, formats.codebook(name, bits=bits), 64)
    assert torch.equal(coded.decode(message, 640), wanted.dequantize())
    # Messages are rows on their own.
    assert torch.equal(coded.decode(message[1:2], 640), wanted.dequantize()[1:2])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_block_that_is_not_finite_comes_back_as_nan(bad: float, rounding: str) -> None:
    x = torch.randn(2, 256)
    x[1, 130] = bad
    coded = wire(rounding=rounding)
    bits = torch.randint(0, 1 << 32, x.shape) if rounding == "stochastic" else None
    found = coded.decode(coded.encode(x, bits), 256)
    nan = torch.zeros(2, 256, dtype=torch.bool)
    nan[1, 128:192] = True
    assert torch.equal(torch.isnan(found), nan)
    clean = torch.where(nan, 0.0, x)
    assert torch.equal(found[~nan], coded.decode(coded.encode(clean, bits), 256)[~nan])


def layout(*keys: str, ranks: int = 4) -> Layout:
    return Layout.of(keys, [1000 + 300 * int(key[-1]) for key in keys], [False] * len(keys), ranks, 64)


def test_random_bits_are_a_parameters_own() -> None:
    """The same in another bucket, and row by row; others for another parameter, step, rank, hop, seed."""
    coded = wire(rounding="stochastic", seed=5)
    both, cpu = layout("a.1", "a.2"), torch.device("cpu")
    whole = coded.random(both, 7, 2, range(4), cpu)
    assert whole.shape == (4, both.width)
    assert int(whole.min()) >= 0
    assert int(whole.max()) < 1 << 32
    first, second = (piece.columns(whole) for piece in both.compressed)
    swapped = layout("a.2", "a.1")
    other = coded.random(swapped, 7, 2, range(4), cpu)
    assert torch.equal(swapped.compressed[0].columns(other), second)
    assert torch.equal(swapped.compressed[1].columns(other), first)
    assert torch.equal(coded.random(both, 7, 2, range(2, 3), cpu), whole[2:3])
    assert len(whole.unique()) > 0.999 * whole.numel()
    for step, sender, seed in ((8, 2, 5), (7, 3, 5), (7, None, 5), (7, 2, 6), (7, 2, 5 + (1 << 32))):
        drawn = wire(rounding="stochastic", seed=seed).random(both, step, sender, range(4), cpu)
        assert (drawn == whole).double().mean() < 0.001
    assert wire().random(both, 7, 2, range(4), cpu) is None


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_rank_compresses_nothing(dtype: torch.dtype) -> None:
    hook = compressed_allreduce_hook()
    net = nn.Linear(128, 64).to(dtype)
    ddp = nn.parallel.DistributedDataParallel(net)
    ddp.register_comm_hook(state=None, hook=hook)
    x = torch.randn(4, 128, dtype=dtype)
    (wanted,) = torch.autograd.grad(net(x).square().sum(), net.weight)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        assert torch.equal(net.weight.grad, wanted)
    assert (hook.step, hook.bytes_sent, hook.memory_bytes()) == (2, 0, 0)
    assert hook.error(net.weight) is None
    assert hook.state_dict() == {"step": 2, "ranks": 1, "memory": {}}
    fresh = compressed_allreduce_hook()
    fresh.load_state_dict(hook.state_dict())
    assert fresh.step == 2


def state_of(**changed: Any) -> dict[str, Any]:
    return {"step": 0, "ranks": 1, "memory": {}} | changed


STATES: dict[str, tuple[Any, str]] = {
    "none": (None, "^state_dict must have 'step', 'ranks' and 'memory', got None$"),
    "of an optimizer": ({"state": {}}, r"^state_dict must have .*, got \{'state': \{\}\}$"),
    "step": (state_of(step=-1), "^state_dict: 'step' must be an integer of at least 0, got -1$"),
    "codes": (
        state_of(memory={"0/a": torch.zeros(1, dtype=torch.uint8)}),
        "^state_dict: 'memory' must hold float tensors by 'rank/parameter', got '0/a'$",
    ),
    "damaged": (
        state_of(memory={"0/a": torch.tensor([torch.nan])}),
        "^state_dict: '0/a' in 'memory' is not finite",
    ),
    "another rank's": (
        state_of(memory={"1/a": torch.zeros(1)}),
        "^state_dict: 'memory' must have entries of rank 0, got none; keep each rank's own, or pass an empty",
    ),
    "of two ranks": (
        state_of(ranks=2, memory={"0/a": torch.zeros(1)}),
        "^state_dict: 'memory' must be that of 1 ranks, got that of 2; an empty 'memory' begins anew",
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("state", "message"), STATES.values(), ids=STATES)
def test_states_are_refused_and_change_nothing(state: Any, message: str) -> None:
    hook = compressed_allreduce_hook()
    hook.load_state_dict({"step": 5, "ranks": 1, "memory": {"0/float32.0": torch.ones(3)}})
    with pytest.raises(ValueError, match=message):
        hook.load_state_dict(state)
    assert hook.state_dict()["step"] == 5
    assert torch.equal(hook.state_dict()["memory"]["0/float32.0"], torch.ones(3))
