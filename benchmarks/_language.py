"""A step of a language model: the models in their sizes, other libraries' layers, and the kernels of a step.

The classes are transformers', from a configuration, with random weights. GPT-2's layers of transposed weights
become `nn.Linear`, which all libraries convert. Each block is compiled by itself, and the head with the loss, as
torchtitan compiles LLaMA; blocks share what was compiled for the first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from _script import MODES
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from narrowgauge.cli._bench._linear import Layer, peers
from narrowgauge.trainers._models import configuration

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a language model.

    Attributes:
        blocks: that are trained; `whole`: those of the model that the sizes are of.
        width, hidden: of the residual stream, and inside the MLP.
        heads, kv_heads: of queries, and of keys and values; GPT-2 has no number of its own for these.
        sequence: tokens of a window.
        preset: of `narrowgauge.trainers`, for GPT-2; else the model is a LLaMA.
    """

    blocks: int
    whole: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    sequence: int = 2048
    vocabulary: int = 32000
    preset: str = ""

    def config(self, blocks: int) -> Any:
        """transformers' configuration of so many blocks."""
        if self.preset:
            made = configuration(self.preset, vocabulary=self.vocabulary, sequence=self.sequence)
            made.n_layer = blocks
            return made
        return LlamaConfig(
            num_hidden_layers=blocks, hidden_size=self.width, intermediate_size=self.hidden,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocabulary,
            max_position_embeddings=self.sequence, use_cache=False, pad_token_id=None,
        )  # fmt: skip


# 16 blocks of 8B: with 8-bit codes of their weights beside them, those and what 8,192 tokens leave take 70 GB.
MODELS = {
    "llama-1b": Sizes(16, 16, 2048, 8192, 32, 8),
    "llama-8b": Sizes(16, 32, 4096, 14336, 32, 8),
    "gpt2-large": Sizes(36, 36, 1280, 5120, 20, 20, 1024, 50304, "gpt2-large"),
    "tiny": Sizes(2, 2, 64, 128, 4, 2, 16, 512),
}


@dataclass(frozen=True)
class EagerLayer(Layer):
    """A layer whose functions `torch.compile` cannot trace: with it a step is not compiled."""


@dataclass(frozen=True)
class BlockwiseLayer(EagerLayer):
    """torchao's prototype of block-wise scaling."""

    def converted(self, linear: nn.Linear) -> nn.Module:
        module = importlib.import_module("torchao.prototype.blockwise_fp8_training.linear")
        return cast(nn.Module, module.Float8BlockwiseLinear.from_float(linear))


@dataclass(frozen=True)
class TransformerEngineLayer(EagerLayer):
    """TransformerEngine's linear layer by one of its recipes."""

    def converted(self, linear: nn.Linear) -> nn.Module:
        library = importlib.import_module("transformer_engine.pytorch")
        recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), self.recipe)()
        bias = linear.bias is not None
        sizes = linear.in_features, linear.out_features
        made = library.Linear(*sizes, bias=bias, params_dtype=linear.weight.dtype, device="meta")
        made.weight = linear.weight
        if bias:
            made.bias = linear.bias
        return _Autocast(made, lambda: library.fp8_autocast(enabled=True, fp8_recipe=recipe))


class _Autocast(nn.Module):
    """A layer within a context of its own."""

    def __init__(self, layer: nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self.context = layer, context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return cast(Tensor, self.layer(x))


def other_layers() -> tuple[Layer, ...]:
    """The layers of other libraries, installed or not."""
    engine, three = "transformer_engine", "float8, all three multiplies, step not compiled"
    return (
        *(peer for peer in peers() if peer.peer == "torchao" and peer.recipe != "int8"),
        BlockwiseLayer("torchao blockwise", f"{three}, by blocks", 3, peer="torchao"),
        TransformerEngineLayer(f"{engine} current", three, 3, peer=engine, recipe="Float8CurrentScaling"),
        TransformerEngineLayer(
            f"{engine} block", f"{three}, by blocks", 3, peer=engine, recipe="Float8BlockScaling"
        ),
    )


def language_model(of: Sizes, device: torch.device, blocks: int | None = None, seed: int = 0) -> nn.Module:
    """The model in bf16 and training mode, nothing downloaded."""
    torch.manual_seed(seed)
    with torch.device(device):
        config = of.config(of.blocks if blocks is None else blocks)
        built: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16
        )
    for parent in list(built.modules()):
        for name, own in list(parent.named_children()):
            if isinstance(own, Conv1D):
                setattr(parent, name, _transposed(own))
    return built.train()


def _transposed(own: Conv1D) -> nn.Linear:
    """`nn.Linear` of the numbers of a `Conv1D`, whose weight has its output features last."""
    inputs, outputs = own.weight.shape
    made = nn.Linear(inputs, outputs, device="meta")
    made.weight = nn.Parameter(own.weight.detach().t().contiguous())
    made.bias = own.bias
    return made


def blocks_of(model: Any) -> nn.ModuleList:
    """The blocks, whose layers are converted; the embedding and the head stay."""
    base = model.base_model
    found: nn.ModuleList = base.layers if hasattr(base, "layers") else base.h
    return found


def loss_of(model: nn.Module, how: str, backend: str = "inductor", mode: str = "default") -> Step:
    """What computes the loss of windows, (batch, sequence + 1) to a scalar, in nats a token.

    Args:
        model: of `language_model`.
        how: ``"blocks"``: each is compiled, and the head with the loss; ``"model"``: all in one; ``"none"``.
        backend: of `torch.compile`.
        mode: of `MODES`.
    """
    options: dict[str, Any] = {"backend": backend, "dynamic": False, **MODES[mode]}
    base, head = cast(Any, model).base_model, cast(Any, model).get_output_embeddings()
    last = _head_loss
    if how == "blocks":
        for block in blocks_of(model):
            block.compile(**options)
        last = torch.compile(_head_loss, **options)

    def loss(windows: Tensor) -> Tensor:
        hidden = base(input_ids=windows[:, :-1], use_cache=False).last_hidden_state
        return last(head, hidden, windows[:, 1:])

    return torch.compile(loss, **options) if how == "model" else loss


def _head_loss(head: nn.Module, hidden: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1).float(), wanted.flatten())


def windows_of(of: Sizes, tokens: int, device: torch.device) -> Tensor:
    """Random windows of so many tokens, and one more each, which is only predicted."""
    return torch.randint(of.vocabulary, (tokens // of.sequence, of.sequence + 1), device=device)


def kernels_of(run: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of a run on a GPU by kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    return by_kernel(profiler.events())


def by_kernel(events: Iterable[Any]) -> dict[str, float]:
    """The same of a profile, in which annotations stand beside the kernels in them."""
    found: dict[str, float] = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            found[event.name] = found.get(event.name, 0.0) + event.self_device_time_total / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1]))
