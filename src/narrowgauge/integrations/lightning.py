"""Linear layers in eight bits and weights in bfloat16 inside Lightning, as a precision plugin.

    trainer = lightning.Trainer(plugins=NarrowgaugePrecision("SWITCHBACK:e4m3"))

It is Lightning's ``precision="bf16-true"`` with two differences: linear layers compute by a plan, and buffers keep
their dtype, as with recipes. The optimizer is that of `configure_optimizers`.

A callback with the gauges is `narrowgauge.gauges.LightningCallback`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.plugins import HalfPrecision
from torch import nn
from torch.distributed.tensor import DTensor

from narrowgauge.linear import LinearPlan, SwapReport, named_plan, swap_linears
from narrowgauge.linear._module import PlannedModule
from narrowgauge.recipes import cast


class NarrowgaugePrecision(HalfPrecision):  # type: ignore[misc]
    """Casts the module to bfloat16 and swaps its linear layers before the optimizer is made.

    Args:
        plan: a plan for the linear layers, or its name and format: ``"SWITCHBACK:e4m3"``.
        keep: layers that are not swapped; see `narrowgauge.linear.swap_linears`. None: its
            default.

    Attributes:
        report: the swapped layers, and the kept ones with the reason; None before the module is converted.
    """

    def __init__(self, plan: str | LinearPlan, keep: Iterable[str] | None = None) -> None:
        super().__init__("bf16-true")
        self._plan = named_plan(plan) if isinstance(plan, str) else plan
        self._options: dict[str, Any] = {} if keep is None else {"keep": keep}
        self.report: SwapReport | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast and swap, in place; Lightning calls it before `configure_optimizers`.

        Raises:
            ValueError: if no layer could be swapped; the message says why.
        """
        if any(isinstance(p, DTensor) and p.dtype != torch.bfloat16 for p in module.parameters()):
            module = super().convert_module(module)  # sharded weights must be cast by FSDP2's own `to`
        else:
            cast(module, torch.bfloat16)
        self.report = swap_linears(module, self._plan, **self._options)
        if not any(isinstance(layer, PlannedModule) for layer in module.modules()):
            raise ValueError(f"plan: no layer of {type(module).__name__} could be swapped\n{self.report}")
        return module
