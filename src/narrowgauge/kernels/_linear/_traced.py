# mypy: disable-error-code="import-not-found,import-untyped"
"""A pass as a compiler sees it: kernels that it launches itself, and torch's operations.

An operator of ours is a Python function to a compiler, which it calls at run time. So while one traces, the pass is
run on stand-ins (`_record.Recorded`), which write down the kernels that it launches and torch's functions that it
calls. The steps are then done with the compiler's tensors: allocations and functions of torch are its own
operations, and each launch is a node of the graph that holds the kernel, its grid, its sizes and its constants.
Inductor generates a launch from it. What was decided from shapes is decided then, while tracing.

A kernel writes to what was allocated and not written before. Compilers have no `enable_fp_fusion=False`: none of
these kernels adds to a product that is not rounded by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from narrowgauge._torch_private import kernel_node, without_modes
from narrowgauge.kernels._launches import BoundLaunch
from narrowgauge.kernels._linear._record import CannotRecord, Recorded, Recorder


def traced(given: Sequence[Tensor | None], run: Callable[..., Sequence[Tensor]]) -> list[Tensor] | None:
    """What a pass returns for a compiler's tensors; None if it does what cannot be written down.

    Args:
        given: what the pass is given, tensors of fixed shapes; None for one that is not there.
        run: the pass.
    """
    try:
        with without_modes():
            recorder = Recorder(given)
            results = run(*recorder.given)
            steps = [(what, rest[1](), rest) if isinstance(what, BoundLaunch) else (what, (), rest)
                     for what, *rest in recorder.steps]  # fmt: skip
    except CannotRecord:
        return None
    trace = _Trace(recorder, given)
    for what, arguments, rest in steps:
        if isinstance(what, BoundLaunch):
            trace.launch(what, arguments)
        else:
            args, kwargs, made = rest
            trace.tensors[made.memory] = trace.call(what, args, kwargs)
    return [trace.read(result) for result in results]


class _Trace:
    """The compiler's tensors, by the number of the memory that a stand-in lies in."""

    def __init__(self, recorder: Recorder, given: Sequence[Tensor | None]) -> None:
        self.recorder = recorder
        self.first = next(tensor for tensor in given if tensor is not None)
        self.tensors: dict[int, Any] = dict(enumerate(given, start=1))
        self.empty: set[int] = set()  # allocated, and not written yet

    def base(self, memory: int) -> Any:
        if memory not in self.tensors:
            wanted = self.recorder.allocated[memory]
            assert wanted is not None
            self.tensors[memory] = self.first.new_empty(wanted[0], dtype=wanted[1])
            self.empty.add(memory)
        return self.tensors[memory]

    def read(self, wanted: Any) -> Any:
        """What an argument or a result stands for."""
        if isinstance(wanted, list):
            return [self.read(each) for each in wanted]
        if not isinstance(wanted, Recorded):
            return wanted
        return self.base(wanted.memory) if wanted.returned_by is None else self.call(*wanted.returned_by)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*map(self.read, args), **{name: self.read(value) for name, value in kwargs.items()})

    def launch(self, launch: BoundLaunch, arguments: tuple[Any, ...]) -> None:
        kernel = launch.launches.kernel
        given: dict[str, Any] = dict(launch.constants)
        blocks, written = {}, {}
        for name, argument in zip(kernel.arg_names, (*arguments, *launch.sizes), strict=False):
            if isinstance(argument, TensorDescriptor):
                blocks[name] = list(argument.block_shape)
                argument = argument.base
            if isinstance(argument, Recorded):
                memory, base = argument.memory, self.base(argument.memory)
                if memory in self.empty:
                    written[name] = memory
                # To others an address is all that counts, and words are written as what they are the bits of.
                argument = self.read(argument) if name in blocks and name not in written else base
            given[name] = argument
        made = kernel_node(_with_options(kernel, **launch.options), launch.three, given, list(written), blocks)
        for name, memory in written.items():
            self.tensors[memory] = made[name]
            self.empty.discard(memory)


@functools.lru_cache(maxsize=256)
def _with_options(kernel: Any, num_warps: int, num_stages: int = 3, enable_fp_fusion: bool = False) -> Any:
    """A kernel with options of the compiler, as a compiler of torch's takes it."""
    config = triton.Config({}, num_warps=num_warps, num_stages=num_stages)
    return triton.autotune(configs=[config], key=[])(kernel)
