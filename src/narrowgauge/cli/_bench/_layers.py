"""The layers that are timed: `nn.Linear`, plans, and those of torchao and bitsandbytes where they are installed.

Peers are named, not imported: the library knows none. torchao's layers are compiled, as its users compile them:
without, each step of a quantization is a pass over memory of its own. bitsandbytes' have kernels of their own,
those of LLM.int8(), and run as they are.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from narrowgauge.cli._bench._rows import installed_version
from narrowgauge.cli._errors import UsageError
from narrowgauge.linear import LinearPlan, LowPrecisionLinear, named_plan

BASELINE = "nn.Linear"
_DEFAULT = (
    "SWITCHBACK:int8", "SWITCHBACK:e4m3", "SWITCHBACK_M:int8", "SWITCHBACK_M:e4m3", "SWITCHBACK_Q:int8",
    "SWITCHBACK_Q:e4m3", "LLM_INT8:int8", "TENSORWISE_FP8:e4m3", "HIGH_PRECISION",
)  # fmt: skip
# torchao's float8 recipes, and its int8 training, by what of a layer is in eight bits.
_TORCHAO, _RECIPES = "torchao", {
    "tensorwise": ("float8, all three multiplies", 3),
    "rowwise": ("float8 by row and column, all three", 3),
    "rowwise_with_gw_hp": ("float8 but for the weight gradient", 2),
    "int8": ("int8 by row and column, all three", 3),
}  # fmt: skip
_BITSANDBYTES, _LAYER = "bitsandbytes", "Linear8bitLt"


@dataclass(frozen=True)
class Layer:
    """A way to compute a linear layer.

    Attributes:
        name: of the row.
        what: what is in eight bits, in a line.
        eight_bits: how many of the three multiplies are.
        plan: ours, or None.
        peer: the other library that it is of, or None.
        recipe: of torchao, the layer of bitsandbytes.
    """

    name: str
    what: str
    eight_bits: int
    plan: LinearPlan | None = None
    peer: str | None = None
    recipe: str = ""

    @property
    def family(self) -> str:
        """The package."""
        return self.peer or ("torch" if self.plan is None else "narrowgauge")

    def converted(self, linear: nn.Linear) -> nn.Module:
        """A layer that computes this way with the parameters of another: the same memory, not copies."""
        if self.plan is not None:
            return LowPrecisionLinear.from_linear(linear, self.plan)
        if self.peer is None:
            return linear
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        if self.peer == _BITSANDBYTES:
            module = _module(_BITSANDBYTES, "nn")
            logging.getLogger(_BITSANDBYTES).setLevel(logging.ERROR)  # else a line a call, of a cast to fp16
            layer: nn.Module = getattr(module, self.recipe)(*sizes, has_fp16_weights=True, device="meta")
            layer.weight = module.Int8Params(linear.weight.detach(), requires_grad=True, has_fp16_weights=True)
            layer.bias = linear.bias
            return layer
        own = nn.Linear(*sizes, device="meta")
        own.weight, own.bias = linear.weight, linear.bias
        if self.recipe == "int8":
            config = _module(self.family, "prototype.quantized_training").Int8MixedPrecisionTrainingConfig
            _module(self.family, "quantization").quantize_(own, config(module_swap=True))
            return own
        float8 = _module(self.family, "float8")
        config = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        return cast(nn.Module, float8.convert_to_float8_training(own, config=config))

    def made(self, linear: nn.Linear) -> nn.Module:
        """The same, as its users run it: torchao's compiled."""
        layer = self.converted(linear)
        return cast(nn.Module, torch.compile(layer, dynamic=False)) if self.peer == _TORCHAO else layer


def _module(package: str, name: str) -> Any:
    return importlib.import_module(f"{package}.{name}")


def baseline() -> Layer:
    """`nn.Linear`, which all others are set against."""
    return Layer(BASELINE, "nothing in eight bits", 0)


def peers() -> tuple[Layer, ...]:
    """The layers of other libraries, installed or not."""
    eight = "int8 by row and column, output and weight gradient"
    return (
        *(Layer(f"{_TORCHAO} {name}", *about, peer=_TORCHAO, recipe=name) for name, about in _RECIPES.items()),
        Layer(f"{_BITSANDBYTES} {_LAYER}", eight, 2, peer=_BITSANDBYTES, recipe=_LAYER),
    )


def peer_versions() -> dict[str, str]:
    """Versions of the libraries that are installed, by name."""
    names = dict.fromkeys(peer.family for peer in peers())
    return {name: version for name in names if (version := installed_version(name)) is not None}


def default_plans() -> tuple[Layer, ...]:
    """What is measured unless something else is asked for."""
    return tuple(map(plan_layer, _DEFAULT))


def plan_layer(text: str) -> Layer:
    """A plan by its name and format: ``SWITCHBACK``, ``switchback:e4m3``, ``TENSORWISE_FP8:e4m3/e5m2``.

    Raises:
        UsageError: for an unknown name or formats that do not go together.
    """
    try:
        plan = named_plan(text)
    except ValueError as error:
        raise UsageError(f"--plans {str(error).removeprefix('plan ')}") from None
    count = sum(multiply is not None for multiply in (plan.output, plan.grad_input, plan.grad_weight))
    what = {0: "our autograd function alone", 2: "all but the weight gradient", 3: "all three multiplies"}[count]
    what += ", keeps codes" if plan.saved == "codes" else ""
    return Layer(" ".join((plan.name, "/".join(plan.formats))).strip(), what, count, plan)
