"""Unscaling an optimizer's gradients and finding inf and NaN in them, all at once.

Each function takes a few fused launches over lists of tensors of one device and dtype, and none waits for a device.
Of a sharded gradient (DTensor) the local part is used; flags are then joined over the ranks that share it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

# The option of narrowgauge's parameter groups that says what the optimizer does about inf and NaN by itself.
_OPTION = "nonfinite"


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of an optimizer.

    Attributes:
        name: as the optimizer has it, or ``group.position``.
        parameter: the parameter; its gradient may be replaced by another tensor while the slot lives.
        ours: the optimizer is one of narrowgauge's, which compute in float32 whatever the dtype of gradients.
        handles_nonfinite: the optimizer skips or refuses tensors with inf and NaN by itself.
    """

    name: str
    parameter: Tensor
    ours: bool
    handles_nonfinite: bool

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
    hooks = (*getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(), *_global_optimizer_pre_hooks.values())
    return has_unscaling(optimizer) and all(getattr(hook, "unscales", False) for hook in hooks)


def by_kind(tensors: Iterable[tuple[int, Tensor]]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    """Positions of the tensors that one fused launch can take together."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for position, tensor in tensors:
        kinds[tensor.device, tensor.dtype].append(position)
    return kinds


def widen_float16(slots: Sequence[Slot]) -> None:
    """Replace float16 gradients by float32 ones of the same values, in which unscaling loses nothing.

    Raises:
        ValueError: for a parameter whose optimizer cannot be expected to take a gradient wider than it.
    """
    narrow = [
        slot for slot in slots if slot.parameter.grad is not None and slot.parameter.grad.dtype is torch.float16
    ]
    for slot in narrow:
        if not slot.ours:
            raise ValueError(
                f"{slot.name} must be a float32 parameter (under torch.autocast), or in an optimizer of "
                "narrowgauge.optim, got a float16 gradient, which would underflow again when it is unscaled"
            )
    for slot in narrow:
        wide = slot.parameter.grad.float()  # type: ignore[union-attr]
        slot.parameter.grad_dtype = None  # torch's way to say: any
        slot.parameter.grad = wide


def unscale(values: Sequence[Tensor | None], inverse: Tensor) -> None:
    """Multiply in place by a 0-d float32 tensor, in float32 and with one rounding."""
    present = [(i, v) for i, v in enumerate(values) if v is not None]
    for (device, _), positions in by_kind(present).items():
        tensors = [v for i in positions if (v := values[i]) is not None]
        there = inverse.to(device, non_blocking=True)
        try:
            # Its flag is not used: it does not name the tensor, and misses overflow by a scale below 1.
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.zeros((), device=device), there)
        except NotImplementedError:  # torch 2.11 has it for no bfloat16 on a GPU
            for tensor in tensors:
                tensor.copy_(tensor.to(torch.float32) * there)


def nonfinite(values: Sequence[Tensor | None]) -> dict[torch.device, Tensor]:
    """Which tensors have an inf or NaN: for each device a bool vector, as long as `values`.

    None, tensors on another device and empty ones count as finite.
    """
    present = [(i, v) for i, v in enumerate(values) if v is not None]
    largest: dict[torch.device, list[Tensor]] = {}
    for device in dict.fromkeys(v.device for _, v in present):
        largest[device] = [torch.zeros((), device=device)] * len(values)
    for (device, _), positions in by_kind((i, v) for i, v in present if v.numel()).items():
        # The largest magnitude: exact in any format, inf or NaN if one is there.
        norms = torch._foreach_norm([v for i in positions if (v := values[i]) is not None], math.inf)
        for position, norm in zip(positions, norms, strict=True):
            largest[device][position] = norm
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
    present = [(i, v) for i, v in enumerate(values) if v is not None and v.numel() and v.device in flags]
    for (device, dtype), positions in by_kind(present).items():
        poison = torch.where(flags[device], math.nan, 0.0).to(dtype).view(-1, 1).unbind()
        firsts = [v.as_strided((1,), (1,)) for i in positions if (v := values[i]) is not None]
        torch._foreach_add_(firsts, [poison[i] for i in positions])
