"""Triton without a GPU: launches end just before the driver would run a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton

from narrowgauge.kernels import _launches

# What a compiled kernel tells of a descriptor.
TOLD = {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [128, 128], "fp4_padded": False}


class Kernel:
    """A kernel whose launches call an empty function in place of Triton's in C."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

        launcher = CudaLauncher.__new__(CudaLauncher)
        launcher.num_ctas, launcher.gsan_enabled = 1, False
        # Three descriptors come first, where there are any.
        signature = dict(enumerate(["tensordesc"] * 3 if self.__name__ == "_by_descriptors" else []))
        launcher.launch = wrap_handle_tensordesc(_launch, signature, [TOLD] * len(signature))
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.launch_cooperative_grid = launcher.launch_pdl = False
        launcher.arg_annotations = launcher.kernel_signature = ()
        made = SimpleNamespace(run=launcher, function=0, packed_metadata=())
        return lambda *arguments, **rest: made


def _launch(*arguments: Any) -> None:
    """What would be Triton's function in C."""


class _Driver:
    utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: None)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def allocate_default_profile_scratch(self, size: int, align: int, stream: int) -> None:
        return None


def stand_in(*launches: _launches.CachedKernel) -> None:
    """Let Triton do without a driver, and these kernels without a launch."""
    triton.runtime.driver.set_active(_Driver())
    _launches.current_device = lambda: -1  # what tensors on the CPU say they are on
    for one in launches:
        one.kernel, one.interpreted = Kernel(one.kernel), False
    torch.set_num_threads(1)
