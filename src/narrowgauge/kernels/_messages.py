# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Passes of compressed gradients on a GPU: how `_message_kernels` are launched."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from narrowgauge.kernels import _message_kernels as kernels
from narrowgauge.kernels._c_library import Unavailable
from narrowgauge.kernels._launches import Launches
from narrowgauge.kernels._message_kind import Kind, Numbers, Place
from narrowgauge.kernels._tables import sent as sent_once
from narrowgauge.kernels._triton import instructions

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Elements a program, eight a thread: 16 bytes of bf16. A warp then has blocks of 256 to itself.
_TILE, _EACH, _MOST_WARPS = 1024, 256, 16
_SCALES = 1024  # a program, where only those are read

_ENCODE, _ADD, _LOOK, _FINISH = map(Launches, (kernels.encode, kernels.add, kernels.look, kernels.finish))


class TritonMessages:
    """The three passes for a kind of messages; see `_c_messages.CMessages`, whose methods these are.

    Raises:
        Unavailable: if there are no kernels of this kind.
    """

    def __init__(self, kind: Kind) -> None:
        refused = kind.refused()
        if refused is not None:
            raise Unavailable(refused)
        self._kind, table = kind, kind.table
        size = triton.next_power_of_2(kind.block)
        rows = max(1, _TILE // size)
        self._unit = rows
        self._tile = {"BLOCK": kind.block, "SIZE": size, "ROWS": rows, "BITS": kind.bits}
        self._coding = {
            "FIRST": -1 if table is None else table.first, "ZERO": 0 if table is None else table.zero,
            "ABSOLUTE": kind.coder.lowest == -1, "STOCHASTIC": kind.stochastic, "COUNT": len(kind.coder.values),
        }  # fmt: skip
        warps = min(_MOST_WARPS, max(1, size * rows // _EACH))
        # Said or not, none needs more; unsaid, the compiler has spilled one in a kernel that takes 56.
        most = {"maxnreg": 128} if instructions()[0] else {}  # other compilers know no such option
        self._options = {"num_warps": warps, "enable_fp_fusion": False, **most}
        self._grad, self._memory = _NAMES[kind.dtype], "" if kind.memory is None else _NAMES[kind.memory]

    def encode(self, places: Sequence[Place], numbers: Numbers, grads: Tensor, sent: Tensor) -> None:
        device = sent.device
        table, owners = self._placed(places, numbers.ranks, self._unit, device)
        constants = {**self._tile, **self._coding, **self._kinds(places)}
        given = (table, owners, _as_words(grads), *self._message(sent), *self._codebook(device))
        self._launch(_ENCODE, owners, (*given, *self._sizes(numbers), *_chance(numbers)), constants)

    def add(
        self, places: Sequence[Place], numbers: Numbers, received: Tensor, sent: Tensor, total: Tensor | None
    ) -> None:
        device = sent.device
        table, owners = self._placed(places, 1, self._unit, device)
        constants = {**self._tile, **self._coding, "TOTAL": total is not None}
        given = (table, owners, *self._message(received), *self._message(sent), total, *self._codebook(device))
        self._launch(_ADD, owners, (*given, *self._sizes(numbers), *_chance(numbers)), constants)

    def finish(
        self, places: Sequence[Place], numbers: Numbers, grads: Tensor, sent: Tensor, received: Tensor,
        total: Tensor | None,
    ) -> None:  # fmt: skip
        device, flags = sent.device, None
        kind, (pitch, codes_at) = self._kind, self._sizes(numbers)
        codes, halves = self._message(received)
        if self._memory:
            flags = torch.zeros(len(places), dtype=torch.int32, device=device)
            table, owners = self._placed(places, numbers.ranks, _SCALES, device)
            constants = {"BLOCK": kind.block, "BITS": kind.bits, "GRAD": self._grad, "MANY": _SCALES}
            self._launch(_LOOK, owners, (table, owners, halves, flags, pitch, numbers.ranks), constants)
        table, owners = self._placed(places, numbers.ranks, self._unit, device)
        given = (table, owners, _as_words(grads), *self._message(sent), codes, halves, total, flags)
        values = self._codebook(device)[0]
        sizes = pitch, codes_at, numbers.ranks, numbers.rank
        self._launch(_FINISH, owners, (*given, values, *sizes), {**self._tile, **self._kinds(places)})

    def _launch(
        self, launches: Launches, owners: Tensor, given: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        with torch.cuda.device_of(owners):  # Triton launches on the current device
            launches((owners.numel(),), given, constants, self._options)

    def _placed(
        self, places: Sequence[Place], ranks: int, blocks: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The table of places, and whose each program is, which takes so many blocks of so many shards."""
        counts = tuple(-(-place.width // self._kind.block * ranks // blocks) for place in places)
        firsts = np.cumsum(counts) - counts
        rows = [(*place, first) for place, first in zip(places, firsts.tolist(), strict=True)]
        return sent_once(np.array(rows, dtype=np.int64), device), _owners(counts, device)

    def _kinds(self, places: Sequence[Place]) -> dict[str, Any]:
        aligned = all(place.begin % 8 == 0 and place.memory % 16 == 0 for place in places)
        return {"GRAD": self._grad, "MEMORY": self._memory, "ALIGNED": aligned}

    def _message(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Messages by words of four codes, and by halves of scales."""
        flat = messages.view(-1)
        halves = flat.view(torch.int16)
        return flat.view(torch.int32) if self._kind.bits == 8 else halves, halves

    def _sizes(self, numbers: Numbers) -> tuple[int, int]:
        """Of a message, and of its scales, in words of four codes."""
        scales = 4 * (numbers.width // self._kind.block)
        word = self._kind.bits // 2
        return (scales + numbers.width * self._kind.bits // 8) // word, scales // word

    def _codebook(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return _codebook(self._kind, device)


@functools.lru_cache(maxsize=64)
def _codebook(kind: Kind, device: torch.device) -> tuple[Tensor, Tensor]:
    """What codes mean, and what finds them: a table's cells or boundaries."""
    found = kind.boundaries if kind.table is None else kind.table.cells.view(np.int32)
    with torch.inference_mode(False):
        return torch.from_numpy(kind.values[:256].copy()).to(device), torch.from_numpy(found).to(device)


@functools.lru_cache(maxsize=256)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return sent_once(np.repeat(np.arange(len(counts), dtype=np.int32), counts), device)


def _chance(numbers: Numbers) -> tuple[int, int, int, int, int]:
    """What random numbers depend on, as signed numbers of 32 bits."""
    return (
        numbers.ranks, numbers.rank, _signed(numbers.step), _signed(numbers.seed), _signed(numbers.seed >> 32),
    )  # fmt: skip


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _as_words(x: Tensor) -> Tensor:
    """A buffer as kernels load it: 16 bits as integers."""
    return x if x.dtype == torch.float32 else x.view(torch.int16)
