"""What a hook stores of a bucket from step to step: plans and kernels' tables, which copies and new states leave.

In one process: the other of two ranks has the same gradients, and its sums are this one's.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import narrowgauge
from narrowgauge.distributed import CompressedAllReduce, compressed_allreduce_hook
from narrowgauge.distributed import _compressed_passes as fused
from narrowgauge.distributed._compressed_layout import Layout

# Triton's interpreter warns where kernels divide by a scale of zero.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}") for said in ("divide by zero", "invalid value", "overflow")
]

OURS = str(Path(narrowgauge.__file__).parent)
OPTIONS: dict[str, Any] = {"block_size": 32, "min_compressed_size": 100}
SIZES = {"a": (40, 10), "b": (30, 7), "bias": (300,), "norm": (20,), "c": (9, 33), "small": (3, 3)}


class Work:
    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(received: Tensor, sent: Tensor, **_: Any) -> Work:
        received.copy_(sent[:1].expand_as(sent))
        return Work()

    def gather(received: Tensor, sent: Tensor, **_: Any) -> Work:
        received.view(2, -1).copy_(sent.view(1, -1).expand(2, -1))
        return Work()

    def add(x: Tensor, **_: Any) -> Work:
        x.mul_(2)
        return Work()

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    given = {"all_to_all_single": exchange, "all_gather_into_tensor": gather, "all_gather_single": gather}
    for name, function in {**given, "all_reduce": add}.items():
        monkeypatch.setattr(dist, name, function, raising=False)


@pytest.fixture(params=["C", "Triton"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Triton's kernels are interpreted, on the CPU as well."""
    if request.param == "Triton":
        if torch.cuda.is_available():
            pytest.skip(reason="Triton's kernels are not interpreted where there is a GPU")
        pytest.importorskip("triton", reason="triton is not installed: kernels cannot be run")
        from narrowgauge.kernels import _allreduce

        monkeypatch.setattr(fused, "CAllreduce", _allreduce.TritonAllreduce)
    return str(request.param)


class Bucket:
    """What DistributedDataParallel hands to a hook."""

    def __init__(self, model: dict[str, Tensor], names: str, index: int, last: bool, step: int) -> None:
        self._parameters = [model[name] for name in names.split()]
        seeds = [100 * step + list(model).index(name) for name in names.split()]
        parts = [
            torch.randn(p.numel(), generator=torch.Generator().manual_seed(seed)).to(p.dtype)
            for p, seed in zip(self._parameters, seeds, strict=True)
        ]
        self._buffer, self._index, self._last = torch.cat(parts), index, last
        self.given = self._buffer.clone()

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return list(self._parameters)  # another list each time, as torch makes it

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def gradients(self, model: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = self._buffer.split([p.numel() for p in self._parameters])
        names = {id(p): name for name, p in model.items()}
        return {names[id(p)]: part.clone() for p, part in zip(self._parameters, parts, strict=True)}


def model_of(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SIZES.items()}


def buckets_of(model: dict[str, Tensor], names: list[str], step: int) -> list[Bucket]:
    return [Bucket(model, one, i, i + 1 == len(names), step) for i, one in enumerate(names)]


def take(hook: CompressedAllReduce, model: dict[str, Tensor], names: list[str], step: int) -> dict[str, Tensor]:
    """The gradients that come out, and what is remembered."""
    buckets: Any = buckets_of(model, names, step)
    futures = [hook(None, bucket) for bucket in buckets]
    assert all(future.done() for future in futures)
    return results(hook, model, buckets)


def results(hook: CompressedAllReduce, model: dict[str, Tensor], buckets: list[Bucket]) -> dict[str, Tensor]:
    found = {name: x for bucket in buckets for name, x in bucket.gradients(model).items()}
    errors = {f"error of {name}": hook.error(model[name]) for name in list(found)}
    return found | {name: error.clone() for name, error in errors.items() if error is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def begun(options: dict[str, Any], model: dict[str, Tensor]) -> CompressedAllReduce:
    """A hook that has names for the parameters, and remembers nothing."""
    hook = compressed_allreduce_hook(**options)
    take(hook, model, [" ".join(reversed(model))], 0)
    hook.load_state_dict({"step": 0, "ranks": 2, "memory": {}})
    return hook


def test_neighbors_are_one_span() -> None:
    layout = Layout.of("abcdef", [3, 4, 5, 6, 7, 8], [True, True, False, True, False, True], 2, 4)
    assert layout.spans == [(0, 7), (12, 18), (25, 33)]
    assert Layout.of("ab", [3, 4], [False, False], 2, 4).spans == []


def test_calls_do_not_grow_with_the_number_of_parameters() -> None:
    """A bucket of many parameters keeps the host as long as one of a matrix and a bias."""
    counts = []
    for names in ("a bias", "a b bias norm", "c bias norm small b a"):
        model = model_of(torch.bfloat16)
        hook = begun(OPTIONS, model)
        buckets: Any = [buckets_of(model, [names], step)[0] for step in range(4)]
        for bucket in buckets[:3]:
            hook(None, bucket)
        calls = 0

        def seen(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

        sys.setprofile(seen)
        try:
            hook(None, buckets[3])
        finally:
            sys.setprofile(None)
        counts.append(calls)
    assert len(set(counts)) == 1
    assert 10 < counts[0] < 40


def test_a_state_that_is_loaded_within_a_step(path: str) -> None:
    """Between a bucket's first pass and its last one: what it remembers goes to where errors are then."""
    model, names = model_of(torch.bfloat16), ["a bias", "b c"]
    whole, hook = (begun(OPTIONS, model) for _ in range(2))
    for one in (whole, hook):
        take(one, model, names, 0)
    wanted = take(whole, model, names, 1)
    buckets: list[Any] = buckets_of(model, names, 1)
    hook(None, buckets[0])
    old = hook.error(model["a"])
    before = old.clone()
    hook.load_state_dict(hook.state_dict())
    hook(None, buckets[1])
    assert same(results(hook, model, buckets), wanted)
    assert torch.equal(old, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_and_leaves_the_other_alone(copied: Any) -> None:
    model, names = model_of(torch.bfloat16), ["a bias", "b c"]
    hook = begun(OPTIONS, model)
    take(hook, model, names, 0)
    hook._sides[torch.device("cuda", 0)] = threading.Lock()  # which cannot be copied, as streams cannot
    other_model, other = copied((model, hook))
    assert not other._sides
    wanted = take(hook, model, names, 1)
    error = hook.error(model["a"]).clone()
    assert same(take(other, other_model, names, 1), wanted)
    take(other, other_model, names, 2)
    assert torch.equal(hook.error(model["a"]), error)
