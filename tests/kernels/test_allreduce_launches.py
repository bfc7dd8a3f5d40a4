"""Launches of compressed gradients that are found again: the arguments by their names, as at the first launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

import triton

from narrowgauge import formats
from narrowgauge.formats import Coder
from narrowgauge.kernels import _allreduce, _launches
from narrowgauge.kernels._allreduce_key import AllreduceKey, BucketNumbers, Place
from narrowgauge.kernels._launches import CachedKernel

PLACES = [Place(0, 4096, 2048, 0, 11, 0), Place(4096, 700, 512, 2048, 12, 0)]
WIDTH, RANKS = 2560, 2


class Kernel:
    """Writes down launches, by the names of a kernel's arguments: those by Triton, and those past it."""

    def __init__(self, kernel: Any, first: list[Any], found: list[Any]) -> None:
        self.arg_names, self.__name__ = kernel.arg_names, kernel.fn.__name__
        self._first, self._found = first, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **rest: Any) -> Any:
            named = dict(zip(self.arg_names, arguments, strict=False))
            constants = {name: rest[name] for name in self.arg_names if name in rest}
            self._first.append((self.__name__, (*grid, 1, 1)[:3], named | constants))
            return SimpleNamespace(run=self._run, function=None, packed_metadata=None)

        return launch

    def _run(self, one: int, two: int, three: int, stream: int, *rest: Any) -> None:
        given = rest[5:]
        self._found.append((self.__name__, (one, two, three), dict(zip(self.arg_names, given, strict=True))))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(first=[], found=[])
    driver = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(_launches, "current_device", lambda: -1)  # as tensors of the CPU say
    for name in ("encode", "add", "find_nonfinite", "finish"):
        launches = CachedKernel(Kernel(getattr(_allreduce, name), found.first, found.found))
        launches.interpreted = False
        monkeypatch.setattr(_allreduce, f"_{name.upper()}", launches)
    return found


def of_one_step(bucket: Any, given: dict[str, Tensor | None], step: int) -> None:
    grads, sent, received, summed, total = given.values()
    bucket.encode(grads, sent, step)
    bucket.add(received, summed, total, step)
    bucket.finish(grads, sent, received, total)


@pytest.mark.parametrize(("bits", "memory"), [(8, torch.float32), (4, None)])
def test_a_launch_that_is_found_has_the_arguments_of_the_first(
    told: SimpleNamespace, memory: torch.dtype | None, bits: int
) -> None:
    coder = Coder.of(formats.codebook("dynamic", bits=bits))
    made = _allreduce.TritonAllreduce(AllreduceKey(coder, 256, bits, True, torch.bfloat16, memory))
    bucket = made.bucket(PLACES, BucketNumbers(RANKS, 1, WIDTH, 5 + (9 << 32)), torch.device("cpu"))
    nbytes = 4 * WIDTH // 256 + WIDTH * bits // 8
    given: dict[str, Tensor | None] = {
        "grads": torch.zeros(4796, dtype=torch.bfloat16),
        **{name: torch.zeros((RANKS, nbytes), dtype=torch.uint8) for name in ("sent", "received")},
        "summed": torch.zeros((1, nbytes), dtype=torch.uint8),
        "total": None if memory is None else torch.zeros(WIDTH),
    }
    of_one_step(bucket, given, 3)
    found = ["find_nonfinite"] * (memory is not None)
    assert [name for name, _, _ in told.first] == ["encode", "add", *found, "finish"]
    assert not told.found
    for step in (1, 16, 2**32 - 1):
        told.found.clear()
        of_one_step(bucket, given, step)
        for (name, grid, wanted), (other, its_grid, found) in zip(told.first, told.found, strict=True):
            assert (name, grid) == (other, its_grid)
            assert wanted.keys() == found.keys()
            seen = {
                key: x.data_ptr() if isinstance(x, Tensor) else 0 if x is None else x for key, x in wanted.items()
            }
            if "step" in seen:
                seen["step"] = step if step < 2**31 else step - 2**32  # of 32 bits, with a sign
            assert found == seen
    assert {name: wanted["step"] for name, _, wanted in told.first if "step" in wanted} == {"encode": 3, "add": 3}


def test_a_bucket_off_16_bytes_is_launched_by_triton(told: SimpleNamespace) -> None:
    coder = Coder.of(formats.codebook("dynamic"))
    made = _allreduce.TritonAllreduce(AllreduceKey(coder, 256, 8, False, torch.bfloat16, None))
    bucket = made.bucket(PLACES, BucketNumbers(RANKS, 0, WIDTH, 0), torch.device("cpu"))
    sent = torch.zeros((RANKS, 4 * WIDTH // 256 + WIDTH), dtype=torch.uint8)
    buffer = torch.zeros(4797, dtype=torch.bfloat16)
    for grads in (buffer[:-1], buffer[1:], buffer[:-1]):
        bucket.encode(grads, sent, 0)
    assert len(told.first) == 2
    assert [call["grads"] for _, _, call in told.found] == [buffer.data_ptr()]
