"""Layers under tensor parallelism: each rank multiplies its parts of input and weight by the plan.

A weight that is cut by rows gives an output that is cut in its last dimension. One that is cut by columns takes
such an input, and gives each rank a part of the sum. A gradient is cut as what it belongs to, or is a part of a sum
as well: torch adds it up where a parameter or another layer takes it. A scale over a tensor, a row or a column is
that of the part on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_parts(run: Callable[[Tensor, Tensor, Tensor | None], Tensor], input: Any, weight: Any, bias: Any) -> Tensor:
    """The product of DTensors, of their parts on this rank.

    Args:
        run: multiplies plain tensors.
        input, weight, bias: DTensors on one mesh; bias may be None.

    Returns:
        A DTensor.

    Raises:
        ValueError: if only some of them are DTensors, and for a weight that is cut in another way.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # not in every build of torch

    if not all(isinstance(x, DTensor) for x in (input, weight, bias) if x is not None):
        raise ValueError(
            "input, weight and bias must all be DTensors or none, as ColwiseParallel and RowwiseParallel make them"
        )
    last, mesh = input.dim() - 1, weight.device_mesh
    sharing = 1  # ranks whose outputs are added up: each adds a share of the bias, as torch has it
    placed: list[tuple[Any, ...]] = []  # of input, bias and output, and of the gradients of input, weight and bias
    for dim, (of_x, of_w) in enumerate(zip(input.placements, weight.placements, strict=True)):
        if of_w.is_shard(0):
            placed.append((Replicate(), Shard(0), Shard(last), Partial(), of_w, Shard(0)))
        elif of_w.is_shard(1):
            placed.append((Shard(last), Replicate(), Partial(), Shard(last), of_w, Partial()))
            sharing *= mesh.size(dim)
        elif not of_w.is_replicate():
            raise ValueError(f"weight must be cut by rows or columns, or be whole on each rank, got {of_w}")
        elif of_x.is_shard() and of_x.dim not in (-1, last):
            placed.append((of_x, Replicate(), of_x, of_x, Partial(), Partial()))
        else:
            placed.append((Replicate(),) * 6)
    inputs, biases, outputs, of_input, of_weight, of_bias = zip(*placed, strict=True)
    x = _plain(input.redistribute(mesh, inputs).to_local(grad_placements=of_input))
    w = _plain(weight.to_local(grad_placements=of_weight))
    b = None
    if bias is not None:
        b = _plain(bias.redistribute(mesh, biases).to_local(grad_placements=of_bias))
        b = b / sharing if sharing > 1 else b
    shape = torch.Size((*input.shape[:-1], weight.shape[0]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(run(x, w, b), mesh, outputs, run_check=False, shape=shape, stride=stride)


def _plain(x: Any) -> Tensor:
    """A tensor that kernels may take: what a collective fills is waited for."""
    return _Waited.apply(x) if hasattr(x, "wait") else x  # type: ignore[no-any-return, no-untyped-call]


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        found: Tensor = x.wait()
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g
