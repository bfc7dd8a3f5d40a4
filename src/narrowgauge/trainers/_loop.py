"""The training loop of `fit` and of `compare`: its learning rates, its clock, and how torch computes in it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def training_loop(
    numbers: Iterable[int],
    optimizer: Any,
    *,
    rate: Callable[[int], float],
    gradients: Callable[[], Tensor],
    update: Callable[[Tensor], None],
) -> Iterator[tuple[int, Tensor]]:
    """Take one optimizer step for each item that is drawn.

    Args:
        numbers: of the steps.
        optimizer: whose groups get the learning rate, and whose gradients are cleared.
        rate: the learning rate by the number of the step.
        gradients: draws examples, adds their gradients to the parameters', and returns their loss.
        update: takes the optimizer step, or leaves it out, by the loss.

    Yields:
        The number of each finished step and its loss, on the device.
    """

    def step(number: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        optimizer.zero_grad()
        loss = gradients()
        update(loss)
        return loss

    for number in numbers:
        yield number, step(number)  # holds no loss while the next step runs


def now(device: torch.device) -> float:
    """Seconds, once a GPU has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock:
    """Seconds of training, without pauses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start, self._paused = now(device), 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        end = now(self._device)
        seconds, self._start, self._paused = end - self._start - self._paused, end, 0.0
        return max(seconds, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count."""
        before = now(self._device)
        yield
        self._paused += now(self._device) - before


@contextlib.contextmanager
def determinism(asked: bool) -> Iterator[None]:
    """Have torch choose kernels that give the same bits each time, and raise where there is none."""
    if not asked:
        yield
        return
    # cuBLAS reads it when it first multiplies.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# --- products of bf16 matrices on CPUs without AVX-512

_aten = torch.ops.aten
# By operation, how many of its results have the operands' dtype.
_PRODUCTS = {
    _aten.mm.default: 1,
    _aten.addmm.default: 1,
    _aten.bmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: 1,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: 3,
}


def fast_products(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context that has `Float32Products` on a CPU without AVX-512, and does nothing elsewhere."""
    if device.type != "cpu" or (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return contextlib.nullcontext()
    return Float32Products()  # type: ignore[no-untyped-call]


class Float32Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of bf16 matrices on a CPU in float32, and rounds the results once, as oneDNN does.

    torch leaves such products to oneDNN, which needs AVX-512. Without it torch runs a loop that takes 36 times as
    long as a product of float32 matrices (512x128 by 128x512, one thread, torch 2.13).
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rounded = _PRODUCTS.get(func, 0)
        if not rounded or not args[0].is_cpu or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)

        def widened(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.dtype == torch.bfloat16 else x

        found = func(*tree_map(widened, args), **tree_map(widened, dict(kwargs)))
        if isinstance(found, Tensor):
            return found.bfloat16()
        return tuple(x.bfloat16() for x in found[:rounded]) + tuple(found[rounded:])
