# mypy: disable-error-code="import-not-found,import-untyped"
"""Launches that are like an earlier one, without Triton's way to it.

At every launch Triton binds arguments by name, asks each of them what code depends on, writes the options out as a
key, and compares all global values that the kernel has used: tens of microseconds of the host, more than many of
our kernels take on the device. All of it answers one question, which compiled kernel this is.

- `CachedKernel` remembers the answer under what it depends on: constants, options and the device, types, whether
  addresses and sizes are multiples of 16, and whether sizes are 1.
- `BoundLaunch` is given grid, sizes, constants and options once, and tensors of the same types at every call. It
  asks for the device, and whether all addresses are multiples of 16, as torch's allocations are; where they are not
  it goes the longer way.
- `FixedLaunch` is given its tensors once as well.

All hand the kernel to its launcher as Triton does, without looking up what has not changed. Where a profiler has
set hooks, Triton's own call runs, which builds what hooks receive.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from narrowgauge.kernels._triton import launches_directly

# The index of the current device.
current_device: Callable[[], int] = torch._C._cuda_getDevice if torch.cuda._is_compiled() else lambda: -1


def hooked() -> bool:
    """Whether somebody has set a hook on launches; Triton's own hooks are chains of calls, set up empty."""
    hooks = knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class Describer:
    """Descriptors of contiguous matrices of one shape and dtype, for the engine that copies blocks of them (TMA).

    Triton's launcher has the driver encode each descriptor at each launch. An encoded one says where a matrix is
    and how it lies, nothing else: it holds for every matrix of this shape at that address, and is kept.

    Args:
        matrix: one of them, with rows of a multiple of 16 bytes, at an address that is one; checked.
        block: sides of what is copied at once.
    """

    _MOST = 4096  # addresses; a training has the same few at every step

    def __init__(self, matrix: Tensor, block: list[int]) -> None:
        self._fields = dict(vars(TensorDescriptor.from_tensor(matrix, block)), base=None)
        self._meta: Mapping[str, Any] | None = None
        self._encoded: dict[int, tuple[Any, ...]] = {}

    def __call__(self, matrix: Any) -> Any:
        """The descriptor of a matrix as Triton takes it."""
        made = object.__new__(TensorDescriptor)
        made.__dict__.update(self._fields, base=matrix)
        return made

    def encoded(self, address: int, meta: Mapping[str, Any]) -> tuple[Any, ...]:
        """That of the matrix at an address as the function in C takes it; `meta` is a compiled kernel's word on
        it.
        """
        if meta is not self._meta or len(self._encoded) >= self._MOST:
            self._meta, self._encoded = meta, {}
        found = self._encoded.get(address)
        if found is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg  # of the version that `_encoder` knows

            found = self._encoded[address] = tuple(make_tensordesc_arg(self(_At(address)), meta))
        return found


class _At:
    """What is asked of a matrix to encode its descriptor."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


def _encoder(launch: Any) -> tuple[Any, list[Mapping[str, Any]]] | None:
    """Of a launcher that encodes descriptors: the function in C that it calls, and what it knows of each."""
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "launcher" not in names or "tensordesc_meta" not in names:
        return None
    found = dict(zip(names, (cell.cell_contents for cell in launch.__closure__), strict=True))
    metas = found["tensordesc_meta"]
    return None if None in metas else (found["launcher"], metas)


class CompiledKernel:
    """A compiled kernel on one device, ready to be launched.

    Args:
        kernel: what Triton has compiled, and launched before on the current device.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.stream = triton.runtime.driver.active.get_current_stream
        # What is called with the grid, the stream, `between` and then the kernel's arguments.
        self.run = launcher = kernel.run
        self.between: tuple[Any, ...] = kernel.function, kernel.packed_metadata, None, None, None
        # What launches with encoded descriptors, and what the driver needs of each beside its matrix.
        self.encoded: tuple[Any, list[Mapping[str, Any]]] | None = None
        direct = launches_directly() and type(launcher).__name__ == "CudaLauncher"
        if direct and not (launcher.global_scratch_size or launcher.profile_scratch_size):
            # What the launcher does where no memory is to be had for the kernel is to call this.
            self.run, self.encoded = launcher.launch, _encoder(launcher.launch)
            flags = launcher.launch_cooperative_grid, launcher.launch_pdl
            self.between = (kernel.function, *flags, None, None, kernel.packed_metadata, None, None, None)

    def __call__(
        self,
        device: int,
        grid: tuple[int, int, int],
        given: tuple[Any, ...],
        describers: tuple[Describer, ...] = (),
        matrices: tuple[Tensor, ...] = (),
    ) -> None:
        """Launch on the current stream of the current device.

        Args:
            device: its index.
            grid: programs along three sides.
            given: addresses, numbers and constants: all arguments of the kernel.
            describers, matrices: of descriptors that come before `given`, if any.
        """
        run, by_triton = self.run, hooked()
        if describers:
            described: tuple[Any, ...] = ()
            if by_triton or self.encoded is None:
                described = tuple(describer(matrix) for describer, matrix in zip(describers, matrices, strict=True))
            else:
                run, metas = self.encoded
                for describer, matrix, meta in zip(describers, matrices, metas, strict=True):
                    described += describer.encoded(matrix.data_ptr(), meta)
            given = described + given
        if by_triton:
            self.kernel[grid](*given)
        else:
            run(*grid, self.stream(device), *self.between, *given)


class CachedKernel:
    """A kernel, and what its launches were compiled to.

    Args:
        kernel: a function under `triton.jit` whose constants come after all other arguments.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.interpreted = bool(knobs.runtime.interpret)
        self._known: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> CompiledKernel | None:
        """Launch on the current device and stream.

        Args:
            grid: programs along one to three sides.
            arguments: tensors, whole numbers, descriptors or None, in the order of the kernel's arguments.
            constants: the rest of its arguments, all of them.
            options: of the compiler.

        Returns:
            The compiled kernel that was launched, None in the interpreter.
        """
        if self.interpreted:
            self._check(len(arguments), list(constants))
            self.kernel[grid](*arguments, **constants, **options)
            return None
        given, kinds = zip(*map(_kind, arguments), strict=True) if arguments else ((), ())
        fixed, device = tuple(constants.values()), current_device()
        key = (device, *kinds, fixed, tuple(options.items()))
        found = self._known.get(key)
        if found is None:
            self._check(len(arguments), list(constants))
            made = self.kernel[grid](*arguments, **constants, **options)
            # Triton hands out what it has compiled; where it compiles beside, that is still to come.
            found = self._known[key] = CompiledKernel(made.result() if hasattr(made, "result") else made)
        else:
            found(device, _three(grid), (*given, *fixed))
        return found

    def _check(self, count: int, constants: list[str]) -> None:
        """Refuse constants in another order than the kernel's: what is compiled takes them by their places."""
        wanted = list(self.kernel.arg_names)[count:]
        if constants != wanted:
            name = self.kernel.__name__
            raise TypeError(f"constants of {name} must be {wanted} after {count} arguments, got {constants}")


class FixedLaunch:
    """A launch again and again on the same tensors, which stay where they are."""

    def __init__(
        self,
        launches: CachedKernel,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.launches, self.grid, self.arguments = launches, grid, arguments
        self.constants, self.options = constants, options
        self._given = (*(_kind(argument)[0] for argument in arguments), *constants.values())
        self._ready: tuple[int, CompiledKernel] | None = None

    def is_of(self, launches: CachedKernel, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> bool:
        """Whether it is the launch of a kernel on these very tensors."""
        same = self.launches is launches and self.grid == grid and len(self.arguments) == len(arguments)
        return same and all(map(is_, self.arguments, arguments))

    def __call__(self) -> None:
        """Launch on the current device and stream."""
        # In the interpreter there need be no driver to ask for a device.
        device = -1 if self.launches.interpreted else current_device()
        if self._ready is not None and self._ready[0] == device:
            self._ready[1](device, _three(self.grid), self._given)
            return
        found = self.launches(self.grid, self.arguments, self.constants, self.options)
        self._ready = None if found is None else (device, found)


class BoundLaunch:
    """Launches of a kernel with one grid, one set of sizes, constants and options, on tensors of the same types.

    Args:
        launches: the kernel.
        grid: programs along one to three sides.
        sizes: whole numbers, which come after the tensors in the kernel's arguments.
        constants: the rest of its arguments, but for numbers that change from call to call.
        options: of the compiler.
    """

    def __init__(
        self,
        launches: CachedKernel,
        grid: tuple[int, ...],
        sizes: tuple[int, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
        describers: tuple[Describer, ...] = (),
    ) -> None:
        self.launches, self.grid, self.sizes = launches, grid, sizes
        self.constants, self.options = constants, options
        self.describers = describers  # of the descriptors that come before the tensors
        self.three, self.rest = _three(grid), (*sizes, *constants.values())
        self._values = tuple(constants.values())
        self._ready: dict[int, CompiledKernel] = {}

    def __call__(
        self,
        device: int,
        addresses: tuple[int, ...],
        arguments: Callable[[], tuple[Any, ...]],
        matrices: tuple[Tensor, ...] = (),
        numbers: tuple[int, ...] = (),
    ) -> None:
        """Launch on a device and its current stream.

        Args:
            device: the index of the tensors' device.
            addresses: of the tensors, 0 for one that is not there. Which are there is the same at every call.
            arguments: makes the tensors themselves (None for one that is not there), of the same types at every
                call, after their descriptors if there are any; called where addresses do not do.
            matrices: of the descriptors.
            numbers: of 32 bits, which come after the sizes; the kernel does not specialize on them.
        """
        ready, bits = self._ready.get(device), 0
        for address in addresses:
            bits |= address
        if ready is None or bits & 15:
            self._find(device, bits & 15 == 0, addresses, arguments, matrices, numbers)
        elif current_device() != device:
            with torch.cuda.device(device):
                self(device, addresses, arguments, matrices, numbers)
        else:
            rest = self.sizes + numbers + self._values if numbers else self.rest
            ready(device, self.three, addresses + rest, self.describers, matrices)

    def ready(self, device: int) -> CompiledKernel | None:
        """The kernel of aligned addresses, if it has run on a device."""
        return self._ready.get(device)

    def _find(
        self, device: Any, aligned: bool, addresses: tuple[int, ...],
        arguments: Callable[[], tuple[Any, ...]], matrices: tuple[Tensor, ...], numbers: tuple[int, ...],
    ) -> None:  # fmt: skip
        """Launch by the tensors themselves, and remember the kernel where it is the one of aligned addresses."""
        if not isinstance(device, int):  # a `_linear._record.Recorder`, the device of stand-in tensors
            device.record(self, addresses, arguments, matrices)
            return
        given = (*arguments(), *self.sizes, *numbers)
        if device < 0 or current_device() == device:
            found = self.launches(self.grid, given, self.constants, self.options)
        else:
            with torch.cuda.device(device):
                found = self.launches(self.grid, given, self.constants, self.options)
        if found is not None and aligned:
            self._ready[device] = found


def _three(grid: tuple[int, ...]) -> tuple[int, int, int]:
    one, two, three = (*grid, 1, 1)[:3]
    return one, two, three


def _kind(argument: Any) -> tuple[Any, Any]:
    """An argument as a compiled kernel takes it, and what the code depends on."""
    if isinstance(argument, Tensor):
        address = argument.data_ptr()
        return address, (argument.dtype, address % 16 == 0)
    if isinstance(argument, int):
        return argument, (argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31)
    if argument is None:
        return None, None
    # A descriptor of the copy engine: its blocks are part of its type.
    return argument, (type(argument), argument.base.dtype, tuple(argument.block_shape))


def module_of(source: str, name: str, space: Mapping[str, Any], of: str) -> dict[str, Any]:
    """All names of a text, those that it may use among them.

    Triton reads the source of what it compiles through `inspect`, which asks `linecache`: the text is entered there
    under the name of a file that does not exist.

    Args:
        source: the text.
        name: of what it is for.
        space: the names that the text may use.
        of: the module that has it made, for Triton's messages.
    """
    file = f"<narrowgauge {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    found = {"__name__": f"{of}.{name}", **space}
    exec(compile(source, file, "exec"), found)
    return found
