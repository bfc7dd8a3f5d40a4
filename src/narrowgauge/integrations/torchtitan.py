"""torchtitan: its container of optimizers with the names of this library, and a converter for linear layers.

torchtitan describes a training by configurations. An optimizer is a pattern for parameter names, the name of an
optimizer, and its arguments; `NarrowOptimizersContainer` adds the names in `narrowgauge.optim`. A change of the
model is a converter that replaces configurations of layers before they are built; `NarrowLinearConverter` replaces
those of linear layers. Checkpoints are torchtitan's own: its container saves states flat, by the names of the
parameters, and they resume on any number of ranks.

Written for torchtitan 0.3.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.tools.logging import logger

import narrowgauge.optim
from narrowgauge.linear import SWITCHBACK, LinearPlan, LowPrecisionLinear
from narrowgauge.linear._swap import matches
from narrowgauge.optim import NarrowOptimizer


class NarrowOptimizersContainer(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's `OptimizersContainer`, whose groups may name an optimizer of `narrowgauge.optim`.

    A name of this library comes first: ``"AdamW"`` is `narrowgauge.optim.AdamW`. Every other name is torchtitan's.
    ``optimizer_kwargs`` are the optimizer's arguments, storages among them.

    Raises:
        ValueError: for ``implementation="fused_opt_states_bf16"`` with an optimizer of this library, whose states
            are set by ``states``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        ours = [g.optimizer_name for g in config.param_groups if _optimizer(g.optimizer_name) is not None]
        if ours and config.implementation == "fused_opt_states_bf16":
            raise ValueError(
                f"implementation must be 'fused' for {ours[0]}, got 'fused_opt_states_bf16'; its optimizer_kwargs "
                "set the states: {'states': 'bf16'}"
            )
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        found = _optimizer(name)
        return found if found is not None else OptimizersContainer._resolve_optimizer_factory(name)


def _optimizer(name: str) -> type[NarrowOptimizer] | None:
    """The optimizer of this library that has a name."""
    found = getattr(narrowgauge.optim, name, None)
    is_one = isinstance(found, type) and issubclass(found, NarrowOptimizer) and found is not NarrowOptimizer
    return found if is_one else None


class NarrowLinear(LowPrecisionLinear, Linear):  # type: ignore[misc]
    """torchtitan's `Linear` by a plan."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        plan: LinearPlan = SWITCHBACK

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        self.set_plan(config.plan)


class NarrowLinearConverter(ModelConfigConverter):  # type: ignore[misc]
    """Has the linear layers of a torchtitan model compute by a plan.

    Layers of torchtitan's class `Linear` are converted; those of its subclasses, which compute something else
    (LoRA, other quantized layers), are not. So it goes before ``LoRAConverter`` in the list of converters; a frozen
    layer inside LoRA then computes by the plan.

    Attributes of `Config`:
        plan: a `LinearPlan`.
        keep: layers to keep, as `narrowgauge.linear.swap_linears` takes them.
        min_features: layers with fewer input or output features are kept.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        plan: LinearPlan = SWITCHBACK
        keep: list[str] = field(default_factory=lambda: ["lm_head"])
        min_features: int = 16

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """The configuration with the plan in its linear layers; it changes in place unless it is a layer's own."""
        found = list(model_config.traverse(Linear.Config))
        swapped = 0
        for name, layer, parent, attribute in found:
            if not self._takes(name, layer):
                continue
            fields = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer) if f.init}
            planned = NarrowLinear.Config(**fields, plan=self.config.plan)
            swapped += 1
            if parent is None:
                model_config = planned
            elif isinstance(parent, list):
                parent[attribute] = planned
            else:
                setattr(parent, attribute, planned)
        logger.info(f"narrowgauge: {swapped} of {len(found)} linear layers by {self.config.plan.title}")
        return model_config

    def _takes(self, name: str, layer: Any) -> bool:
        small = min(layer.in_features, layer.out_features) < self.config.min_features
        # The class of a configuration's layer, whatever the configuration's own class.
        return layer._owner is Linear and not small and not any(matches(name, one) for one in self.config.keep)
