"""What `bench optimizers` measures: optimizers, and the lists of tensors that they step.

Peers are named, not imported: the library knows none of them. Rows stand beside those that keep about as much.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

import torch
from torch import nn

from narrowgauge import optim, recipes
from narrowgauge.cli._files import UsageError
from narrowgauge.storage import Float8Weight

_FP32, _BF16 = torch.float32, torch.bfloat16
_OPTIM, _BITSANDBYTES = optim.__name__, "bitsandbytes.optim"
# What is read before anything is written: to know that all is finite, for update clipping, for the norms of LARS
# and LAMB.
_GRAD, _GRAD_AND_V, _ALL = ("grad",), ("grad", "v"), ("grad", "weight", "state")
_NORMS = ("grad", "weight")
_CPU, _CUDA = ("cpu",), ("cuda",)


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return metadata.version({"optimi": "torch-optimi"}.get(package, package))
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Row:
    """One optimizer.

    Attributes:
        name: of the row.
        what: what is kept, in a line.
        dtype: of parameters and gradients.
        module, optimizer: where its class is.
        options: its arguments.
        before: what a step reads before it can write, and so reads twice: ``"grad"``, ``"weight"``, ``"state"``, or
            one moment by its name in the optimizer's state.
        devices: where it runs.
        group: the rows that it is compared with.
        gauges: how ours are switched.
        moments: the dtype of Adam's moments if they are put into the state of torch's before its first step.
    """

    name: str
    what: str
    dtype: torch.dtype
    module: str
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    group: str = ""
    gauges: bool = False
    moments: torch.dtype | None = None

    @property
    def family(self) -> str:
        """The package."""
        return self.module.partition(".")[0]

    @property
    def peer(self) -> bool:
        """Whether it is another library's, or torch's own as another library uses it."""
        return self.family not in ("narrowgauge", "torch") or self.moments is not None

    def make(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer."""
        kind = getattr(importlib.import_module(self.module), self.optimizer)
        with warnings.catch_warnings():  # plain weights are asked for, to be timed
            warnings.filterwarnings("ignore", "weights='plain'", UserWarning)
            made: torch.optim.Optimizer = kind(parameters, **self.options)
        if self.gauges:
            made.gauges = True  # type: ignore[attr-defined]
        for p in parameters if self.moments is not None else ():
            moments = {name: torch.zeros_like(p, dtype=self.moments) for name in ("exp_avg", "exp_avg_sq")}
            made.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        return made


def apply_recipe(parameters: list[nn.Parameter], name: str) -> torch.optim.Optimizer:
    """The optimizer of a recipe, as two lines of a training script make it."""
    return recipes.get(name).apply(nn.ParameterList(parameters), decay_all=True)


def adamw_of_codes(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """AdamW over the same weights as codes of float8, with the same gradients."""
    weights = [nn.Parameter(Float8Weight.of(p)) for p in parameters]
    for weight, p in zip(weights, parameters, strict=True):
        weight.grad = p.grad
    return optim.AdamW(weights, **options)


def _ours(
    name: str, what: str, optimizer: str = "AdamW", dtype: torch.dtype = _BF16, before: tuple[str, ...] = (),
    **options: Any,
) -> Row:  # fmt: skip
    return Row(
        name,
        what,
        dtype,
        _OPTIM,
        optimizer,
        {"lr": 1e-3, "nonfinite": "propagate", "weights": "plain"} | options,
        before,
    )


def _skipping(row: Row) -> Row:
    """The row with `nonfinite="skip"`: all of a gradient is read before it is known to be finite."""
    name, options = f"{row.name}, skip", {**row.options, "nonfinite": "skip"}
    return replace(row, name=name, what="the same, nonfinite='skip'", options=options, before=_GRAD)


def _gauged(row: Row) -> Row:
    """The row with gauges on."""
    what = "the same, every element measured"
    return replace(row, name=f"{row.name}, gauges on", what=what, gauges=True, devices=_CUDA)


def _group(group: str, *rows: Row) -> tuple[Row, ...]:
    return tuple(replace(row, group=group) for row in rows)


def _six_bits(weights: str) -> Row:
    what = f"{weights}, m in 4 bits, v in 8, nonfinite='skip'"
    options = {"name": f"adamw6bit-{weights}"}
    return Row(f"recipe adamw6bit-{weights}", what, _BF16, __name__, apply_recipe.__name__, options, _GRAD)


_STABLE, _FUSED, _FOREACH, _LR = "StableAdamW", {"fused": True}, {"foreach": True}, {"lr": 1e-3}
# Asked for, because optimi's own choice is not always the faster one: on a GPU its AdamW went without kernels, and
# on a CPU they are tried wherever triton is installed.
_TRITON, _NO_TRITON = {**_LR, "triton": True}, {**_LR, "triton": False}
# A gradient that a step takes away would be missing in the next one.
_KEEPING = {**_LR, "consume_grad": False}
_ECC = {**_KEEPING, "ecc": "bf16+8", "param_ecc": "bf16+8"}
_PLAIN = _ours("AdamW 8bit", "bf16, the paper's 8-bit states", states="8bit")
_WIDER = (
    _ours("AdamW 8bit, split8", "24-bit weights, the paper's states", states="8bit", weights="split8"),
    _ours("AdamW 8bit, split", "exact fp32 weights in two words", states="8bit", weights="split"),
    _ours("AdamW 8bit, expansion", "weights as expansions", states="8bit", weights="expansion"),
)
_ROWS = (
    *_group(
        "AdamW, narrow states",
        _PLAIN,
        _skipping(_PLAIN),
        _gauged(_PLAIN),
        _ours("AdamW log8", "bf16, logarithmic 8-bit states", states="log8"),
        Row(
            "AdamW log8, skip", "bf16, log8, nonfinite='skip'", _BF16, _OPTIM, "AdamW8bit",
            {"weights": "plain"}, _GRAD,
        ),
        _ours("AdamW fp8", "bf16, float8 states", states="fp8"),
        Row("bitsandbytes AdamW8bit", "bf16, 8-bit states", _BF16, _BITSANDBYTES, "AdamW8bit"),
        Row("torchao AdamW8bit", "bf16, 8-bit states", _BF16, "torchao.optim", "AdamW8bit"),
        Row("torchao AdamW4bit", "bf16, 4-bit states", _BF16, "torchao.optim", "AdamW4bit"),
        Row("torchao AdamWFp8", "bf16, float8 states", _BF16, "torchao.optim", "AdamWFp8"),
    ),
    *_group(
        "AdamW, narrow states, wider weights",
        *(each for row in _WIDER for each in (row, _skipping(row))),
        _gauged(_WIDER[1]),
        _ours("AdamW log8, split8", "24-bit weights, logarithmic states", states="log8", weights="split8"),
        Row(
            "AdamW log8, fp8split8", "12-bit weights, their codes float8", _BF16, __name__, adamw_of_codes.__name__,
            {"lr": 1e-3, "nonfinite": "propagate", "states": "log8"},
        ),
        Row(
            "recipe adamw8bit-split8", "24-bit weights, log8, nonfinite='skip'", _BF16, __name__,
            apply_recipe.__name__, {"name": "adamw8bit-split8"}, _GRAD,
        ),
        *map(_six_bits, ("split8", "split4", "stochastic")),
        Row("FlashAdamW", "24-bit weights, 8-bit states", _BF16, "flashoptim", "FlashAdamW", _LR, (), _CUDA),
        Row(
            "FlashAdamW, 32 bits", "32-bit weights, 8-bit states", _BF16, "flashoptim", "FlashAdamW",
            {**_LR, "master_weight_bits": 32}, (), _CUDA,
        ),
        Row(
            "HeavyBall AdamW, bf16+8", "24-bit weights and states, compiled", _BF16, "heavyball", "AdamW", _ECC, (),
            _CUDA,
        ),
    ),
    *_group(
        "AdamW, states of 16 and 32 bits",
        _ours("Collage-light", "expansions, bf16 states", states="bf16", weights="expansion"),
        _ours("Collage-plus", "expansions, v too", states="expansion", weights="expansion"),
        _ours("AdamW bf16", "bf16, bf16 states", states="bf16"),
        _ours("AdamW fp32 states", "bf16, fp32 states"),
        _ours("AdamW fp32", "everything in fp32", dtype=_FP32),
        Row("torch AdamW fused, bf16", "everything in bf16", _BF16, "torch.optim", "AdamW", _FUSED),
        Row("torch AdamW fused, fp32", "everything in fp32", _FP32, "torch.optim", "AdamW", _FUSED),
        Row(
            "torch AdamW fused, bf16 states", "fp32 weights, torchtitan's way; not in torch 2.11", _FP32,
            "torch.optim", "AdamW", _FUSED, (), _CUDA, moments=_BF16,
        ),
        Row("torch AdamW foreach, fp32", "everything in fp32", _FP32, "torch.optim", "AdamW", _FOREACH),
        Row("optimi AdamW", "Kahan-summed bf16", _BF16, "optimi", "AdamW", _TRITON, (), _CUDA),
        Row("optimi AdamW", "Kahan-summed bf16", _BF16, "optimi", "AdamW", _NO_TRITON, (), _CPU),
        Row("HeavyBall AdamW", "bf16, fp32 states, compiled", _BF16, "heavyball", "AdamW", _KEEPING, (), _CUDA),
    ),
    *_group(
        "Sums over a tensor first",
        _ours("StableAdamW 8bit", "8-bit states, update clipping", _STABLE, before=_GRAD_AND_V, states="8bit"),
        _ours("StableAdamW bf16", "all bf16, update clipping", _STABLE, before=_GRAD_AND_V, states="bf16"),
        _ours("StableAdamW fp32", "all fp32, update clipping", _STABLE, _FP32, _GRAD_AND_V),
        _ours("LAMB 8bit", "bf16, the paper's 8-bit states", "LAMB", before=_ALL, states="8bit"),
        _ours("LAMB log8", "bf16, logarithmic 8-bit states", "LAMB", before=_ALL, states="log8"),
        _ours("LAMB fp32", "everything in fp32", "LAMB", _FP32, _ALL),
        _ours("LARS 8bit", "bf16, the paper's 8-bit momentum", "LARS", before=_NORMS, states="8bit"),
        _ours("LARS fp32", "everything in fp32", "LARS", _FP32, _NORMS),
        Row(
            "optimi StableAdamW", "Kahan-summed bf16, update clipping", _BF16, "optimi", _STABLE,
            _TRITON, ("grad", "exp_avg_sq"), _CUDA,
        ),
        Row(
            "optimi StableAdamW", "Kahan-summed bf16, update clipping", _BF16, "optimi", _STABLE,
            _NO_TRITON, ("grad", "exp_avg_sq"), _CPU,
        ),
    ),
    *_group(
        "One moment, or three",
        _ours("SGD 8bit", "bf16, the paper's 8-bit momentum", "SGD", states="8bit", momentum=0.9),
        _ours("SGD log8", "bf16, logarithmic momentum", "SGD", states="log8", momentum=0.9),
        _ours("SGD fp32", "everything in fp32", "SGD", _FP32, momentum=0.9),
        Row("torch SGD fused, fp32", "everything in fp32", _FP32, "torch.optim", "SGD", _FUSED | {"momentum": 0.9}),
        _ours("Lion 8bit", "bf16, the paper's 8-bit momentum", "Lion", states="8bit"),
        _ours("Lion log8", "bf16, logarithmic momentum", "Lion", states="log8"),
        Row(
            "bitsandbytes SGD8bit", "bf16, 8-bit momentum", _BF16, _BITSANDBYTES, "SGD8bit",
            {**_LR, "momentum": 0.9},
        ),
        Row("bitsandbytes Lion8bit", "bf16, 8-bit momentum", _BF16, _BITSANDBYTES, "Lion8bit", _LR),
        Row("bitsandbytes AdEMAMix8bit", "bf16, three 8-bit moments", _BF16, _BITSANDBYTES, "AdEMAMix8bit"),
        Row(
            "FlashSGD", "24-bit weights, 8-bit momentum", _BF16, "flashoptim", "FlashSGD",
            {**_LR, "momentum": 0.9}, (), _CUDA,
        ),
        Row("FlashLion", "24-bit weights, 8-bit momentum", _BF16, "flashoptim", "FlashLion", _LR, (), _CUDA),
    ),
)  # fmt: skip


def rows(device: torch.device) -> tuple[Row, ...]:
    """All rows for a device; of each group ours first."""
    return tuple(row for row in _ROWS if device.type in row.devices)


@dataclass(frozen=True)
class ParameterList:
    """Tensors to step: the list's name, what they are, and what makes their shapes."""

    name: str
    title: str
    shapes: Callable[[], list[tuple[int, ...]]]

    def counts(self) -> dict[str, int]:
        """How many tensors and parameters."""
        shapes = self.shapes()
        return {"tensors": len(shapes), "parameters": sum(map(math.prod, shapes))}


def _shapes(model: str, config: Callable[[Any], Any], **options: Any) -> list[tuple[int, ...]]:
    import transformers

    with torch.device("meta"):
        made = getattr(transformers, model)(config(transformers), **options)
    return [tuple(p.shape) for p in made.parameters()]


def _gpt2(layers: int, width: int, heads: int) -> list[tuple[int, ...]]:
    return _shapes("GPT2LMHeadModel", lambda of: of.GPT2Config(n_layer=layers, n_embd=width, n_head=heads))


def _vit_huge() -> list[tuple[int, ...]]:
    sizes = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120}
    return _shapes("ViTModel", lambda of: of.ViTConfig(**sizes, patch_size=14), add_pooling_layer=False)


LISTS = {
    of.name: of
    for of in (
        ParameterList("big", "16 tensors of 2^26", lambda: [(1 << 13, 1 << 13)] * 16),
        ParameterList("matrix", "one tensor of 4096 x 4096", lambda: [(4096, 4096)]),
        ParameterList("many-64", "300 tensors of 64", lambda: [(64,)] * 300),
        ParameterList("many-768", "148 tensors of 768", lambda: [(768,)] * 148),
        ParameterList("gpt2", "GPT-2 small", lambda: _gpt2(12, 768, 12)),
        ParameterList("gpt2-medium", "GPT-2 medium", lambda: _gpt2(24, 1024, 16)),
        ParameterList("vit-huge", "ViT-Huge/14", _vit_huge),
    )
}
_SHAPE = re.compile(r"0*[1-9]\d*(x0*[1-9]\d*)*")


def parameter_list(name: str) -> ParameterList:
    """A list by its name, or one tensor by its shape: 4096x4096."""
    if name in LISTS:
        return LISTS[name]
    if _SHAPE.fullmatch(name):
        shape = tuple(map(int, name.split("x")))
        return ParameterList(name, f"one tensor of {name.replace('x', ' x ')}", lambda: [shape])
    raise UsageError(f"--lists must be {', '.join(LISTS)}, or a shape such as 4096x4096, got {name!r}")
