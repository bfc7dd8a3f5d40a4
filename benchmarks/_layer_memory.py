"""What linear layers hold between forward and backward: of every token, and of every weight.

Layers run forward, and what their backward pass will read is counted: on a GPU by torch's allocator, less the
results of the layers, on a CPU as the tensors that autograd saves. Parameters are not counted, an input that
several layers read counts once. What a pass holds grows with its tokens but for codes of weights, so two numbers of
tokens tell one from the other.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.cli._bench._linear import BASELINE, Layer
from narrowgauge.cli._bench._timing import why

# Layers that are held at once, in units of dim: what each group of layers reads, and the widths of what they give.
_BLOCK = 512  # bytes by which torch's allocator gives memory on a GPU
_MLP = ((1, (4,)), (4, (1,)))
MODELS: dict[str, tuple[tuple[int, tuple[int, ...]], ...]] = {
    "an MLP": _MLP,
    "a block, q, k, v as one layer": ((1, (3,)), (1, (1,)), *_MLP),
    "a block, q, k, v apart": ((1, (1, 1, 1)), (1, (1,)), *_MLP),
}


def memory(
    of: str, dim: int, tokens: int, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device
) -> dict[str, dict[str, Any]]:
    """What the linear layers of a part of a transformer hold.

    Args:
        of: a name in `MODELS`.
        dim, tokens: its width, and how many tokens.
        layers, dtype, device: what, where.

    Returns:
        By layer `bytes_per_token_feature`, what is held for each token and each feature of an input, an input of
        several layers counted once; `bytes_per_weight`; `saving`, of what is held for tokens, against `nn.Linear`;
        or `failed`.
    """
    model = MODELS[of]
    features = dim * sum(inputs for inputs, _ in model)
    weights = dim * dim * sum(inputs * sum(outputs) for inputs, outputs in model)
    rows: dict[str, dict[str, Any]] = {}
    for layer in layers:
        try:
            once, twice = (_held(model, dim, count, layer, dtype, device) for count in (tokens, 2 * tokens))
        except Exception as error:
            rows[layer.name] = {"failed": why(error)}
            continue
        of_token = (twice - once) / tokens
        rows[layer.name] = {
            "bytes_per_token_feature": of_token / features,
            "bytes_per_weight": (once - of_token * tokens) / weights,
        }
    known = rows.get(BASELINE, {}).get("bytes_per_token_feature")
    for row in rows.values():
        if known and "failed" not in row:
            row["saving"] = 1 - row["bytes_per_token_feature"] / known
    return rows


def _held(
    model: Sequence[tuple[int, tuple[int, ...]]], dim: int, tokens: int, layer: Layer, dtype: torch.dtype,
    device: torch.device,
) -> int:  # fmt: skip
    groups = []
    for inputs, outputs in model:
        linears = [nn.Linear(inputs * dim, width * dim, device=device, dtype=dtype) for width in outputs]
        x = torch.randn(tokens, inputs * dim, device=device, dtype=dtype).requires_grad_()
        groups.append((x, [layer.converted(linear) for linear in linears]))
    if device.type != "cuda":
        return _saved(groups)
    _forward(groups)  # workspaces of libraries are theirs
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    results = _forward(groups)
    torch.cuda.synchronize(device)
    held = torch.cuda.memory_allocated(device) - before
    return held - sum(-(-result.nbytes // _BLOCK) * _BLOCK for result in results)


def _forward(groups: Sequence[tuple[Tensor, list[nn.Module]]]) -> list[Tensor]:
    """Run all; what autograd keeps for the backward pass lives as long as the results."""
    results = []
    for x, modules in groups:
        hidden = x.clone()  # its own, as the output of the layer before would be
        results += [module(hidden) for module in modules]
    return results


def _saved(groups: Sequence[tuple[Tensor, list[nn.Module]]]) -> int:
    found: dict[int, Tensor] = {}
    parameters = {p.untyped_storage().data_ptr() for _, modules in groups for m in modules for p in m.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = _forward(groups)
    del results
    return sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in parameters)
