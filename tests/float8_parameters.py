"""Parameters as weight storages take them: plain tensors, and for `fp8split8` a `Float8Weight`."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.storage import Float8Weight, weight_storage, weight_storages

# Weight storages of plain parameters.
PLAIN_STORAGES = tuple(name for name in weight_storages() if not weight_storage(name).float8)


def kept_as(x: Tensor, weights: str) -> Tensor:
    """A tensor as a weight storage takes it. A `Float8Weight` begins with its codes, and low words of zero."""
    if not weight_storage(weights).float8 or x.dtype != torch.bfloat16:
        return x
    codes = Float8Weight.of(x)
    return Float8Weight(codes.codes, codes.scale)
