"""What is carried over for one parameter: its gradient to the host, and its weight back.

A gradient is fetched when autograd has finished it, by a hook, while the backward pass goes on. Whether it is what
the step is to take is known at the step only: it may have been clipped since, or unscaled, or another one put in
its place. Autograd counts writes to a tensor, and a gradient whose count has moved is fetched once more. So is a
weight, which the host has a copy of, when somebody else has written to it: a checkpoint, a clamp.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.distributed._offload_lanes import Lane, host_tensors
from narrowgauge.storage import mark_states, marked_states


class Piece:
    """One parameter.

    Attributes:
        p: the parameter.
        host: its copy on the CPU, which the optimizer steps.
        number: when its gradient was fetched; smaller is earlier.
        late: whether the gradient was fetched by the step.
    """

    def __init__(self, p: Tensor, host: Tensor, gradient: Tensor, lane: Lane) -> None:
        self.p, self.host, self.lane = p, host, lane
        self.number, self.late = 0, False
        self._gradient = gradient
        self._kind = p.device, p.dtype, p.shape
        self._seen: tuple[int, int] | None = None
        self._fetched: tuple[weakref.ref[Tensor], int] | None = None
        self._held = False  # the gradient is here, and no longer there
        self._event: torch.cuda.Event | None = None

    def changed(self) -> str | None:
        """What about the parameter is not as it was when this was made, or None."""
        kind = self.p.device, self.p.dtype, self.p.shape
        if kind == self._kind:
            return None
        was, now = next((a, b) for a, b in zip(self._kind, kind, strict=True) if a != b)
        return f"was {was} and is {now}"

    def follow(self) -> None:
        """Bring the host's weight up to date where somebody else has written to the parameter."""
        mark = marked_states(self.p)
        if mark is not None and mark != marked_states(self.host):
            mark_states(self.host, mark)
        if self._seen == self._now():
            return
        self._wait()
        event = self.lane.fetch(self.p.detach(), self.host)
        if event is not None:
            event.synchronize()
        self._seen = self._now()

    def _now(self) -> tuple[int, int]:
        return self.p._version, self.p.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.host.nbytes + self._gradient.nbytes

    @property
    def held(self) -> bool:
        """Whether there is a gradient here that was freed there."""
        return self._held

    def fetch(self, grad: Tensor, number: int, *, free: bool, late: bool) -> None:
        """Start to bring a gradient; with `free` its memory there is given back."""
        self._wait()
        if self._gradient.dtype != grad.dtype:
            pinned = self._gradient.is_pinned() if grad.is_cuda else False
            self._gradient = host_tensors([grad], pinned)[0]
        self._event = self.lane.fetch(grad.detach(), self._gradient)
        self.number, self.late = number, late
        self._fetched = weakref.ref(grad), grad._version
        if free:
            self._held, self.p.grad = True, None

    def has(self, grad: Tensor) -> bool:
        """Whether a gradient is the one that was fetched, with nothing written to it since."""
        if self._fetched is None:
            return False
        reference, version = self._fetched
        return reference() is grad and version == grad._version

    def give(self, has_gradient: bool) -> None:
        """Show the optimizer the gradient, or that there is none."""
        if has_gradient and self.host.grad is not self._gradient:
            if self._gradient.dtype != self.host.dtype:
                self.host.grad_dtype = None  # torch's way to say: any
            self.host.grad = self._gradient
        elif not has_gradient:
            self.host.grad = None

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def arrive(self) -> None:
        """Wait for the gradient."""
        self._wait()

    def leave(self) -> None:
        """Send the weight back."""
        self.lane.send(self.host, self.p)
        self._seen = self._now()

    def forget(self) -> None:
        """What was fetched is of no use any more."""
        self._fetched, self._held = None, False


class Pieces:
    """All parameters of one optimizer; an `Arrival` of `narrowgauge.optim._verdict`."""

    def __init__(self) -> None:
        self.by_parameter: dict[Tensor, Piece] = {}
        self._by_host: dict[Tensor, Piece] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._count = 0

    def add(self, ps: Sequence[Tensor]) -> list[Tensor]:
        """Make room for parameters on the host, and copy them there.

        Returns:
            Their copies.
        """
        pinned = any(p.is_cuda for p in ps)
        hosts, gradients = host_tensors(ps, pinned), host_tensors(ps, pinned)
        for p, host, gradient in zip(ps, hosts, gradients, strict=True):
            if p.device not in self._lanes:
                self._lanes[p.device] = Lane(p.device)
            piece = Piece(p, host, gradient, self._lanes[p.device])
            piece.follow()
            self.by_parameter[p] = self._by_host[host] = piece
        return hosts

    def drop(self, ps: Sequence[Tensor]) -> None:
        """Forget parameters."""
        for p in ps:
            piece = self.by_parameter.pop(p, None)
            if piece is not None:
                del self._by_host[piece.host]

    def parameter(self, host: Tensor) -> Tensor:
        """The parameter that a copy is of."""
        return self._by_host[host].p

    def nbytes(self) -> int:
        """Bytes of weights and gradients on the host."""
        return sum(piece.nbytes for piece in self.by_parameter.values())

    def next_number(self) -> int:
        """A larger number each time."""
        self._count += 1
        return self._count

    def begin(self) -> None:
        """Before a step."""
        for lane in self._lanes.values():
            lane.settle()
            lane.begin()

    def end(self) -> None:
        """After a step."""
        for lane in self._lanes.values():
            lane.end()
        for piece in self.by_parameter.values():
            piece.forget()

    def order(self, ps: Sequence[Tensor]) -> Sequence[int]:
        return sorted(range(len(ps)), key=lambda place: self._by_host[ps[place]].number)

    def wait(self, p: Tensor) -> None:
        self._by_host[p].arrive()

    def done(self, p: Tensor) -> None:
        self._by_host[p].leave()


def refuse_parameter(name: str, p: Tensor) -> None:
    """Refuse a parameter that cannot be carried.

    Raises:
        ValueError: naming it.
    """
    if hasattr(p, "to_local"):
        raise ValueError(
            f"params: {name} is a DTensor, takes whole tensors; with fully_shard(…, offload_policy="
            "CPUOffloadPolicy()) shards are on the CPU, and every optimizer steps them there"
        )
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"params: {name} is on {p.device}, takes CUDA devices and the CPU")
