"""What CPUOffload keeps on the host: a copy of each weight, room for each gradient, and the copies in both
directions.

A copy runs beside computation if it is on its own stream and the host's memory is page-locked ("pinned"). torch
rounds each pinned allocation up to a power of two, so tensors share large ones here.

A gradient is fetched by a hook when autograd has finished it, while the backward pass goes on. Only the step knows
whether it is still the gradient to use: it may have been clipped, unscaled or replaced since. Autograd counts
writes to a tensor, and a gradient whose count has changed is fetched again. So is a weight, when a checkpoint or a
clamp has written to it.

Where parameters are on a CPU, copies are made at once and nothing has to be waited for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from narrowgauge.storage import mark_states, marked_states

_ALIGNMENT = 128  # bytes: two cache lines
_CHUNK = 1 << 30  # bytes of a shared allocation


class CopyStreams:
    """The two streams of one device, a GPU or the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start a copy to pinned memory of the host, after the work that the device has now.

        The source may be freed at once. Returns what to wait for before the target is read, or None.
        """
        if self._streams is None:
            target.copy_(source)
            return None
        inward = self._streams[0]
        inward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(inward):
            target.copy_(source, non_blocking=True)
            source.record_stream(inward)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(inward)
        return event

    def begin(self) -> None:
        """Before sends: wait for earlier ones, whose source may then be written, and let sends wait for the device,
        which may still read their target."""
        if self._streams is not None:
            self._streams[1].synchronize()
            self._streams[1].wait_stream(torch.cuda.current_stream(self._device))

    def send(self, source: Tensor, target: Tensor) -> None:
        """Start a copy to the device; the host goes on."""
        if self._streams is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._streams[1]):
            target.copy_(source, non_blocking=True)

    def end(self) -> None:
        """After sends: later work of the device waits for them."""
        if self._streams is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[1])


def host_tensors(like: Sequence[Tensor], pinned: bool) -> list[Tensor]:
    """Uninitialized contiguous tensors of the same shapes and dtypes on the CPU, page-locked if `pinned`."""
    made: list[Tensor] = []
    left = sum(map(_padded_bytes, like))
    chunk, used = _empty(0, pinned=False), 0
    for tensor in like:
        room = _padded_bytes(tensor)
        if used + room > chunk.numel():
            # torch would round up to the power of two, and waste the rest.
            size = max(room, min(_CHUNK, 1 << max(left - 1, 0).bit_length()))
            chunk, used = _empty(size, pinned), 0
        nbytes = tensor.numel() * tensor.dtype.itemsize
        made.append(chunk[used : used + nbytes].view(tensor.dtype).view(tensor.shape))
        used += room
        left -= room
    return made


def _padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _empty(size: int, pinned: bool) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


class HostParameter:
    """One parameter on the host.

    Attributes:
        p: the parameter.
        host: its copy on the CPU, which the optimizer steps.
        number: when its gradient was fetched; smaller is earlier.
        held: whether the gradient is on the host, and freed on the device.
    """

    def __init__(self, p: Tensor, host: Tensor, gradient: Tensor, streams: CopyStreams) -> None:
        self.p, self.host, self._streams = p, host, streams
        self.number, self.held = 0, False
        self._gradient = gradient
        self._kind = p.device, p.dtype, p.shape
        self._seen: tuple[int, int] | None = None
        self._fetched: tuple[weakref.ref[Tensor], int] | None = None
        self._event: torch.cuda.Event | None = None

    def changed(self) -> str | None:
        """How device, dtype or shape of the parameter have changed since this was made, or None."""
        kind = self.p.device, self.p.dtype, self.p.shape
        if kind == self._kind:
            return None
        was, now = next((a, b) for a, b in zip(self._kind, kind, strict=True) if a != b)
        return f"was {was} and is {now}"

    def update_host(self) -> None:
        """Copy the parameter to the host if something else has written to it."""
        mark = marked_states(self.p)
        if mark is not None and mark != marked_states(self.host):
            mark_states(self.host, mark)
        if self._seen == self._version():
            return
        self.wait()
        event = self._streams.fetch(self.p.detach(), self.host)
        if event is not None:
            event.synchronize()
        self._seen = self._version()

    def _version(self) -> tuple[int, int]:
        return self.p._version, self.p.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.host.nbytes + self._gradient.nbytes

    def fetch(self, grad: Tensor, number: int, *, free: bool) -> None:
        """Start to copy a gradient to the host; with `free` its memory on the device is freed."""
        self.wait()
        if self._gradient.dtype != grad.dtype:
            pinned = self._gradient.is_pinned() if grad.is_cuda else False
            self._gradient = host_tensors([grad], pinned)[0]
        self._event = self._streams.fetch(grad.detach(), self._gradient)
        self.number = number
        self._fetched = weakref.ref(grad), grad._version
        if free:
            self.held, self.p.grad = True, None

    def has(self, grad: Tensor) -> bool:
        """Whether this gradient was fetched and has not been written to since."""
        if self._fetched is None:
            return False
        reference, version = self._fetched
        return reference() is grad and version == grad._version

    def set_gradient(self, there: bool) -> None:
        """Set or clear the gradient of the copy that the optimizer steps."""
        if there and self.host.grad is not self._gradient:
            if self._gradient.dtype != self.host.dtype:
                self.host.grad_dtype = None  # torch's way to allow any
            self.host.grad = self._gradient
        elif not there:
            self.host.grad = None

    def wait(self) -> None:
        """Wait for the gradient."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def send_back(self) -> None:
        """Start to copy the weight to the device."""
        self._streams.send(self.host, self.p)
        self._seen = self._version()

    def forget(self) -> None:
        """Drop the fetched gradient."""
        self._fetched, self.held = None, False


class HostBuffers:
    """All parameters of one optimizer; an `Arrival` of `narrowgauge.optim._verdict`."""

    def __init__(self) -> None:
        self.by_parameter: dict[Tensor, HostParameter] = {}
        self.by_host: dict[Tensor, HostParameter] = {}
        self._streams: dict[torch.device, CopyStreams] = {}
        self._count = 0

    def add(self, ps: Sequence[Tensor]) -> list[Tensor]:
        """Make room for parameters, and copy them to the host; returns the copies."""
        pinned = any(p.is_cuda for p in ps)
        hosts, gradients = host_tensors(ps, pinned), host_tensors(ps, pinned)
        for p, host, gradient in zip(ps, hosts, gradients, strict=True):
            if p.device not in self._streams:
                self._streams[p.device] = CopyStreams(p.device)
            entry = HostParameter(p, host, gradient, self._streams[p.device])
            entry.update_host()
            self.by_parameter[p] = self.by_host[host] = entry
        return hosts

    def drop(self, ps: Sequence[Tensor]) -> None:
        """Forget parameters."""
        for p in ps:
            entry = self.by_parameter.pop(p, None)
            if entry is not None:
                del self.by_host[entry.host]

    def nbytes(self) -> int:
        """Bytes of weights and gradients on the host."""
        return sum(entry.nbytes for entry in self.by_parameter.values())

    def next_number(self) -> int:
        """A larger number each time."""
        self._count += 1
        return self._count

    def begin(self) -> None:
        """Before a step."""
        for streams in self._streams.values():
            streams.begin()

    def end(self) -> None:
        """After a step."""
        for streams in self._streams.values():
            streams.end()
        for entry in self.by_parameter.values():
            entry.forget()

    def send_back(self, hosts: Iterable[Tensor]) -> None:
        """Copy weights to their devices, between two steps."""
        for streams in self._streams.values():
            streams.begin()
        for host in hosts:
            self.by_host[host].send_back()
        for streams in self._streams.values():
            streams.end()

    def order(self, params: Sequence[Tensor]) -> Sequence[int]:
        return sorted(range(len(params)), key=lambda place: self.by_host[params[place]].number)

    def wait(self, param: Tensor) -> None:
        self.by_host[param].wait()

    def done(self, param: Tensor) -> None:
        self.by_host[param].send_back()
