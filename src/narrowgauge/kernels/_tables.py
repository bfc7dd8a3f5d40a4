"""Small tables of the host that a device needs again and again, and gets once.

Places, lengths and factors of a list of tensors are the same from step to step as long as the allocator gives out
the same memory. Sending them takes the host some microseconds and the device a gap between two kernels, which is
more than many of the kernels take that read them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SMALL = 2**16  # bytes; larger arrays cost the host too much to keep and to compare


def sent(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, without waiting for it; the same tensor for the same array, not to be written to."""
    if values.nbytes > _SMALL:
        return sent_anew(values, device)
    return _known(values.tobytes(), values.dtype.str, values.shape, device)


@functools.lru_cache(maxsize=256)
def _known(values: bytes, dtype: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return sent_anew(np.frombuffer(values, dtype=dtype).reshape(shape).copy(), device)


def sent_anew(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, without waiting for it."""
    with torch.inference_mode(False):  # what is kept must serve elsewhere, too
        return torch.from_numpy(values).to(device, non_blocking=True)
