"""open_clip's ``--use-bnb-linear SwitchBackLinearGlobal`` and ``--opt timm/ngstableadamw``, by this library.

open_clip replaces the linear layers of its MLPs by a class that it looks up in
``bitsandbytes.nn.triton_based_modules`` by the name on the command line. bitsandbytes 0.50 no longer has that
module. `install()` puts layers of this library there, under the four names that it had, and registers the
optimizers with timm. As a program,

    python -m narrowgauge.integrations.open_clip --model ViT-B-32 --use-bnb-linear SwitchBackLinearGlobal ...

this module installs and then runs open_clip's own training script with the same arguments. torchrun takes it with
`-m`.

Where bitsandbytes is not installed, `install()` puts stand-ins for it, for its `nn` and for that module into
`sys.modules`. Any other name of theirs raises an AttributeError that says what they are. They have no version, file
or metadata, so transformers and accelerate still report that there is no bitsandbytes. peft asks `find_spec` alone
and finds them; it looks at bitsandbytes' classes only in models that were loaded in 8 or 4 bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from narrowgauge.integrations import timm
from narrowgauge.linear import SWITCHBACK, SWITCHBACK_M, SWITCHBACK_Q, LinearPlan, LowPrecisionLinear, quantize
from narrowgauge.linear._ops import multiply_codes, quantize_rows

__all__ = [
    "SwitchBackLinear",
    "SwitchBackLinearGlobal",
    "SwitchBackLinearGlobalMemEfficient",
    "SwitchBackLinearVectorwise",
    "install",
    "main",
]


class SwitchBackLinear(LowPrecisionLinear):
    """SwitchBack in int8: a scale a row of the input and of the gradient, one scale for the weight.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear` takes them.

    Shapes: (..., in_features) to (..., out_features).

    Source: Wortsman et al. 2023, Algorithm 1.
    """

    PLAN: ClassVar[LinearPlan] = SWITCHBACK

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, self.PLAN, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self._by_codes(input) if "weight_codes" in self._buffers else super().forward(input)

    def prepare_for_eval(self) -> None:
        """Quantize the weight once, for evaluation: its codes and scales replace it, and the backward pass is gone.

        The output is that of before. Under autocast it is that of the weight itself, not of its copy in 16 bits.
        """
        scaling = self.PLAN.output.right if self.PLAN.output is not None else "tensor"
        codes, scale = quantize(self.weight.detach(), scaling)
        del self.weight
        self.register_buffer("weight_codes", codes)
        self.register_buffer("weight_scale", scale)
        self.WEIGHT = "weight_codes"  # type: ignore[misc]  # the tensor whose device is the layer's

    def _by_codes(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            raise RuntimeError("after prepare_for_eval() there is no backward pass: evaluate under torch.no_grad()")
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.dtype != torch.float64:  # which autocast does not change
            input = input.to(torch.get_autocast_dtype(device))
        codes, scale, _ = quantize_rows(input.reshape(-1, self.in_features), "int8", False)
        weight, weight_scale = self.get_buffer("weight_codes"), self.get_buffer("weight_scale").float()
        bias = None if self.bias is None else self.bias.detach().to(input.dtype)
        output: Tensor = multiply_codes(
            codes, weight.t(), scale, weight_scale.t(), bias, input.dtype, self.PLAN.accumulation
        )
        return output.view(*input.shape[:-1], self.out_features)


class SwitchBackLinearVectorwise(SwitchBackLinear):
    """SwitchBack with a scale a row of the weight too, a column in the backward pass.

    Source: Wortsman et al. 2023, Algorithm 4.
    """

    PLAN = SWITCHBACK_Q


class SwitchBackLinearGlobalMemEfficient(SwitchBackLinear):
    """SwitchBack that saves codes alone for the backward pass, and dequantizes them for the weight's gradient.

    Source: Wortsman et al. 2023, Algorithm 3.
    """

    PLAN = SWITCHBACK_M


SwitchBackLinearGlobal = SwitchBackLinear

# Where open_clip looks. The library uses nothing of bitsandbytes: an installed one is imported to put names there.
_PACKAGE, _NN, _MODULE = "bitsandbytes", "bitsandbytes.nn", "bitsandbytes.nn.triton_based_modules"
_LAYERS: dict[str, type[SwitchBackLinear]] = {
    "SwitchBackLinear": SwitchBackLinear,
    "SwitchBackLinearGlobal": SwitchBackLinearGlobal,
    "SwitchBackLinearVectorwise": SwitchBackLinearVectorwise,
    "SwitchBackLinearGlobalMemEfficient": SwitchBackLinearGlobalMemEfficient,
}


def install() -> None:
    """Put the layers where open_clip looks for them, and the optimizers into timm's registry.

    An installed bitsandbytes is imported and keeps everything but these four names. A second call changes nothing.
    """
    timm.register()
    if importlib.util.find_spec(_PACKAGE) is None:
        package, nn = _stand_in(_PACKAGE), _stand_in(_NN)
        package.nn = nn  # type: ignore[attr-defined]
    else:
        nn = importlib.import_module(_NN)
    if not hasattr(nn, "triton_based_modules"):
        nn.triton_based_modules = _stand_in(_MODULE)  # type: ignore[attr-defined]
    for name, layer in _LAYERS.items():
        setattr(nn.triton_based_modules, name, layer)


def _stand_in(name: str) -> ModuleType:
    """A module with nothing in it, which says what it is."""
    module = ModuleType(name, f"A stand-in by {__name__}: see its install().")
    module.__spec__ = ModuleSpec(name, None, origin=__name__)

    def missing(attribute: str) -> NoReturn:
        raise AttributeError(
            f"{name} has no {attribute!r}: it is a stand-in by {__name__}, for {', '.join(_LAYERS)} in {_MODULE}"
        )

    module.__getattr__ = missing  # type: ignore[method-assign]
    sys.modules[name] = module
    return module


def main(arguments: Sequence[str]) -> None:
    """`install()`, then open_clip's training script with these arguments, as ``python -m open_clip_train.main``."""
    install()
    given, sys.argv[1:] = sys.argv[1:], list(arguments)
    try:
        runpy.run_module("open_clip_train.main", run_name="__main__", alter_sys=True)
    finally:
        sys.argv[1:] = given


if __name__ == "__main__":
    # By its name, so that the layers are those of the module and not of a second copy called __main__.
    importlib.import_module("narrowgauge.integrations.open_clip").main(sys.argv[1:])
