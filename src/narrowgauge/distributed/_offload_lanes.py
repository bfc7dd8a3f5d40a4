"""What travels between a GPU and the host: memory that the GPU can reach, and a stream for each direction.

A copy runs beside computation if it is on a stream of its own and the host's side of it is page-locked ("pinned").
torch rounds each pinned allocation up to a power of two, so tensors share large ones here.

With a CPU in the GPU's place a copy is made where it is asked for, and there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 128  # bytes: a cache line, twice
_CHUNK = 1 << 30  # bytes of a shared allocation


class Lane:
    """The two streams of one device.

    Args:
        device: a GPU, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, there: Tensor, here: Tensor) -> torch.cuda.Event | None:
        """Start a copy to the host, behind what the device has been given to do until now.

        Args:
            there: on the device. Its memory may be given back at once.
            here: of its shape, in pinned memory.

        Returns:
            What to wait for before `here` is read; None if that is done.
        """
        if self._streams is None:
            here.copy_(there)
            return None
        inward = self._streams[0]
        inward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(inward):
            here.copy_(there, non_blocking=True)
            there.record_stream(inward)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(inward)
        return event

    def begin(self) -> None:
        """What is sent from now on waits for what the device has been given to do, which may read its target."""
        if self._streams is not None:
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))

    def send(self, here: Tensor, there: Tensor) -> None:
        """Start a copy to the device; the host goes on."""
        if self._streams is None:
            there.copy_(here)
            return
        with torch.cuda.stream(self._streams[1]):
            there.copy_(here, non_blocking=True)

    def end(self) -> None:
        """What the device is given to do from now on waits for what was sent."""
        if self._streams is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[1])

    def settle(self) -> None:
        """Wait until all that was sent is there, so that its source may be written."""
        if self._streams is not None:
            self._streams[1].synchronize()


def host_tensors(like: Sequence[Tensor], pinned: bool) -> list[Tensor]:
    """Tensors on the CPU of the same shapes and dtypes, contiguous and with nothing in them yet.

    Args:
        like: any tensors.
        pinned: whether in page-locked memory.
    """
    made: list[Tensor] = []
    left = sum(map(_room, like))
    chunk, used = _empty(0, pinned=False), 0
    for tensor in like:
        room = _room(tensor)
        if used + room > chunk.numel():
            # torch would round up to the power of two, and give the rest to nobody.
            size = max(room, min(_CHUNK, 1 << max(left - 1, 0).bit_length()))
            chunk, used = _empty(size, pinned), 0
        nbytes = tensor.numel() * tensor.dtype.itemsize
        made.append(chunk[used : used + nbytes].view(tensor.dtype).view(tensor.shape))
        used += room
        left -= room
    return made


def _room(tensor: Tensor) -> int:
    """Bytes that a tensor takes, padding behind it included."""
    return -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _empty(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
