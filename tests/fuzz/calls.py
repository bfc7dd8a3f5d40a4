# ruff: noqa: E501
"""A valid call of every public callable: what `test_public_arguments` spoils, one argument after the other.

A new function needs one line in `CALLS`, under the name by which users reach it: what makes its arguments anew, and
what is done with its result, where an argument may be looked at only then. What is no function of a user's input is
in `EXEMPT`, with the reason.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import distributed, formats, linear, recipes, scaling, storage


@dataclass(frozen=True)
class Call:
    """A callable and how to call it.

    Attributes:
        function: what is called.
        arguments: makes arguments that are right, by name.
        then: uses the result.
        skip: arguments that are not spoilt: those that say what an error may be called, or may be anything.
        aliases: what errors call an argument, where that is torch's name for it.
    """

    function: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    then: Callable[[Any], Any] = lambda made: None
    skip: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1.0, 1.0, max(1, torch.Size(shape).numel())).reshape(shape).to(dtype)


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False)).to(dtype)


def pair() -> tuple[Tensor, Tensor]:
    return tensor(8), tensor(8) * 2**-20


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    made = [nn.Parameter(tensor(4, 8, dtype=dtype)), nn.Parameter(tensor(8, dtype=dtype))]
    return made


def stepped(optimizer: Any) -> None:
    """A step of an optimizer, with gradients."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def optimizer(cls: type, **more: Any) -> Call:
    """An optimizer with every keyword that it takes at its default."""
    import inspect

    signature = inspect.signature(cls)
    base = cls.__mro__[1] if "options" in signature.parameters else cls
    given = {
        name: p.default
        for of in (inspect.signature(base), signature)
        for name, p in of.parameters.items()
        if p.default is not p.empty
    }
    if cls is ng.optim.CollageAdamW:
        del given["weights"], given["states"]
    matrices = cls is ng.optim.Muon

    def arguments() -> dict[str, Any]:
        dtype = torch.bfloat16 if cls is ng.optim.CollageAdamW else torch.float32
        return given | {"params": parameters(dtype)[: 1 if matrices else 2]} | more

    return Call(
        cls,
        arguments,
        stepped,
        aliases=(
            ("lr", "learning rate"),
            ("betas", "beta"),
            ("eps", "epsilon"),
            ("weight_decay", "weight decay"),
            ("adjust_lr_fn", "learning rate function"),
            ("params", "optimiz|parameter|can't|iterable"),
        ),
    )


def scaler(cls: type) -> Call:
    def arguments() -> dict[str, Any]:
        extra = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        return {"device": "cpu", "init_scale": 8.0, "enabled": True} | (
            extra if cls is scaling.DynamicLossScaler else {}
        )

    return Call(cls, arguments, lambda made: made.scale(torch.ones(())))


def used(layer: nn.Module) -> None:
    layer(tensor(4, 16)).sum().backward()


def attended(layer: nn.Module) -> None:
    x = tensor(3, 2, 16)
    layer(x, x, x)[0].sum().backward()


def clip() -> nn.Module:
    return _clip()


@functools.cache
def _clip_config() -> Any:
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )


def _clip() -> nn.Module:
    from transformers import CLIPVisionModel

    return CLIPVisionModel(_clip_config())


def checkpoint() -> Path:
    net = model()
    return distributed.save_checkpoint(
        folder() / "run", model=net, optimizer=ng.optim.AdamW(net.parameters()), step=1
    )


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=FOLDER[0]))


FOLDER: list[Path] = []  # where calls write; the test says


def saving() -> dict[str, Any]:
    net = model()
    return {
        "directory": folder() / "run", "model": net, "optimizer": ng.optim.AdamW(net.parameters()), "step": 1,
        "keep_last": 2, "extra": {"a": 1}, "random_states": False, "timeout": 5.0,
    }  # fmt: skip


def loading() -> dict[str, Any]:
    net = model()
    return {
        "path": checkpoint(),
        "model": net,
        "optimizer": ng.optim.AdamW(net.parameters()),
        "random_states": False,
    }


def two() -> dict[str, Any]:
    return {"a": tensor(8), "b": tensor(8) * 2**-12}


def book() -> Tensor:
    return formats.codebook("dynamic")


CALLS: dict[str, Call] = {
    # formats
    "formats.CodeTable": Call(formats.CodeTable, lambda: {"fmt": formats.FP8_E4M3}),
    "formats.FloatFormat": Call(
        formats.FloatFormat,
        lambda: {"name": "mine", "exponent_bits": 4, "mantissa_bits": 3, "has_infinity": True, "dtype": None,
                 "has_nan": True},
        lambda made: (made.max, made.encode(1.0), formats.round_to(tensor(3), made)),
    ),
    "formats.FloatFormat.encode": Call(formats.FP8_E4M3.encode, lambda: {"value": 1.5}),
    "formats.FloatFormat.decode": Call(formats.FP8_E4M3.decode, lambda: {"code": 7}),
    "formats.FloatFormat.ulp": Call(formats.FP8_E4M3.ulp, lambda: {"x": 1.5}),
    "formats.codebook": Call(
        formats.codebook, lambda: {"name": "quantile", "signed": True, "bits": 8, "data": tensor(512)}
    ),
    "formats.codebook_map": Call(formats.codebook_map, lambda: {"name": "linear"}),
    "formats.codebook_names": Call(formats.codebook_names, dict),
    "formats.coder": Call(
        formats.coder, lambda: {"name": "linear", "signed": True, "device": torch.device("cpu"), "bits": 8}
    ),
    "formats.random_bits": Call(
        formats.random_bits, lambda: {"count": 8, "seed": 0, "stream": 0, "step": 1, "offset": 0, "device": "cpu"}
    ),
    "formats.random_halves": Call(
        formats.random_halves,
        lambda: {"count": 8, "seed": 0, "stream": 0, "step": 1, "purpose": 0, "device": torch.device("cpu"),
                 "offset": 0},
    ),
    "formats.round_to": Call(
        formats.round_to,
        lambda: {"x": tensor(8), "fmt": formats.FP8_E4M3, "rounding": "stochastic",
                 "generator": torch.Generator().manual_seed(0)},
    ),
    "formats.round_with_bits": Call(
        formats.round_with_bits,
        lambda: {"x": tensor(8), "fmt": formats.FP8_E4M3, "bits": torch.arange(8, dtype=torch.int32)},
    ),
    # storage
    "storage.estimate_quantiles": Call(storage.estimate_quantiles, lambda: {"x": tensor(600), "count": 16}),
    "storage.fast_two_sum": Call(storage.fast_two_sum, two),
    "storage.two_sum": Call(storage.two_sum, two),
    "storage.two_prod": Call(storage.two_prod, two),
    "storage.two_prod_fma": Call(storage.two_prod_fma, two),
    "storage.split": Call(storage.split, lambda: {"a": tensor(8)}),
    "storage.grow": Call(storage.grow, lambda: {"x": pair(), "a": tensor(8)}),
    "storage.mul": Call(storage.mul, lambda: {"a": pair(), "b": pair()}),
    "storage.scaling": Call(storage.scaling, lambda: {"a": pair(), "v": tensor(8)}),
    "storage.mark_states": Call(storage.mark_states, lambda: {"p": nn.Parameter(tensor(8)), "states": "fp32"}),
    "storage.marked_states": Call(storage.marked_states, lambda: {"p": nn.Parameter(tensor(8))}),
    "storage.quantize": Call(
        storage.quantize,
        lambda: {"x": tensor(64), "codebook": book(), "block_size": 32, "rounding": "stochastic",
                 "generator": torch.Generator().manual_seed(0)},
        lambda made: made.dequantize(),
    ),
    "storage.state_storage": Call(storage.state_storage, lambda: {"name": "8bit"}, aliases=(("name", "states"),)),
    "storage.state_storages": Call(storage.state_storages, dict),
    "storage.weight_storage": Call(storage.weight_storage, lambda: {"name": "kahan"}, aliases=(("name", "weights"),)),
    "storage.weight_storages": Call(storage.weight_storages, dict),
    # optim
    **{
        f"optim.{name}": optimizer(getattr(ng.optim, name))
        for name in ("LAMB", "LARS", "SGD", "Adagrad", "Adagrad8bit", "Adam", "Adam8bit", "AdamW", "AdamW8bit",
                     "CollageAdamW", "LAMB8bit", "LARS8bit", "Lion", "Lion8bit", "Muon", "SGD8bit", "StableAdamW")
    },
    "optim.split_decay": Call(ng.optim.split_decay, lambda: {"model": model(), "weight_decay": 0.1}),
    "optim.QuantizedGradients": Call(
        ng.optim.QuantizedGradients,
        lambda: {"optimizer": ng.optim.AdamW(parameters()), "codebook": "dynamic", "rounding": "nearest",
                 "error_feedback": True, "block_size": 64, "seed": 0},
    ),
    "optim.step_in_backward": Call(
        ng.optim.step_in_backward, lambda: {"model": model(), "optimizer": ng.optim.AdamW, "lr": 1e-3},
        aliases=(("lr", "learning rate"),),
    ),
    # linear
    "linear.EightBit": Call(
        linear.EightBit, lambda: {"left": "row", "right": "tensor", "left_format": "int8", "right_format": "int8"}
    ),
    "linear.LinearPlan": Call(
        linear.LinearPlan,
        lambda: {"output": linear.EightBit("row", "tensor"), "grad_input": linear.EightBit("row", "tensor"),
                 "grad_weight": None, "saved": "input", "arithmetic": "real", "tensor_absmax": "step", "decay": 0.9,
                 "accumulation": "fast", "name": "mine"},
        lambda made: linear.linear(tensor(4, 16), tensor(16, 16), None, made),
    ),
    "linear.LowPrecisionLinear": Call(
        linear.LowPrecisionLinear,
        lambda: {"in_features": 16, "out_features": 16, "bias": True, "plan": linear.SWITCHBACK, "device": None,
                 "dtype": None},
    ),
    "linear.linear": Call(
        linear.linear,
        lambda: {"input": tensor(4, 16), "weight": tensor(16, 16), "bias": tensor(16), "plan": linear.SWITCHBACK,
                 "averages": None},
    ),
    "linear.named_plan": Call(linear.named_plan, lambda: {"text": "SWITCHBACK"}, aliases=(("text", "plan"),)),
    "linear.quantize": Call(
        linear.quantize, lambda: {"x": tensor(4, 16), "scaling": "row", "format": "int8", "absmax": None}
    ),
    "linear.swap_linears": Call(
        linear.swap_linears,
        lambda: {"model": model(), "plan": linear.SWITCHBACK, "keep": ("lm_head",), "min_features": 16,
                 "tokens": None, "launched": True, "step": None},
    ),
    # nn
    "nn.HeadLayerNorm": Call(ng.nn.HeadLayerNorm, lambda: {"head_dim": 16, "eps": 1e-6}, used),
    "nn.LayerScale": Call(ng.nn.LayerScale, lambda: {"dim": 16, "init": 0.0, "device": None, "dtype": None}, lambda made: None),
    "nn.PatchNorm": Call(ng.nn.PatchNorm, lambda: {"features": 16, "where": "after", "eps": 1e-5}),
    "nn.StableEmbedding": Call(ng.nn.StableEmbedding, lambda: {"num_embeddings": 8, "embedding_dim": 4}),
    "nn.add_layer_scale": Call(ng.nn.add_layer_scale, lambda: {"model": clip(), "init": 0.0}),
    "nn.add_patch_dropout": Call(ng.nn.add_patch_dropout, lambda: {"model": clip(), "share": 0.5}),
    "nn.add_patch_norm": Call(ng.nn.add_patch_norm, lambda: {"model": clip(), "where": "after", "eps": 1e-5}),
    "nn.add_qk_norm": Call(ng.nn.add_qk_norm, lambda: {"model": clip(), "eps": 1e-6}),
    "nn.drop_patches": Call(ng.nn.drop_patches, lambda: {"tokens": tensor(2, 5, 3), "share": 0.5}),
    "nn.patches_left": Call(ng.nn.patches_left, lambda: {"patches": 4, "share": 0.5}),
    # scaling
    "scaling.DynamicLossScaler": scaler(scaling.DynamicLossScaler),
    "scaling.StaticLossScaler": scaler(scaling.StaticLossScaler),
    "scaling.TensorLossScaler": scaler(scaling.TensorLossScaler),
    # distributed
    "distributed.CPUOffload": Call(
        distributed.CPUOffload,
        lambda: {"optimizer": ng.optim.AdamW, "params": parameters(), "transfer": "step", "gradients": "kept",
                 "lr": 1e-3},
        stepped,
        aliases=(("lr", "learning rate"), ("params", "optimiz|parameter|can't|iterable")),
    ),
    "distributed.compressed_allreduce_hook": Call(
        distributed.compressed_allreduce_hook,
        lambda: {"codebook": "dynamic", "error_feedback": True, "rounding": "nearest", "bits": None,
                 "block_size": 256, "min_compressed_size": 4096, "exempt": None, "process_group": None, "seed": 0,
                 "memory_dtype": torch.float32},
    ),
    "distributed.export_checkpoint": Call(
        distributed.export_checkpoint, lambda: {"path": checkpoint(), "file": folder() / "whole.pt"}
    ),
    "distributed.latest_checkpoint": Call(
        distributed.latest_checkpoint, lambda: {"directory": checkpoint().parent}
    ),
    "distributed.load_checkpoint": Call(distributed.load_checkpoint, loading),
    "distributed.save_checkpoint": Call(distributed.save_checkpoint, saving, skip=("extra",)),
    "distributed.save_checkpoint_async": Call(
        distributed.save_checkpoint_async, saving, lambda made: made.wait(), skip=("extra",)
    ),
    # recipes
    "recipes.Recipe": Call(
        recipes.Recipe,
        lambda: {"name": "mine", "title": "Mine", "dtype": torch.bfloat16, "weights": "kahan", "states": "fp32",
                 "letters": None, "optimizer": ng.optim.AdamW},
        lambda made: (made.bytes_per_parameter(), made.apply(model())),
    ),
    "recipes.Recipe.apply": Call(recipes.get("bf16").apply, lambda: {"model": model(), "lr": 1e-3}, stepped,
                                 aliases=(("lr", "learning rate"),)),
    "recipes.cast": Call(recipes.cast, lambda: {"model": model(), "dtype": torch.bfloat16}),
    "recipes.get": Call(recipes.get, lambda: {"name": "bf16"}, aliases=(("name", "recipe"),)),
    "recipes.names": Call(recipes.names, dict),
    "recipes.plan_memory": Call(
        recipes.plan_memory,
        lambda: {"model_or_config": 10**6, "recipe": "bf16", "batch": 1, "sequence": 64, "device_memory": "1GB",
                 "linear": None, "checkpointing": False, "gpus": 1, "parallel": "ddp", "accumulate": False,
                 "loss": None},
    ),
}  # fmt: skip

_RESULT = "a result: functions make it, and no user does"
_TYPE = "a contract that code is written against; nothing is called"
_INNER = "made by a function that checks what it is given"
EXEMPT = {
    **dict.fromkeys(
        ["formats.Binade", "formats.CodeRow", "formats.NotableRow", "storage.Quantized", "linear.ScaledCodes",
         "linear.SwapReport", "nn.AddedLayerScales", "nn.AddedQKNorms", "optim.Description", "optim.UpdateStats",
         "distributed.LoadedCheckpoint", "distributed.PendingCheckpoint", "distributed.DamagedCheckpointError",
         "recipes.MemoryPlan"],
        _RESULT,
    ),
    **dict.fromkeys(
        ["rules.Arithmetic", "rules.HasSecondMoment", "rules.Rule", "optim.Options", "nn.PatchPlace",
         "storage.StateStorage", "storage.WeightStorage"],
        _TYPE,
    ),
    **dict.fromkeys(
        ["formats.CodebookMap", "formats.Coder", "storage.Codec", "storage.StateContext", "storage.Word", "rules.Slot",
         "rules.Muon",
         "rules.ClipUpdates", "rules.clipped", "rules.has_terms", "rules.squared_ratio", "optim.NarrowOptimizer",
         "scaling.LossScaler", "distributed.CompressedAllReduce"],
        _INNER,
    ),
    "linear.LowPrecisionConv1D": "transformers' Conv1D, whose arguments are its own; swapping makes it",
    "linear.LowPrecisionMultiheadAttention": "torch's, whose arguments are its own; swapping makes it",
    "formats.register_codebook": "what it is given stays for the whole process; tests/formats/test_codebooks.py has it",
    "storage.register_state": "what it is given stays for the whole process; tests/storage/test_states.py has it",
    "linear.tune": "times kernels of a GPU",
}  # fmt: skip
