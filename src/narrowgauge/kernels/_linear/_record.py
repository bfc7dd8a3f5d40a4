# mypy: disable-error-code="import-not-found,import-untyped"
"""A pass through a layer, recorded once and played again with other tensors.

A pass of small matrices is bound by the host: it asks a hundred small questions, of shapes, dtypes, devices, which
launch is the right one, and allocates a dozen tensors, and the answers are the same every time that operands look
alike. So a pass that was run before is run once more on stand-ins (`Recorded`). They have the shapes of tensors
but no memory, and write down what is done to them: which kernels are launched on which of them, and which of
torch's functions are called. The result is a `Program`. It allocates what the pass returns and, as one piece, all
that lives no longer than the pass; then it launches the same kernels on the same places, with the same results, bit
for bit. The caller gives it tensors of the shapes, strides and dtypes that were recorded; it checks addresses
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from narrowgauge.kernels import _launches
from narrowgauge.kernels._launches import BoundLaunch, CompiledKernel, hooked

# An address of a stand-in is the number of its memory, from 1, this far up; no tensor is as long.
_SHIFT = 48
# Pieces of the memory that a pass keeps to itself begin at multiples of this, as torch's allocations do at least.
_ALIGNED = 256
# What is answered from the stand-in itself.
_ASKED = frozenset({
    "dim", "element_size", "is_contiguous", "is_floating_point", "is_neg", "numel", "size", "storage_offset",
    "stride", "__get__",
})  # fmt: skip


class CannotRecord(Exception):
    """A pass has done what a program cannot do again."""


class Recorded(Tensor):
    """A stand-in for a tensor: its shape, strides and dtype, and which memory it lies in."""

    recorder: Recorder
    memory: int  # its number
    twin: Tensor  # on the meta device, looks the same
    returned_by: (
        tuple[Any, tuple[Any, ...], dict[str, Any]] | None
    )  # the function that returned it, if it is a view

    @staticmethod
    def __new__(cls, recorder: Recorder, memory: int, twin: Tensor, returned_by: Any = None) -> Recorded:
        made: Recorded = Tensor._make_wrapper_subclass(
            cls, twin.shape, twin.stride(), twin.storage_offset(), dtype=twin.dtype, device=recorder.device
        )
        made.recorder, made.memory, made.twin, made.returned_by = recorder, memory, twin, returned_by
        return made

    def data_ptr(self) -> int:
        """An address that says which memory it is."""
        return self.memory << _SHIFT if self.numel() else 0

    def get_device(self) -> Any:
        """What launches ask first: in place of a device's index, who writes them down."""
        return self.recorder

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        recorder = next((a.recorder for a in _in(args, kwargs)), None)
        if recorder is None or "out" in kwargs or (name.endswith("_") and not name.startswith("_")):
            raise CannotRecord(f"{name}, which writes")
        if name == "new_empty":
            return recorder.allocate(args[1], kwargs.get("dtype", args[0].dtype))
        return recorder.call(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CannotRecord(f"{func}, which goes past torch's functions")


class Recorder:
    """Writes down a pass that is given some tensors, None for those that are not there."""

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        first = next(tensor for tensor in given if tensor is not None)
        self.device, self.index = first.device, first.get_device()
        # Of each memory, from 1: shape and dtype of what is to be allocated, None for what comes from elsewhere.
        self.allocated: list[tuple[tuple[int, ...], torch.dtype] | None] = [None] * (1 + len(given))
        self.steps: list[Any] = []
        self.handed_out: set[int] = set()  # memories that functions of torch, or the caller, get as tensors
        self.given = [
            None if tensor is None else Recorded(self, number, _twin(tensor))
            for number, tensor in enumerate(given, start=1)
        ]

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Recorded:
        """Memory that the pass allocates."""
        self.allocated.append((tuple(shape), dtype))
        return Recorded(self, len(self.allocated) - 1, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def record(
        self, launch: BoundLaunch, addresses: tuple[int, ...], arguments: Callable[[], tuple[Any, ...]],
        matrices: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """A launch, as `BoundLaunch` is called."""
        places = (*(matrix.data_ptr() for matrix in matrices), *addresses)
        if any(at & ((1 << _SHIFT) - 1) for at in places):
            raise CannotRecord("an address within memory")
        self.steps.append((launch, tuple(at >> _SHIFT for at in places), arguments))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch: a view, another tensor, or an answer that is no tensor."""
        of = _in(args, kwargs)
        twins, named = _twins(list(args)), {name: _twins(a) for name, a in kwargs.items()}
        if "device" in named:
            raise CannotRecord(f"{func.__name__} with a device")
        try:
            result = func(*twins, **named)
        except (RuntimeError, TypeError) as error:  # what needs numbers, or mixes a stand-in with a tensor
            raise CannotRecord(f"{func.__name__}: {error}") from error
        if not isinstance(result, Tensor):
            raise CannotRecord(f"{func.__name__}, which returns no tensor")
        for one in of:
            if result is one.twin:
                return one
            if result.untyped_storage()._cdata == one.twin.untyped_storage()._cdata:
                if result.storage_offset():
                    raise CannotRecord(f"{func.__name__}, which returns a part")
                return Recorded(self, one.memory, result, (func, args, kwargs))
        self.handed_out.update(one.memory for one in of)
        self.allocated.append(None)
        made = Recorded(self, len(self.allocated) - 1, _twin(result))
        self.steps.append((func, args, kwargs, made))
        return made


def record(given: Sequence[Tensor | None], run: Callable[..., Sequence[Tensor]]) -> Program | None:
    """What a pass does to the tensors that it is given; None if one of its kernels has not run yet, or it does what
    no program can.
    """
    recorder = Recorder(given)
    try:
        return Program(recorder, run(*recorder.given))
    except CannotRecord:
        return None


class Program:
    """A pass that was recorded: what was written down, and what it has returned."""

    def __init__(self, recorder: Recorder, results: Sequence[Tensor]) -> None:
        self.index = recorder.index
        for result in results:
            if not isinstance(result, Recorded) or result.recorder is not recorder:
                raise CannotRecord("a result from elsewhere")
        apart = recorder.handed_out | {result.memory for result in results}  # type: ignore[attr-defined]
        self.memory = [
            (number, *wanted) for number, wanted in enumerate(recorder.allocated) if wanted and number in apart
        ]
        self.offsets, self.size = _laid_out(recorder, apart)
        self.slots = len(recorder.allocated)  # and one more for what the pass keeps to itself
        self.results = [self._reader(result) for result in results]
        self.steps = [self._step(*step) for step in recorder.steps]

    def __call__(self, *given: Tensor | None) -> list[Tensor] | None:
        """Run the pass. None, with nothing done, if an address is no multiple of 16, the tensors' device is not the
        current one, or a profiler has set hooks.
        """
        tensors: list[Any] = [None, *given]
        bases, first, bits = [0], None, 0
        for tensor in given:
            address = 0
            if tensor is not None:
                first = tensor if first is None else first
                address = tensor.data_ptr()
            bases.append(address)
            bits |= address
        if bits & 15 or hooked() or (self.index >= 0 and _launches.current_device() != self.index):
            return None
        assert first is not None
        more = self.slots + 1 - len(bases)
        tensors += [None] * more
        bases += [0] * more
        for number, shape, dtype in self.memory:
            tensor = tensors[number] = first.new_empty(shape, dtype=dtype)
            bases[number] = tensor.data_ptr()
        if self.size:
            own = tensors[-1] = first.new_empty(self.size, dtype=torch.uint8)
            bases[-1] = own.data_ptr()
        for step in self.steps:
            step(tensors, bases)
        return [read(tensors) for read in self.results]

    def _place(self, memory: int) -> tuple[int, int]:
        """Where a memory is: the number of a tensor, and bytes from its beginning."""
        return (-1, self.offsets[memory]) if memory in self.offsets else (memory, 0)

    def _reader(self, wanted: Any) -> Callable[[list[Any]], Any]:
        """What makes an argument, which may be a list, or a result of the tensors of a pass."""
        if isinstance(wanted, list):
            several = [self._reader(one) for one in wanted]
            return lambda tensors: [read(tensors) for read in several]
        if not isinstance(wanted, Recorded):
            return lambda tensors: wanted
        (number, offset), twin = self._place(wanted.memory), wanted.twin
        shape, stride, dtype = tuple(twin.shape), twin.stride(), twin.dtype

        def read(tensors: list[Any]) -> Tensor:
            tensor: Tensor = tensors[number]
            if tensor.dtype == dtype and not offset:
                if tensor.shape == shape and tensor.stride() == stride:
                    return tensor
                return tensor.as_strided(shape, stride)
            at = tensor.storage_offset() * tensor.element_size() + offset
            found = torch.empty(0, dtype=dtype, device=tensor.device)
            return found.set_(tensor.untyped_storage(), at // found.element_size(), shape, stride)

        return read

    def _step(self, what: Any, *rest: Any) -> Callable[[list[Any], list[int]], None]:
        if isinstance(what, BoundLaunch):
            memories, arguments = rest
            if what.launches.interpreted:
                return self._interpreted(what, arguments())
            ready = what.ready(self.index)
            if ready is None:
                raise CannotRecord("a kernel that has not run yet")
            return _compiled(what, ready, self.index, tuple(map(self._place, memories)))
        args, kwargs, made = rest
        read = [self._reader(a) for a in args]
        named = {name: self._reader(a) for name, a in kwargs.items()}

        def call(tensors: list[Any], bases: list[int]) -> None:
            result = what(*(of(tensors) for of in read), **{name: of(tensors) for name, of in named.items()})
            tensors[made.memory] = result
            bases[made.memory] = result.data_ptr()

        return call

    def _interpreted(
        self, launch: BoundLaunch, arguments: tuple[Any, ...]
    ) -> Callable[[list[Any], list[int]], None]:
        """A launch in the interpreter, which takes tensors."""
        read = [self._reader(a.base if isinstance(a, TensorDescriptor) else a) for a in arguments]

        def run(tensors: list[Any], bases: list[int]) -> None:
            given = [of(tensors) for of in read]
            for at, describer in enumerate(launch.describers):
                given[at] = describer(given[at])
            launch.launches(launch.grid, (*given, *launch.sizes), launch.constants, launch.options)

        return run


def _in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Recorded]:
    """The stand-ins among arguments, those in lists too."""
    each = [*args, *kwargs.values()]
    each += [one for many in each if isinstance(many, list) for one in many]
    return [one for one in each if isinstance(one, Recorded)]


def _twins(of: Any) -> Any:
    if isinstance(of, list):
        return [_twins(one) for one in of]
    return of.twin if isinstance(of, Recorded) else of


def _twin(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _laid_out(recorder: Recorder, apart: set[int]) -> tuple[dict[int, int], int]:
    """Where the memories that a pass keeps to itself begin in one piece, and how many bytes that has."""
    offsets, size = {}, 0
    for number, wanted in enumerate(recorder.allocated):
        if wanted is not None and number not in apart:
            offsets[number] = size
            shape, dtype = wanted
            size += -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
    return offsets, size


def _compiled(
    launch: BoundLaunch, ready: CompiledKernel, device: int, places: tuple[tuple[int, int], ...]
) -> Callable[[list[Any], list[int]], None]:
    """A launch on the current stream, by addresses."""
    run, between, stream, rest, grid = ready.run, ready.between, ready.stream, launch.rest, launch.three
    if not launch.describers:

        def plain(tensors: list[Any], bases: list[int]) -> None:
            run(*grid, stream(device), *between, *[bases[i] + by for i, by in places], *rest)

        return plain
    if ready.encoded is None:
        raise CannotRecord("descriptors that Triton encodes")
    count, describers = len(launch.describers), launch.describers
    run, metas = ready.encoded
    first, places = places[:count], places[count:]

    def described(tensors: list[Any], bases: list[int]) -> None:
        given: tuple[Any, ...] = ()
        for describer, (i, by), of in zip(describers, first, metas, strict=True):
            given += describer.encoded(bases[i] + by, of)
        run(*grid, stream(device), *between, *given, *[bases[i] + by for i, by in places], *rest)

    return described
