"""When memory is taken and given back during a step: a record of storages' lives, and the peak of it.

A training step's memory is not a sum but a maximum. Activations grow through the forward pass, the loss works
on the logits in fp32, gradients grow while activations go, and the worst moment may be any of them. So the
operations of one real step are run on the meta device, which has shapes and no memory, and each new storage is
noted with the moment it appears and the moment its last user lets it go. What comes out is what a caching
allocator would be asked for, in that order, and the peak needs no formula for any architecture.

Sizes are rounded up to 512 bytes, as CUDA's caching allocator does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GRAIN = 512  # bytes; c10's kMinBlockSize

# Kinds of storages, by the part of the step that allocated them; gradients of parameters are a kind of their own.
Part = Literal["activations", "loss", "backward", "gradients"]
PARTS: tuple[Part, ...] = ("activations", "loss", "backward", "gradients")


def rounded(nbytes: int) -> int:
    """Bytes that the allocator takes for a storage."""
    return -(-nbytes // GRAIN) * GRAIN


@dataclass
class _Life:
    """A storage: how many bytes, which part of the step took it, and from which event to which it lived."""

    nbytes: int
    part: Part
    born: int
    died: int | None = None


@dataclass(frozen=True)
class Moment:
    """The bytes alive at one moment of a step."""

    where: str  # the part of the step that ran then
    live: Mapping[Part, int]  # by what they are

    @property
    def total(self) -> int:
        return sum(self.live.values())


@dataclass
class Timeline:
    """The lives of all storages that a step allocates, and the events at which its parts began."""

    lives: list[_Life] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    _clock: int = 0

    def born(self, nbytes: int, part: Part) -> _Life:
        self._clock += 1
        life = _Life(rounded(nbytes), part, self._clock)
        self.lives.append(life)
        return life

    def died(self, life: _Life) -> None:
        self._clock += 1
        life.died = self._clock

    def passing(self, nbytes: int, part: Part) -> None:
        """Memory that one operation takes for itself and gives back."""
        if nbytes:
            self.died(self.born(nbytes, part))

    def mark(self, where: str) -> None:
        """Begin a part of the step."""
        self._clock += 1
        self.marks.append((self._clock, where))

    def at(self, where: str) -> Moment:
        """The bytes alive when a part of the step begins."""
        when = next(clock for clock, name in self.marks if name == where)
        alive = [life for life in self.lives if life.born < when and (life.died is None or life.died > when)]
        return Moment(where, {part: sum(x.nbytes for x in alive if x.part == part) for part in PARTS})

    def peak(self, counted: Iterable[Part] = PARTS) -> Moment:
        """The worst moment, by the bytes of some parts; `live` has all of them."""
        counted = tuple(counted)
        events = [(x.born, x.part, x.nbytes) for x in self.lives]
        events += [(x.died, x.part, -x.nbytes) for x in self.lives if x.died is not None]
        live, worst, best, when = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0), -1, 0
        for clock, part, nbytes in sorted(events):
            live[part] += nbytes
            total = sum(live[part] for part in counted)
            if total > best:
                best, worst, when = total, dict(live), clock
        where = [name for clock, name in self.marks if clock <= when]
        return Moment(where[-1] if where else "forward", worst)


# Bytes that operations take in addition to their results, by operation: functions of its arguments.
Workspaces = Mapping[Any, Callable[..., int]]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every storage that operations make while it is on, but for those of `known` tensors."""

    def __init__(self, known: Iterable[Tensor], workspaces: Workspaces) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.timeline = Timeline()
        self.part: Part = "activations"
        self._workspaces = workspaces
        self._lives: dict[int, tuple[Any, _Life | None]] = {}
        self._last: tuple[_Life, list[int]] | None = None
        for tensor in known:
            self._lives[_key(tensor)] = (tensor.untyped_storage(), None)

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Within, allocations count as this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def is_gradient(self, gradient: Tensor) -> None:
        """Count a tensor's allocation as a gradient."""
        life = self._lives.get(_key(gradient), (None, None))[1]
        if life is not None:
            life.part = "gradients"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value(args[0])
        self._last = None
        workspace = self._workspaces.get(func)
        if workspace is not None:
            self.timeline.passing(workspace(*args, **kwargs), self.part)
        results = func(*args, **kwargs)
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, Tensor):
                self._record(result)
        if func is torch.ops.aten.add.Tensor and self.part == "backward":
            self._follow_sum(results, args)
        return results

    def _record(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._lives:
            return
        storage = tensor.untyped_storage()
        life = self.timeline.born(storage.nbytes(), self.part)

        def gone(_: Any) -> None:
            del self._lives[key]
            self.timeline.died(life)
            self._replaced(life)

        self._lives[key] = (weakref.ref(storage, gone), life)

    # Autograd adds gradients of one tensor in place, except under a mode, where it makes a new one for each sum and
    # drops the old one at once: then the sum is counted in the old one's place.

    def _follow_sum(self, total: Tensor, args: tuple[Any, ...]) -> None:
        life = self._lives[_key(total)][1]
        old = [self._lives[_key(x)][1] for x in args[:2] if isinstance(x, Tensor) and _key(x) in self._lives]
        if life is not None:
            self._last = life, [id(x) for x in old if x is not None and x.nbytes == life.nbytes]

    def _replaced(self, life: _Life) -> None:
        if self._last is None or id(life) not in self._last[1] or life.died is None:
            return
        successor, self._last = self._last[0], None
        life.died, successor.born = successor.born, life.died


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _value(tensor: Tensor) -> bool:
    """The value of a truth value on the meta device: True.

    Models read masks to learn whether nothing is padded, or each row is one text, which holds in ordinary training.
    """
    if tensor.dtype != torch.bool:
        raise ValueError(
            "model must have a step whose memory does not depend on values, got one that reads a number of "
            f"{tensor.dtype} from the device"
        )
    return True
