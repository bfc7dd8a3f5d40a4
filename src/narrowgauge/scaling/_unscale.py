"""Unscaling an optimizer's gradients and finding inf and NaN in them, all at once.

Each function takes a few fused launches over lists of tensors of one device and dtype, and none waits for a device.
Of a sharded gradient (DTensor) the local part is used; flags are then joined over the ranks that share it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge._torch_private import hooks_of_all_optimizers, optimizer_hooks

# The option of narrowgauge's parameter groups that says what the optimizer does about inf and NaN by itself.
_OPTION = "nonfinite"


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of an optimizer."""

    name: str  # as the optimizer has it, or ``group.position``
    parameter: Tensor  # its gradient may be replaced by another tensor while the slot lives
    ours: bool  # the optimizer is one of narrowgauge's, which compute in float32 whatever the dtype of gradients
    handles_nonfinite: bool  # the optimizer skips or refuses tensors with inf and NaN by itself

    def values(self) -> Tensor | None:
        """The gradient's values on this rank: a shard's local part, the values of a sparse gradient."""
        grad: Any = self.parameter.grad
        if grad is None:
            return None
        local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
        return local._values() if local.is_sparse else local


def slots_of(optimizer: torch.optim.Optimizer) -> list[Slot]:
    """All parameters of an optimizer, in the order of its groups."""
    slots = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        handles = group.get(_OPTION) in ("skip", "raise")
        slots += [Slot(n, p, _OPTION in group, handles) for n, p in zip(names, group["params"], strict=True)]
    return slots


def has_unscaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is an optimizer of narrowgauge, a room that may not be imported here."""
    return hasattr(type(optimizer), "unscaling")


def unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own step can multiply gradients by the inverse scale, and say which are not finite.

    Those of narrowgauge can, unless hooks run before the step, which may read gradients. Hooks with a true
    attribute `unscales`, as the gauges' have, know of the scale.
    """
    if not has_unscaling(optimizer):
        return False
    hooks = (*optimizer_hooks(optimizer, "step_pre"), *hooks_of_all_optimizers())
    return all(getattr(hook, "unscales", False) for hook in hooks)


def _launches(values: Sequence[Tensor | None]) -> dict[tuple[torch.device, torch.dtype], dict[int, Tensor]]:
    """The tensors that one fused launch can take together, by their positions."""
    launches: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = defaultdict(dict)
    for position, tensor in enumerate(values):
        if tensor is not None:
            launches[tensor.device, tensor.dtype][position] = tensor
    return launches


def widen_float16(slots: Sequence[Slot]) -> None:
    """Replace float16 gradients by float32 ones of the same values, in which unscaling loses nothing.

    Refused for a parameter whose optimizer cannot be expected to take a gradient wider than it.
    """
    narrow = [(slot, g) for slot in slots if (g := slot.parameter.grad) is not None and g.dtype is torch.float16]
    for slot, _ in narrow:
        if not slot.ours:
            raise ValueError(
                f"{slot.name} must be a float32 parameter (under torch.autocast), or in an optimizer of "
                "narrowgauge.optim, got a float16 gradient, which would underflow again when it is unscaled"
            )
    for slot, gradient in narrow:
        slot.parameter.grad_dtype = None  # torch's way to say: any
        slot.parameter.grad = gradient.float()


def unscale(values: Sequence[Tensor | None], inverse: Tensor) -> None:
    """Multiply in place by a 0-d float32 tensor, in float32 and with one rounding."""
    for (device, _), tensors in _launches(values).items():
        there = inverse.to(device, non_blocking=True)
        try:
            # Its flag is not used: it does not name the tensor, and misses overflow by a scale below 1.
            unused = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(list(tensors.values()), unused, there)
        except NotImplementedError:  # torch 2.11 has it for no bfloat16 on a GPU
            for tensor in tensors.values():
                tensor.copy_(tensor.to(torch.float32) * there)


def nonfinite(values: Sequence[Tensor | None]) -> dict[torch.device, Tensor]:
    """Which tensors have an inf or NaN: for each device a bool vector, as long as `values`.

    None, tensors on another device and empty ones count as finite.
    """
    largest: dict[torch.device, list[Tensor]] = {}
    for (device, _), tensors in _launches(values).items():
        norms = largest.setdefault(device, [torch.zeros((), device=device)] * len(values))
        filled = {position: tensor for position, tensor in tensors.items() if tensor.numel()}
        if filled:
            # The largest magnitude: exact in any format, inf or NaN if one is there.
            for position, norm in zip(filled, torch._foreach_norm(list(filled.values()), math.inf), strict=True):
                norms[position] = norm
    return {device: ~torch.isfinite(torch.stack(norms)) for device, norms in largest.items()}


def join_over_ranks(flags: dict[torch.device, Tensor], slots: Sequence[Slot]) -> dict[torch.device, Tensor]:
    """A tensor sharded over ranks is flagged on all of them if it is on one: one collective per mesh dimension."""
    gradients: list[Any] = [slot.parameter.grad for slot in slots]
    meshes = dict.fromkeys(grad.device_mesh for grad in gradients if hasattr(grad, "to_local"))
    if not meshes:
        return flags
    joined = {device: vector.to(torch.uint8) for device, vector in flags.items()}
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            for vector in joined.values():
                dist.all_reduce(vector, dist.ReduceOp.MAX, group=mesh.get_group(dimension))
    return {device: vector.bool() for device, vector in joined.items()}


def clear(values: Sequence[Tensor | None], flags: dict[torch.device, Tensor]) -> None:
    """Set flagged tensors to 0 without looking at the flags."""
    for i, tensor in enumerate(values):
        if tensor is not None:
            tensor.masked_fill_(flags[tensor.device][i], 0)


def mark(values: Sequence[Tensor | None], flags: dict[torch.device, Tensor]) -> None:
    """Put a NaN into the first element of each flagged tensor, in one fused launch per device and dtype."""
    filled = [v if v is not None and v.numel() and v.device in flags else None for v in values]
    for (device, dtype), tensors in _launches(filled).items():
        poison = torch.where(flags[device], math.nan, 0.0).to(dtype).view(-1, 1).unbind()
        firsts = [tensor.as_strided((1,), (1,)) for tensor in tensors.values()]
        torch._foreach_add_(firsts, [poison[position] for position in tensors])
