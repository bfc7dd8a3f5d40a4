"""Boxes of parameters: where they lie in the flat whole, their random numbers, words put together from others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.formats import random_bits, random_halves
from narrowgauge.optim import AdamW
from narrowgauge.optim._sharded_state import Chunks, whole_state
from narrowgauge.optim._sharding import Shard
from narrowgauge.optim._state_shapes import from_shapes

pytestmark = pytest.mark.usefixtures("eager")


@st.composite
def boxes(draw: st.DrawFn) -> Shard:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    ends = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return Shard(shape, tuple(low for low, _ in ends), tuple(high - low for low, high in ends), 2, 5)


@given(boxes(), st.integers(1, 9))
def test_a_box_is_a_run_of_the_whole_or_is_not(box: Shard, block: int) -> None:
    places = torch.arange(math.prod(box.shape)).view(box.shape)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        places = places.narrow(dim, offset, size)
    places = places.reshape(-1)
    run = bool((places.diff() == 1).all())
    assert box.first == (int(places[0]) if run else None)
    assert (box.here, box.numel) == (len(places), math.prod(box.shape))
    ends = int(places[-1]) + 1
    aligned = run and int(places[0]) % block == 0 and (ends % block == 0 or ends == box.numel)
    assert box.aligned(block) == aligned
    assert box.origin == (box.first if run and box.first % 8 == 0 else 3 << 40)


def test_random_numbers_of_shards_are_those_of_the_whole_or_nobody_elses() -> None:
    key = {"seed": 3, "stream": 5, "step": 7}
    whole = random_bits(96, **key)
    halves = random_halves(96, **key, purpose=2, device=torch.device("cpu"))
    for first, count in ((0, 40), (40, 56), (88, 8)):
        assert torch.equal(random_bits(count, **key, offset=first), whole[first : first + count])
        mine = random_halves(count, **key, purpose=2, offset=first, device=torch.device("cpu"))
        assert torch.equal(mine, halves[first : first + count])
    others = [Shard((96,), (at,), (12,), number, 8).origin for number, at in enumerate(range(0, 96, 12))]
    assert others[0] == 0
    assert others[1] == 2 << 40
    assert len(set(others)) == 8
    drawn = [random_bits(12, **key, offset=origin) for origin in others]
    assert all(len(set(a.tolist()) & set(b.tolist())) == 0 for a, b in itertools.combinations(drawn, 2))


@pytest.mark.parametrize("states", ["8bit", "log8", "log4", "4bit", "fp8", "bf16"])
def test_words_are_put_together_from_boxes(states: str) -> None:
    """Three boxes of rows that are blocks: the words of the whole, bit for bit, and again of two other boxes."""
    torch.manual_seed(0)
    options = {"states": states, "block_size": 16, "min_quantized_size": 1}
    ps = [torch.nn.Parameter(torch.randn(rows, 16)) for rows in (7, 3, 3, 1)]
    optimizer = AdamW(ps, **options)
    with torch.no_grad():
        for p, part in zip(ps[1:], ps[0].split((3, 3, 1)), strict=True):
            p.copy_(part)
    grad = torch.randn(7, 16)
    for p, part in zip(ps, (grad, *grad.split((3, 3, 1))), strict=True):
        p.grad = part.clone()
    # Without its random bits, which are a parameter's own.
    optimizer.param_groups[0]["nonfinite"] = "propagate"
    optimizer.step()
    whole, *parts = [dict(optimizer.state[p]) for p in ps]
    shards = [Shard((7, 16), (at, 0), (rows, 16)) for at, rows in ((0, 3), (3, 3), (6, 1))]
    words = [{k: v for k, v in part.items() if v.dim()} for part in parts]
    if states not in ("bf16",):
        blocks = [{k: v for k, v in part.items() if "." in k} for part in words]
        joined = whole_state(Chunks(list(zip(shards, blocks, strict=True)), {}), 16)
        assert joined is not None
        for key, value in joined.items():
            assert value.shape == whole[key].shape
            assert torch.equal(
                value.view(torch.uint8),
                torch.cat([w[key].reshape(-1) for w in words])
                .view(torch.uint8)
                .view(value.view(torch.uint8).shape),
            )
        assert whole_state(Chunks(list(zip(shards, blocks, strict=True)), {}), 32) is None
    plan = optimizer.plan_of(ps[0])
    found, decoded = from_shapes(ps[0], plan, Chunks(list(zip(shards, words, strict=True)), {}), 16, lambda *_: {})
    assert not decoded
    assert found.keys() == {key for key, value in whole.items() if value.dim()}
