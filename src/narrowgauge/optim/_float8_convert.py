"""What stores a given weight, and a parameter that becomes a `Float8Weight`, or ceases to be one, in a running
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from narrowgauge.optim._plan import ParamPlan, State
from narrowgauge.optim._sharding import is_shared
from narrowgauge.storage import Float8Weight, WeightStorage
from narrowgauge.storage._float8_weight import become
from narrowgauge.storage._weights import Written


@torch.no_grad()
def change_class(p: Tensor, plan: ParamPlan, state: State, target: WeightStorage) -> Callable[[], None]:
    """Make a parameter what a weight storage keeps, with its weight in both words; it stays the same object.

    Args:
        p, plan: the parameter, and what was done with it so far.
        state: its state, which is changed in place.
        target: the storage that it will have; the caller makes the plan.

    Returns:
        What undoes it.

    Raises:
        ValueError: for a sharded parameter.
        RuntimeError: if a graph or a weak reference refers to the parameter.
    """
    if is_shared(p):
        raise ValueError(f"weights must not be changed to or from 'fp8split8' of a sharded parameter ({plan.name})")
    former, before = p.detach(), dict(state)
    whole = plan.weight.exact(p, state.get(plan.weight_key or "")).to(torch.float32)
    hi: Tensor
    low: Tensor | None
    if target.float8:
        hi, low = Float8Weight.of(whole), None
    else:
        hi, low = words_of(whole, target, plan.dtype)
    become(p, hi)
    state.pop(plan.weight_key or "", None)
    if low is not None:
        state[f"weight.{target.key}"] = low

    def undo() -> None:
        become(p, former)
        state.clear()
        state.update(before)

    return undo


def words_of(weight: Tensor, storage: WeightStorage, dtype: torch.dtype) -> Written:
    """The parameter and low word nearest to a float32 weight."""
    hi = weight.to(dtype)
    half = torch.full(weight.shape, 1 << (storage.random_bits - 1), dtype=torch.int64, device=weight.device)
    return storage.add(hi, storage.init(hi), weight, torch.zeros_like(weight), lambda: half)
