"""One real training run, and the tensors that the studies look at.

A small GPT is trained in fp32 on real text by AdamW. On the way the optimizer's moments are copied at a few steps;
at the end every linear layer of the first, the middle and the last block gives its input, its weight and the
gradient of its output, over as many tokens as are asked for.

Source of the quantities: 8-bit Optimizers via Block-wise Quantization, Appendix D (moments during language model
training); Stable and low-precision training, Section 2.1 (X, W and the gradient of Y).
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from narrowgauge import recipes
from narrowgauge.formats import codebook
from narrowgauge.storage import Quantized
from narrowgauge.trainers import (
    Batches,
    Settings,
    TokenizedCorpus,
    build_model,
    load_corpus,
    make_optimizer,
    next_token_loss,
    parameter_count,
    tokenize,
)
from studies.shared import options


@dataclass(frozen=True)
class Training:
    """What is trained, and how: the settings that both studies share."""

    data: Path | None = None
    model: str = "micro"
    vocabulary: int = 1024
    steps: int = 300
    batch: int = 16
    sequence: int = 128
    lr: float = 3e-4
    warmup: int = 20
    beta2: float = 0.999
    seed: int = 0
    device: str = "cpu"

    @property
    def settings(self) -> Settings:
        """The library's settings of a run."""
        options = {"betas": (0.9, self.beta2), "eps": 1e-8, "weight_decay": 0.1, "block_size": 256}
        return Settings(self.steps, self.lr, self.warmup, decay_all=True, gauge_every=0, options=options)


@dataclass(frozen=True, eq=False)
class Moments:
    """Adam's moments of one parameter after one step, corrected for their start at zero, in fp32."""

    parameter: str
    step: int
    m: Tensor
    v: Tensor


@dataclass(frozen=True, eq=False)
class LinearTensors:
    """A linear layer's matrices: input (tokens, in), weight (out, in), gradient of the output (tokens, out)."""

    name: str
    x: Tensor
    w: Tensor
    g: Tensor


@dataclass(frozen=True, eq=False)
class Trained:
    """A model after its run, and what a results file says of it."""

    model: nn.Module
    moments: tuple[Moments, ...]
    tokens: Tensor
    training: Training
    about: dict[str, Any]


def run(training: Training, snapshots: Sequence[float] = (), recipe: str = "fp32", min_size: int = 4096) -> Trained:
    """Train, copying the moments after the given shares of the run; it ends early if the last is below 1.

    The recipe keeps fp32 weights, and moments in fp32 or 8 bits. Of parameters below `min_size` no moments are
    copied: they are not quantized in practice.
    """
    corpus = load_corpus(training.data)
    text = tokenize(corpus, training.vocabulary)
    model = build_model(
        training.model, vocabulary=training.vocabulary, sequence=training.sequence, seed=training.seed
    ).to(training.device)
    optimizer = make_optimizer(recipes.get(recipe), model, training.settings, training.seed)
    batches = Batches(text.train, training.batch, training.sequence, training.seed)
    wanted = {max(1, math.ceil(share * training.steps)) for share in snapshots}
    moments: list[Moments] = []
    losses = []
    for step in range(1, max(wanted, default=training.steps) + 1):
        for group in optimizer.param_groups:
            group["lr"] = training.lr * min(1.0, step / training.warmup)
        optimizer.zero_grad()
        loss = next_token_loss(model, next(batches).to(training.device))
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            raise RuntimeError(f"the loss of step {step} is {losses[-1]}: lower --lr")
        optimizer.step()
        if step in wanted:
            moments += _moments(model, optimizer, step, training.settings, min_size)
    optimizer.zero_grad()
    return Trained(
        model, tuple(moments), text.train, training, _about(training, corpus.source, text, model, losses)
    )


def _moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, settings: Settings, min_size: int
) -> Iterator[Moments]:
    beta1, beta2 = settings.options["betas"]
    for name, p in model.named_parameters():
        if p.numel() >= min_size:
            m, v = (_dense(optimizer.state[p], slot, settings.options["block_size"]) for slot in ("m", "v"))
            yield Moments(name, step, m / (1 - beta1**step), v / (1 - beta2**step))


def _dense(state: dict[str, Tensor], slot: str, block_size: int) -> Tensor:
    if slot in state:
        return state[slot]
    values = codebook("dynamic", signed=slot == "m").to(state[f"{slot}.codes"].device)
    return Quantized(state[f"{slot}.codes"], state[f"{slot}.scales"], values, block_size).dequantize()


def _about(
    training: Training, source: str, text: TokenizedCorpus, model: nn.Module, losses: list[float]
) -> dict[str, Any]:
    """What a results file says of the run; a file given as data is named without its folder."""
    settings = asdict(training) | {"data": training.data.name if training.data else None}
    shared = training.settings.options
    last = losses[-min(20, len(losses)) :]
    return {
        **options.origin(training.device),
        "training": settings | {"beta1": shared["betas"][0], "weight_decay": shared["weight_decay"]},
        "data": {
            "source": training.data.name if training.data else source,
            "train_tokens": len(text.train),
        },
        "parameters": parameter_count(model),
        "loss": {"first": losses[0], "last": sum(last) / len(last)},
    }


@torch.enable_grad()
def gather_linears(trained: Trained, tokens: int) -> list[LinearTensors]:
    """Inputs, weights and output gradients of the linear layers of the first, the middle and the last block.

    The gradient is that of the mean loss over all tokens, gathered a training batch at a time; no weight moves. X
    and G have `tokens` rows at least, of whole windows.
    """
    training = trained.training
    windows = math.ceil(tokens / training.sequence)
    batches = Batches(trained.tokens, windows, training.sequence, training.seed + 1)
    layers = chosen_linears(trained.model)
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    gradients: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [layer.register_forward_hook(_keeper(inputs[n], gradients[n])) for n, layer in layers.items()]
    for part in torch.split(next(batches), training.batch):
        loss = next_token_loss(trained.model, part.to(training.device)) * (len(part) / windows)
        torch.autograd.backward(loss)
        trained.model.zero_grad()
    for hook in hooks:
        hook.remove()
    gathered = []
    for name, layer in layers.items():
        w = layer.weight.detach()
        w = w.T if isinstance(layer, Conv1D) else w
        gathered.append(LinearTensors(name, torch.cat(inputs.pop(name)), w, torch.cat(gradients.pop(name))))
    return gathered


def _keeper(inputs: list[Tensor], gradients: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    def keep(_: nn.Module, arguments: Any, output: Tensor) -> None:
        inputs.append(arguments[0].detach().flatten(0, -2))
        output.register_hook(lambda gradient: gradients.append(gradient.detach().flatten(0, -2)))

    return keep


def chosen_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of the first, the middle and the last block, by name."""
    found = {
        name: (int(block[1]), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and (block := re.search(r"\.(\d+)\.", name))
    }
    last = max(number for number, _ in found.values())
    blocks = {0, (last + 1) // 2, last}
    return {name: module for name, (number, module) in found.items() if number in blocks}


def mean_and_error(values: Sequence[float]) -> list[float]:
    """Mean, and its standard error over the values (NaN for one)."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return [statistics.fmean(values), error]
