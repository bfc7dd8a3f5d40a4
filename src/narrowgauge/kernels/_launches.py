# mypy: disable-error-code="import-not-found,import-untyped"
"""Launches that are like an earlier one, without Triton's way to it.

At every launch Triton binds arguments by name, asks each of them what code depends on, writes the options out as a
key, and compares all global values that the kernel has used: tens of microseconds of the host, more than many of
our kernels take on the device. All of it answers one question, which compiled kernel this is. Here the answer is
remembered under what it depends on: constants, options and the device, types, whether addresses and sizes are
multiples of 16, and whether sizes are 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton import knobs


class Launches:
    """A kernel, and what became of its launches.

    Args:
        kernel: a function under `triton.jit` whose constants come after all other arguments.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._known: dict[tuple[Any, ...], Any] = {}
        self._interpreted = bool(knobs.runtime.interpret)

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Launch on the current device and stream.

        Args:
            grid: programs along one to three sides.
            arguments: tensors, whole numbers, descriptors or None, in the order of the kernel's arguments.
            constants: the rest of its arguments, all of them.
            options: of the compiler.
        """
        if self._interpreted:
            self._check(len(arguments), list(constants))
            self.kernel[grid](*arguments, **constants, **options)
            return
        given, kinds = [], []
        for argument in arguments:
            value, kind = _kind(argument)
            given.append(value)
            kinds.append(kind)
        fixed = tuple(constants.values())
        key = (torch.cuda.current_device(), *kinds, fixed, tuple(options.items()))
        found = self._known.get(key)
        if found is None:
            self._check(len(arguments), list(constants))
            found = self.kernel[grid](*arguments, **constants, **options)
            # Triton hands out what it has compiled; where it compiles beside, that is still to come.
            self._known[key] = found.result() if hasattr(found, "result") else found
        else:
            found[(*grid, 1, 1)[:3]](*given, *fixed)

    def _check(self, count: int, constants: list[str]) -> None:
        """Refuse constants in another order than the kernel's: what is compiled takes them by their places."""
        wanted = list(self.kernel.arg_names)[count:]
        if constants != wanted:
            raise TypeError(
                f"{self.kernel.__name__}: got constants {constants}, takes {wanted} after {count} arguments"
            )


def _kind(argument: Any) -> tuple[Any, Any]:
    """An argument as it is handed to a compiled kernel, and what of it code depends on."""
    if isinstance(argument, Tensor):
        address = argument.data_ptr()
        return address, (argument.dtype, address % 16 == 0)
    if isinstance(argument, int):
        return argument, (argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31)
    if argument is None:
        return None, None
    # A descriptor of the copy engine: its blocks are part of its type.
    return argument, (type(argument), argument.base.dtype, tuple(argument.block_shape))
