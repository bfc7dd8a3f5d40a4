"""`nn.Linear` by a plan, and the same for the transposed layer of GPT-2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self, SupportsIndex, cast

import torch
from torch import Tensor, nn

from narrowgauge._arguments import check_instance
from narrowgauge.linear._function import linear
from narrowgauge.linear._ops import count_flops, path
from narrowgauge.linear._plan import MULTIPLIES, SWITCHBACK, LinearPlan, as_plan

_AVERAGES = "absmax_averages"
COMPUTED = "is parametrized: its weight is computed anew"


class PlannedModule(nn.Module):
    """Base of the layers with a plan."""

    plan: LinearPlan
    of_recipe = False  # whether `Recipe.apply` gave it the plan, which the next recipe takes away again
    WEIGHT: ClassVar[str] = "weight"  # the name of the parameter that is multiplied
    AVERAGES: ClassVar[tuple[int, ...]] = (3,)  # the shape of the moving averages, for plans with averages

    def set_plan(self, plan: LinearPlan | str) -> None:
        """Compute by a plan, or the one of a name, from now on; moving averages start anew.

        Raises:
            ValueError: for anything else.
        """
        plan = as_plan(plan)
        count_flops()
        self._drop_averages()
        self.plan = plan
        if plan.tensor_absmax == "average":
            device = self.get_parameter(self.WEIGHT).device
            self.register_buffer(_AVERAGES, torch.zeros(self.AVERAGES, device=device), persistent=False)

    def remove_plan(self) -> None:
        """Undo `set_plan`."""
        self._drop_averages()
        del self.plan
        vars(self).pop("of_recipe", None)

    def _drop_averages(self) -> None:
        self._buffers.pop(_AVERAGES, None)
        self._non_persistent_buffers_set.discard(_AVERAGES)

    @property
    def path(self) -> str:
        """How the weight's device multiplies eight bits: each format real or simulated, and by which library."""
        device = getattr(self, self.WEIGHT).device  # with weight norm it is no parameter
        hows = [how for name in MULTIPLIES if (how := getattr(self.plan, name)) is not None]
        parts = [path(one, device, self.plan.arithmetic, how.blocks) for how in hows for one in how.formats]
        return ", ".join(dict.fromkeys(parts)) or "high precision"

    @property
    def averages(self) -> Tensor | None:
        """The moving averages; None for a plan without."""
        return self._buffers.get(_AVERAGES)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As `nn.Module` does; averages stay float32, and start at zero when they leave the meta device."""
        before = self.averages
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.averages
        if before is not None and after is not None and after is not before:
            kept = torch.zeros_like(after, dtype=torch.float32) if before.is_meta else before.to(after.device)
            self._buffers[_AVERAGES] = kept
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        # With `assign=True` a weight may leave the meta device here; averages, which are in no checkpoint, follow
        # it.
        super()._load_from_state_dict(*args, **options)
        if self.averages is not None and self.averages.is_meta:
            self._buffers[_AVERAGES] = torch.zeros(self.AVERAGES, device=getattr(self, self.WEIGHT).device)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None, averages: Tensor | None) -> Tensor:
        return linear(input, weight, bias, self.plan, averages)


class LowPrecisionLinear(PlannedModule, nn.Linear):
    """`nn.Linear` whose matrix multiplies follow a plan.

    Parameters, their initialization and the state_dict are those of `nn.Linear`. Moving averages are buffers that
    are not saved.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear` takes them.
        plan: a `LinearPlan`, or its name and format: ``"SWITCHBACK:e4m3"``.

    Shapes: (..., in_features) to (..., out_features).

    Raises:
        ValueError: for a `plan` that is no `LinearPlan` and not the name of one.

    Source: Wortsman et al. 2023, Algorithms 1 and 3 to 5.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        plan: LinearPlan | str = SWITCHBACK,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_plan(plan)

    @classmethod
    def from_linear(cls, layer: nn.Linear, plan: LinearPlan | str = SWITCHBACK) -> LowPrecisionLinear:
        """A layer with a plan and the parameters of another layer: the same tensors, not copies.

        Raises:
            ValueError: for another layer, one whose parameters are computed anew (parametrized, pruned), or a
                `plan` that is no `LinearPlan` and not the name of one.
        """
        check_instance("layer", layer, nn.Linear)
        if is_computed(layer, "weight") or is_computed(layer, "bias"):
            raise ValueError(f"layer must have parameters of its own, got a {type(layer).__name__} that {COMPUTED}")
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, plan, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        made.set_plan(plan)
        return made.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return self._linear(input, self.weight, self.bias, self.averages)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, plan={self.plan.title!r}"


def is_computed(module: Any, name: str) -> bool:
    """Whether a parameter is computed anew: by a parametrization, or by torch's older hooks (weight norm, pruning).

    With these hooks it is an attribute, not a parameter.
    """
    hooked = module._parameters.get(name) is None and isinstance(getattr(module, name, None), Tensor)
    return hooked or nn.utils.parametrize.is_parametrized(module)


@functools.cache
def planned_class(kind: Any) -> type[LowPrecisionLinear]:
    """The class of a layer with a plan that stays an instance of a subclass of `nn.Linear`; one for each subclass.

    Its forward pass is that of `LowPrecisionLinear`; all else is the subclass's. Pickles and copies name the
    subclass, from which this class is made again.
    """
    if kind is nn.Linear:
        return LowPrecisionLinear
    namespace = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__reduce_ex__": _reduce}
    made = type(f"LowPrecision{kind.__name__}", (LowPrecisionLinear, kind), {**namespace, "_planned": kind})
    return cast(type[LowPrecisionLinear], made)


def _reduce(layer: Any, protocol: SupportsIndex) -> Any:
    kind = type(layer)
    reduced: Any = super(kind._planned, layer).__reduce_ex__(protocol)
    # A class that was derived from this one since (by a parametrization, FSDP2) is pickled as it says itself.
    return (_empty, (kind._planned,), *reduced[2:]) if "_planned" in vars(kind) else reduced


def _empty(kind: Any) -> LowPrecisionLinear:
    made = planned_class(kind)
    return made.__new__(made)


class LowPrecisionConv1D(PlannedModule):
    """transformers' `Conv1D`, the linear layer of GPT-2 whose weight is (in_features, out_features), by a plan.

    `swap_linears` makes it from a `Conv1D`, whose attributes it keeps.

    Shapes: (..., in_features) to (..., out_features).
    """

    weight: Tensor
    bias: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return self._linear(input, self.weight.t(), self.bias, self.averages)

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"nf={columns}, nx={rows}, plan={self.plan.title!r}"
