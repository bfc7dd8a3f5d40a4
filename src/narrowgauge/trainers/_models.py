"""Small and well-known language models, made from a configuration and a seed.

A preset is a value: the sizes of a GPT-2, LLaMA, BERT or RoBERTa, without vocabulary and sequence, which belong to
the data. The first two are causal (every token is predicted from those before it), the others masked (covered
tokens are predicted from all around them), and have two more tokens, before the text's: `PAD` and `MASK`. Nothing
is downloaded. Dropout is off, so that nothing is random after the start. One seed gives one set of initial weights,
in fp32 and drawn on the CPU, so that every recipe on every device starts from the same point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.trainers._image_models import IMAGE_PRESETS, ImageObjective, ImageSizes
from narrowgauge.trainers._tokens import END_OF_TEXT, at_least

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


Objective = Literal["causal", "masked"]

# The tokens that masked models have ahead of the text's. Padding comes first: RoBERTa counts positions from it.
PAD, MASK = 0, 1
SPECIAL = 2


class ModelError(ValueError):
    """There is no such model; the message is one line that lists the presets."""


@dataclass(frozen=True)
class Preset:
    """The sizes of a transformer.

    Attributes:
        family: whose architecture: GPT-2 (LayerNorm, GELU, learned positions, the output tied to the embedding),
            LLaMA (RMSNorm, SwiGLU, rotary positions, an output of its own), BERT (LayerNorm after each branch,
            learned positions, the output tied) or RoBERTa (BERT without segments).
        layers: number of blocks.
        width: of the residual stream.
        heads: of the attention; their number divides the width.
        hidden: width inside the feed-forward layer.
        positions: the least number of positions; a longer sequence gets as many as it needs.
        initializer_range: standard deviation of the initial weights.
    """

    family: Literal["gpt2", "llama", "bert", "roberta"]
    layers: int
    width: int
    heads: int
    hidden: int
    positions: int = 2
    initializer_range: float = 0.02

    @property
    def objective(self) -> Objective:
        """How such a model is trained."""
        return "causal" if self.family in ("gpt2", "llama") else "masked"


# gpt2*: Radford et al. 2019. llama-130m to llama-1b: the configurations of GaLore (Zhao et al. 2024), used for
# low-precision optimizers since, but that the last's hidden width is 5504, for 5461, which is odd. bert*: Devlin et
# al. 2019; roberta: Liu et al. 2019. The others are small enough for a CPU.
_PRESETS = {
    "micro": Preset("gpt2", layers=2, width=96, heads=4, hidden=384),
    "mini": Preset("gpt2", layers=4, width=128, heads=4, hidden=512),
    "tiny": Preset("gpt2", layers=6, width=256, heads=8, hidden=1024),
    "gpt2": Preset("gpt2", layers=12, width=768, heads=12, hidden=3072, positions=1024),
    "gpt2-medium": Preset("gpt2", layers=24, width=1024, heads=16, hidden=4096, positions=1024),
    "gpt2-large": Preset("gpt2", layers=36, width=1280, heads=20, hidden=5120, positions=1024),
    "gpt2-xl": Preset("gpt2", layers=48, width=1600, heads=25, hidden=6400, positions=1024),
    "llama-micro": Preset("llama", layers=2, width=96, heads=4, hidden=256),
    "llama-130m": Preset("llama", layers=12, width=768, heads=12, hidden=2048, positions=1024),
    "llama-350m": Preset("llama", layers=24, width=1024, heads=16, hidden=2736, positions=1024),
    "llama-1b": Preset("llama", layers=24, width=2048, heads=32, hidden=5504, positions=1024),
    "bert-micro": Preset("bert", layers=2, width=96, heads=4, hidden=384),
    "bert": Preset("bert", layers=12, width=768, heads=12, hidden=3072, positions=512),
    "bert-large": Preset("bert", layers=24, width=1024, heads=16, hidden=4096, positions=512),
    "roberta-micro": Preset("roberta", layers=2, width=96, heads=4, hidden=384),
    "roberta": Preset("roberta", layers=12, width=768, heads=12, hidden=3072, positions=512),
}


def presets(objective: Objective | ImageObjective | None = "causal") -> tuple[str, ...]:
    """Names of the presets of an objective, or all for None, each family from small to large."""
    every: dict[str, Preset | ImageSizes] = {**_PRESETS, **IMAGE_PRESETS}
    return tuple(name for name, sizes in every.items() if objective in (None, sizes.objective))


def preset(name: str) -> Preset | ImageSizes:
    """A preset by name; a ModelError if there is none of that name."""
    found = _PRESETS.get(name) or IMAGE_PRESETS.get(name)
    if found is None:
        raise ModelError(f"--model must be one of {', '.join(presets(None))}, got {name!r}")
    return found


def language_preset(model: str | Preset) -> Preset:
    """The preset of a language model, by name or as it is; a ModelError if there is none of that name."""
    found = preset(model) if isinstance(model, str) else model
    if not isinstance(found, Preset):
        raise ModelError(f"--model must be a language model: one of {', '.join(_PRESETS)}, got {model!r}")
    return found


def build_model(
    model: str | Preset, *, vocabulary: int, sequence: int, seed: int, attention: str = "sdpa"
) -> PreTrainedModel:
    """A transformers model with fresh weights.

    Args:
        model: name of a preset, or one of your own.
        vocabulary: number of tokens of the text, at least 256.
        sequence: the longest sequence it must read, at least 2 tokens.
        seed: of the initial weights. The global random state is neither read nor changed.
        attention: ``"sdpa"``, torch's fused attention (flash attention where the device has it), or ``"eager"``.

    Returns:
        The model: fp32, on the CPU, in training mode.

    Raises:
        ModelError: for a name there is no preset of.
        ValueError: for other sizes.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    settings = configuration(model, vocabulary=vocabulary, sequence=sequence)
    sizes = language_preset(model)
    kind = AutoModelForCausalLM if sizes.objective == "causal" else AutoModelForMaskedLM
    # Not torch.manual_seed, which would reseed the GPUs too.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        built = kind.from_config(settings, attn_implementation=attention, dtype=torch.float32)
    if sizes.objective == "causal":
        built.generation_config.pad_token_id = END_OF_TEXT  # without one, `generate` warns
        built.generation_config.use_cache = True  # taken from `settings`, which have none: that is for training
    return built.train()


def configuration(model: str | Preset, *, vocabulary: int, sequence: int) -> PretrainedConfig:
    """The transformers configuration that `build_model` builds from; arguments and errors as there."""
    from transformers import BertConfig, GPT2Config, LlamaConfig, RobertaConfig

    sizes = language_preset(model)
    at_least("vocabulary", vocabulary, 256)
    at_least("sequence", sequence, 2)
    positions = max(sizes.positions, sequence)
    special = SPECIAL if sizes.objective == "masked" else 0
    common = {
        "vocab_size": vocabulary + special,
        "initializer_range": sizes.initializer_range,
        "bos_token_id": END_OF_TEXT + special,
        "eos_token_id": END_OF_TEXT + special,
        "pad_token_id": PAD if special else None,  # a LLaMA would not train the embedding of a token that pads
        "use_cache": False,
    }
    if sizes.family == "gpt2":
        return GPT2Config(
            n_layer=sizes.layers, n_embd=sizes.width, n_head=sizes.heads, n_inner=sizes.hidden,
            n_positions=positions,
            # GPT-2's own, in one operation of torch; "gelu_new" is eight, which all save their results.
            activation_function="gelu_pytorch_tanh",
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **common,
        )  # fmt: skip
    common |= {
        "num_hidden_layers": sizes.layers, "hidden_size": sizes.width, "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.hidden,
    }  # fmt: skip
    if sizes.family == "llama":
        return LlamaConfig(max_position_embeddings=positions, attention_dropout=0.0, **common)
    common |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if sizes.family == "bert":
        return BertConfig(max_position_embeddings=positions, **common)
    # Its positions begin after that of padding.
    return RobertaConfig(max_position_embeddings=positions + PAD + 1, type_vocab_size=1, **common)


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def next_token_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy of every token of the windows but the first, given those before it.

    Args:
        model: a causal language model of transformers, in any dtype.
        windows: int64 tensor (batch, sequence + 1) on the model's device.

    Returns:
        float32 scalar, in nats a token; computed in float32 from the logits on.

    Raises:
        ValueError: for windows of another shape, or of under two tokens.
    """
    if windows.dim() != 2 or windows.shape[1] < 2:
        raise ValueError(f"windows must have the shape (batch, sequence + 1), got {tuple(windows.shape)}")
    logits = model(input_ids=windows[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def masked_token_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy, in nats a token, float32, of the tokens that have a label.

    Inputs and labels are int64 (batch, sequence) on the model's device; a label is the token to predict, or -100.
    """
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
