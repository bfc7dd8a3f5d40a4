"""Collage with float8 storage, in simulation: storages and recipes.

Every number that is stored is a number of e4m3 times a scale; the step is computed in float32 and rounded on write,
as the float8 frameworks do whose place this takes. Only the containers are wider: the parameter is a bf16 tensor
that holds e4m3 numbers times 2^-8, so that the model can compute with it.

The scale is fixed: e4m3 has 15 binades of normal numbers, which 2^-8 lays on 6e-5 ... 1.75, where weights are. The
low word is at most half a unit of the high one, 2^-4 of it, and has the scale 2^-12 accordingly.

Source: Collage, Appendix D, "FP8 Backends and Implementations".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.formats import FP8_E4M3, round_to
from narrowgauge.optim import AdamW
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.recipes import Recipe
from narrowgauge.recipes._recipe import decay_groups
from narrowgauge.storage import StateContext, StateStorage, WeightStorage, state_storage

SCALE = 2.0**-8
LOW_SCALE = 2.0**-12


def to_float8(x: Tensor, scale: float) -> Tensor:
    """The nearest e4m3 number times the scale, in float32."""
    return round_to(x.to(torch.float32) / scale, FP8_E4M3).to(torch.float32) * scale


class Float8Weights(WeightStorage):
    """The parameter alone, on the grid of e4m3."""

    name = "float8"
    bytes_a_word = 1

    def add(
        self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        return to_float8(weight + delta, SCALE).to(p.dtype), None


class Float8Expansion(Float8Weights):
    """hi + lo, both e4m3."""

    name = "float8 expansion"
    key = "lo"

    def low_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float8_e4m3fn

    def read(self, p: Tensor, low: Tensor | None) -> Tensor:
        assert low is not None
        return p.to(torch.float32) + low.to(torch.float32) * LOW_SCALE

    def add(
        self, p: Tensor, low: Tensor | None, weight: Tensor, delta: Tensor, noise: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        updated = weight + delta
        hi = to_float8(updated, SCALE)
        return hi.to(p.dtype), round_to((updated - hi) / LOW_SCALE, FP8_E4M3)

    def exact(self, p: Tensor, low: Tensor | None) -> Tensor:
        return self.read(p, low).to(torch.float64)


@dataclass(frozen=True)
class Float8Pair(StateStorage):
    """hi + lo, each e4m3 with a scale a block: the second moment of the plus variant."""

    def nbytes(self, shape: Sequence[int], block_size: int) -> int:
        return 2 * state_storage("fp8").nbytes(shape, block_size)

    def init(self, p: Tensor, signed: bool, block_size: int) -> dict[str, Tensor]:
        return self.encode(torch.zeros_like(p, dtype=torch.float32), StateContext(p.shape, signed, block_size))

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> dict[str, Tensor]:
        one = state_storage("fp8")
        hi = one.encode(moment, context)
        # The remainder of a number that is never negative has both signs.
        lo = one.encode(moment - one.decode(hi, context), replace(context, signed=True))
        return {f"hi_{k}": v for k, v in hi.items()} | {f"lo_{k}": v for k, v in lo.items()}

    def decode(self, words: dict[str, Tensor], context: StateContext) -> Tensor:
        one = state_storage("fp8")
        hi, lo = (
            one.decode({k[3:]: v for k, v in words.items() if k[:2] == part}, context) for part in ("hi", "lo")
        )
        return hi + lo if context.signed else (hi + lo).clamp_min(0.0)


class Float8AdamW(AdamW):
    """AdamW on these storages: `expansion` weights, and with `plus` v as a pair."""

    def __init__(self, params: Any, *args: Any, expansion: bool, plus: bool, **options: Any) -> None:
        self._float8 = Float8Expansion() if expansion else Float8Weights()
        self._second = Float8Pair("fp8 pair", torch.float8_e4m3fn, rounded=False) if plus else None
        super().__init__(params, *args, states="fp8", **options)

    def _plan_group(self, plans: dict[Tensor, ParamPlan], number: int) -> None:
        super()._plan_group(plans, number)
        for p in self.param_groups[number]["params"]:
            slots = [
                replace(s, storage=self._second) if self._second and s.slot.name == "v" else s
                for s in plans[p].slots
            ]
            plans[p] = replace(plans[p], weight=self._float8, slots=tuple(slots))


@dataclass(frozen=True)
class Float8Recipe(Recipe):
    """A recipe of these storages, for the library's trainer."""

    expansion: bool = False  # weights as hi + lo
    plus: bool = False  # the second moment as hi + lo

    @property
    def real_bytes(self) -> float:
        """Bytes a parameter that real float8 would take: weight, gradient, moments, low words; scales apart."""
        return 4.0 + self.expansion + self.plus

    def apply(
        self, model: nn.Module, lr: float | None = None, *, decay_all: bool = False, **optimizer_arguments: Any
    ) -> AdamW:
        model.to(torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(to_float8(p, SCALE))
        options = {k: v for k, v in optimizer_arguments.items() if k != "weights"}
        options |= {} if lr is None else {"lr": lr}
        return Float8AdamW(decay_groups(model, decay_all), expansion=self.expansion, plus=self.plus, **options)


RECIPES = (
    Float8Recipe("float8", "e4m3 weights and moments, nothing else", torch.bfloat16),
    Float8Recipe("float8 light", "weights as two e4m3 words", torch.bfloat16, expansion=True),
    Float8Recipe("float8 plus", "the second moment too", torch.bfloat16, expansion=True, plus=True),
)
