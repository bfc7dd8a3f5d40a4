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
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._message_kind import Kind, Numbers, Place, table_of
from narrowgauge.kernels._tables import sent_anew
from narrowgauge.kernels._triton import instructions

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Elements a program, eight a thread: 16 bytes of bf16. A warp then has blocks of 256 to itself.
_TILE, _EACH, _MOST_WARPS = 1024, 256, 16
_SCALES = 1024  # a program, where only those are read

_ENCODE, _ADD, _LOOK, _FINISH = map(CachedKernel, (kernels.encode, kernels.add, kernels.look, kernels.finish))


class TritonMessages:
    """The three passes for a kind of messages; see `_c_messages.CMessages`.

    Raises:
        Unavailable: if there are no kernels of this kind.
    """

    def __init__(self, kind: Kind) -> None:
        refused = kind.refused()
        if refused is not None:
            raise Unavailable(refused)
        self.kind, table = kind, kind.table
        size = triton.next_power_of_2(kind.block)
        rows = max(1, _TILE // size)
        self.unit = rows
        self.tile = {"BLOCK": kind.block, "SIZE": size, "ROWS": rows, "BITS": kind.bits}
        self.coding: dict[str, Any] = {
            "FIRST": -1 if table is None else table.first, "ZERO": 0 if table is None else table.zero,
            "ABSOLUTE": kind.coder.lowest == -1, "STOCHASTIC": kind.stochastic, "COUNT": len(kind.coder.values),
        }  # fmt: skip
        warps = min(_MOST_WARPS, max(1, size * rows // _EACH))
        # Said or not, none needs more; unsaid, the compiler has spilled one in a kernel that takes 56.
        most = {"maxnreg": 128} if instructions()[0] else {}  # other compilers know no such option
        self.options = {"num_warps": warps, "enable_fp_fusion": False, **most}
        self.grad, self.memory = _NAMES[kind.dtype], "" if kind.memory is None else _NAMES[kind.memory]

    def bucket(self, places: Sequence[Place], numbers: Numbers, device: torch.device) -> TritonBucket:
        """See `_c_messages.CMessages.bucket`."""
        return TritonBucket(self, places, numbers, device)


class TritonBucket:
    """The three passes of a bucket; see `_c_messages.CBucket`, whose methods these are.

    A bucket keeps a host as busy as launches of it do, and no more: its tables are on the device, and of arguments
    there are but the addresses of this step's tensors to be found. It is reduced once at a time, on one stream.
    """

    def __init__(
        self, made: TritonMessages, places: Sequence[Place], numbers: Numbers, device: torch.device
    ) -> None:
        kind, ranks = made.kind, numbers.ranks
        self._bits, self._remembers = kind.bits, kind.memory is not None
        self._codebook = _codebook(kind, device)
        self._flags = None
        word = kind.bits // 2
        scales = 4 * (numbers.width // kind.block)
        # Of a message, and of its scales, in words of four codes.
        sizes = (scales + numbers.width * kind.bits // 8) // word, scales // word
        plain = ranks, numbers.rank
        chance = *plain, _signed(numbers.seed), _signed(numbers.seed >> 32)
        aligned = all(place.begin % 8 == 0 and place.memory % 16 == 0 for place in places)
        kinds = {"GRAD": made.grad, "MEMORY": made.memory, "ALIGNED": aligned}
        self._whole = _placed(places, kind.block, ranks, made.unit, device)
        self._shard = _placed(places, kind.block, 1, made.unit, device)
        many, constants, summed = made.tile | made.coding, made.tile | kinds, {"TOTAL": self._remembers}
        grid, options = (self._whole[1].numel(),), made.options
        self._encode = BoundLaunch(_ENCODE, grid, (*sizes, *chance), many | kinds, options)
        grid_of_sum = (self._shard[1].numel(),)
        self._add = BoundLaunch(_ADD, grid_of_sum, (*sizes, *chance), many | summed, options)
        self._finish = BoundLaunch(_FINISH, grid, (*sizes, *plain), constants, options)
        if self._remembers:
            self._scales = _placed(places, kind.block, ranks, _SCALES, device)
            looked = {"BLOCK": kind.block, "BITS": kind.bits, "GRAD": made.grad, "MANY": _SCALES}
            self._look = BoundLaunch(_LOOK, (self._scales[1].numel(),), (sizes[0], ranks), looked, options)
            with torch.inference_mode(False):
                self._flags = torch.empty(len(places), dtype=torch.int32, device=device)

    def encode(self, grads: Tensor, sent: Tensor, step: int) -> None:
        given = *self._whole, grads, sent, sent, *self._codebook
        self._launch(self._encode, given, "  gch  ", (_signed(step),))

    def add(self, received: Tensor, sent: Tensor, total: Tensor | None, step: int) -> None:
        given = *self._shard, received, received, sent, sent, total, self._flags, *self._codebook
        self._launch(self._add, given, "  chch    ", (_signed(step),))

    def finish(self, grads: Tensor, sent: Tensor, received: Tensor, total: Tensor | None) -> None:
        if self._remembers:
            self._launch(self._look, (*self._scales, received, self._flags), "  h ")
        given = *self._whole, grads, sent, sent, received, received, total, self._flags, self._codebook[0]
        self._launch(self._finish, given, "  gchch   ")

    def _launch(
        self, launch: BoundLaunch, given: tuple[Tensor | None, ...], words: str, numbers: tuple[int, ...] = ()
    ) -> None:
        """Launch with tensors, which a letter each says how the kernel takes: see `_as_words`."""
        addresses = tuple([0 if x is None else x.data_ptr() for x in given])
        bits = self._bits

        def arguments() -> tuple[Any, ...]:
            return tuple(_as_words(x, word, bits) for x, word in zip(given, words, strict=True))

        first = given[0]
        launch(-1 if first is None else first.get_device(), addresses, arguments, (), numbers)


def _placed(
    places: Sequence[Place], block: int, ranks: int, blocks: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The table of places, and whose each program is, which takes so many blocks of so many shards."""
    counts = np.array([-(-place.width // block * ranks // blocks) for place in places])
    rows = np.column_stack([table_of(places), np.cumsum(counts) - counts])
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    # Sent by the stream that launches: it is not asked whether another one's have arrived.
    return sent_anew(rows, device), sent_anew(owners, device)


@functools.lru_cache(maxsize=64)
def _codebook(kind: Kind, device: torch.device) -> tuple[Tensor, Tensor]:
    """What codes mean, and what finds them: a table's cells or boundaries."""
    found = kind.boundaries if kind.table is None else kind.table.cells.view(np.int32)
    with torch.inference_mode(False):
        return torch.from_numpy(kind.values.copy()).to(device), torch.from_numpy(found).to(device)


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _as_words(x: Tensor | None, word: str, bits: int) -> Tensor | None:
    """A tensor as kernels load it: gradients (g) of 16 bits as integers, messages by words of four codes (c) or by
    halves of scales (h), anything else as it is."""
    if x is None or word == " " or (word == "g" and x.dtype == torch.float32):
        return x
    if word == "g":
        return x.view(torch.int16)
    return x.view(-1).view(torch.int32 if word == "c" and bits == 8 else torch.int16)
