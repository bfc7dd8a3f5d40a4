"""Rows of all processes, as if one had made them: gathered on the way forward, gradients sent home on the way back.

Each of W processes has n rows f_r and a loss L_r of all W n. What DistributedDataParallel and FSDP2 do with a
gradient is to take its mean over processes, so the mean of the L_r is what they train on, and its gradient needs

    W d(mean of L_s)/d f_r = sum over s of d L_s/d f_r

in process r: the sum of what all have found out about its rows, which is a reduce-scatter. Where L_r is the mean
over the n examples of r, the mean of the L_r is the whole step's loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Their names before torch 2.13.
_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        assert _gather is not None
        whole = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
        _gather(whole, rows.contiguous())
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert _scatter is not None
        own = grad.new_empty(len(grad) // dist.get_world_size(), *grad.shape[1:])
        _scatter(own, grad.contiguous())
        return own


def gathered(rows: Tensor) -> Tensor:
    """The rows of all processes of the default group, in the order of ranks.

    Args:
        rows: (n, ...), of the same shape and dtype in each.

    Returns:
        (processes times n, ...). Its gradient is added up over the processes, which all have to ask for it.
    """
    whole: Tensor = _Gathered.apply(rows)  # type: ignore[no-untyped-call]
    return whole
