"""One training run of the 8-bit study: a model with some embedding, Adam with some states, and what became of it.

The model is a small GPT in plain fp32. The paper trains in 16-bit mixed precision with fp32 master weights; here
weights and gradients are left exact, so that what two runs differ in is what their optimizers keep.

Its output layer is not tied to the word embedding. The embedding is under study because its gradient is sparse: a
row for each token that occurred. Tied, it would have the dense gradient of the output layer on top. Whether the
paper's is tied it does not say.

Without the stable embedding layer, a model has the embedding that the paper calls the usual one: normal numbers of
variance 1/k, times the root of k, so that what comes out has variance 1.

Source: 8-bit Optimizers via Block-wise Quantization, Sections 2.3 and 4, Appendices C and I.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.formats import codebook
from narrowgauge.nn import StableEmbedding
from narrowgauge.optim import Adam
from narrowgauge.optim._plan import ParamPlan, SlotPlan
from narrowgauge.storage import mark_states, state_storage
from narrowgauge.storage._states import CodebookState
from narrowgauge.trainers import (
    Batches,
    build_model,
    evaluate,
    load_corpus,
    next_token_loss,
    tokenize,
    validation_windows,
)
from studies.shared.gather import Training

VALIDATION = 128  # windows
LAST = 20  # steps whose mean is a run's loss at some time: single steps are noisy
RISE = 0.5  # nats above its own best that a run may end and still count as a success
_EAGER = 3  # steps before one is captured: states are made, kernels chosen
_ZEROS = 10  # steps after which zeros are counted: before any run has a loss that is not finite
_LOOK = 20  # steps between looks at whether the losses are still finite


@dataclass(frozen=True)
class Parts:
    """What of the stable embedding layer a model has."""

    norm: bool  # a layer norm on what comes out, before the positions are added
    xavier: bool  # Xavier's uniform initialization
    wide: bool  # 32-bit states for the table, whatever the others have


STABLE = Parts(True, True, True)
USUAL = Parts(False, False, False)


@dataclass(frozen=True)
class Trial:
    """A run: everything that two of them can differ in."""

    codebook: str | None  # of both moments; None for 32-bit states
    blocks: bool  # whether a scale serves a block or the whole tensor, as ``"quantile"`` codes always have it
    embedding: Parts  # the parts of the stable embedding that the model has
    # lr, beta1, beta2, eps: Adam's
    lr: float
    beta1: float
    beta2: float
    eps: float
    seed: int  # of weights and batches
    narrow: str = "mv"  # the moments that have 8 bits, if any: "mv", "m" or "v"
    zero: bool = True  # whether a second moment may round to zero, or rounds up to the smallest code instead
    # millionths by which all initial weights are larger: the same run but for what chance makes of it
    nudge: int = 0


class QuantizedAdam(Adam):
    """Adam with the 8-bit states of a trial: of any codebook, with a scale a block or a scale a tensor.

    With ``"quantile"`` codes the moments are, after every step, the nearest of the 256 quantiles of their own
    tensor. The quantiles are exact, of the tensor as it is then, and moments stay in fp32 tensors: what such
    codes do to a training is seen, not what they save.

    Source: 8-bit Optimizers via Block-wise Quantization, Appendix F.2, Equation 5.
    """

    def __init__(self, params: Any, *args: Any, trial: Trial, **options: Any) -> None:
        self._trial, self._rounded = trial, set[Tensor]()
        super().__init__(params, *args, states="8bit", **options)

    def _plan_group(self, plans: dict[Tensor, ParamPlan], number: int) -> None:
        super()._plan_group(plans, number)
        for p in self.param_groups[number]["params"]:
            plan = plans[p]
            plans[p] = replace(plan, slots=tuple(self._slot(slot, p) for slot in plan.slots))

    def _slot(self, slot: SlotPlan, p: Tensor) -> SlotPlan:
        codes = self._trial.codebook
        if not slot.storage.quantized:  # by its mark
            return slot
        if codes is None or codes == "quantile" or slot.slot.name not in self._trial.narrow:
            self._rounded |= {p} if codes == "quantile" else set()
            return replace(slot, storage=state_storage("fp32"))
        size = slot.block_size if self._trial.blocks else p.numel()
        return replace(slot, storage=CodebookState(codes, codebook=codes), block_size=size)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        if not self._trial.zero:
            for state in self.state.values():
                if "v.codes" in state:
                    state["v.codes"].clamp_(min=1)  # code 0 is zero
        with torch.no_grad():
            for p in self._rounded:
                for name, signed in (("m", True), ("v", False)):
                    rounded(self.state[p][name], signed)
        return loss

    def lost(self) -> float | None:
        """Of the elements whose v has 8 bits, the share whose v is zero and m is not: they are divided by eps."""
        lost = total = 0
        for p, plan in self.plans():
            moments = {slot.slot.name: slot for slot in plan.slots}
            if moments["v"].storage.quantized:
                m, v = (moments[name].decode(self.state[p], p.shape) for name in "mv")
                lost += int(((v == 0) & (m != 0)).sum())
                total += p.numel()
        return lost / total if total else None


def rounded(x: Tensor, signed: bool) -> Tensor:
    """Write into a tensor the nearest values of its own quantile map; zeros alone stay as they are."""
    largest = float(x.abs().max())
    if 0 < largest < math.inf:
        values = codebook("quantile", signed, data=x)
        x.copy_(values[torch.bucketize(x / largest, (values[1:] + values[:-1]) / 2)] * largest)
    return x


class PartlyStableEmbedding(nn.Embedding):
    """The usual word embedding, with some parts of the stable one in their place.

    The factor, the root of k, goes where a layer norm comes, which would undo it.
    """

    def __init__(self, vocabulary: int, width: int, parts: Parts) -> None:
        super().__init__(vocabulary, width)
        if parts.xavier:
            nn.init.xavier_uniform_(self.weight)
        else:
            nn.init.normal_(self.weight, std=width**-0.5)
        self.norm = nn.LayerNorm(width) if parts.norm else None
        self.factor = 1.0 if parts.norm else width**0.5

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return rows * self.factor if self.norm is None else self.norm(rows)


def build(training: Training, trial: Trial) -> nn.Module:
    """The model, on its device. All of it but the word embedding is the same for every trial of a seed."""
    model = build_model(training.model, vocabulary=training.vocabulary, sequence=training.sequence, seed=trial.seed)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(trial.seed)
        sizes = training.vocabulary, model.config.n_embd
        stable = trial.embedding == STABLE
        embedding = StableEmbedding(*sizes) if stable else PartlyStableEmbedding(*sizes, trial.embedding)
    model.transformer.wte = embedding
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-6 * trial.nudge)
    model.to(training.device)
    if trial.embedding.wide:
        mark_states(embedding.weight, "fp32")
    return model


def make_optimizer(model: nn.Module, trial: Trial, lr: Tensor) -> Adam:
    """Adam as the trial has it.

    A gradient that is not finite goes through, as in other people's Adam: the paper counts the runs that it ends.
    """
    numbers = lr, (trial.beta1, trial.beta2), trial.eps
    named = list(model.named_parameters())
    if trial.codebook is None:
        return Adam(named, *numbers, nonfinite="propagate")
    return QuantizedAdam(named, *numbers, trial=trial, nonfinite="propagate")


def text_of(training: Training) -> tuple[str, Tensor, Tensor]:
    """The text's name, tokens to train on, windows to validate on, on the device."""
    return _text(training.data, training.vocabulary, training.sequence, training.device)


@functools.cache
def _text(data: Path | None, vocabulary: int, sequence: int, device: str) -> tuple[str, Tensor, Tensor]:
    corpus = load_corpus(data)
    text = tokenize(corpus, vocabulary)
    windows = validation_windows(text.validation, sequence, VALIDATION)
    return data.name if data else corpus.source, text.train.to(device), windows.to(device)


def about_text(training: Training) -> dict[str, Any]:
    """What a results file says of the text."""
    name, tokens, _ = text_of(training)
    return {"source": name, "train_tokens": len(tokens)}


def one(trial: Trial, training: Training, graph: bool) -> dict[str, Any]:
    """A run."""
    return train(trial, training, *text_of(training)[1:], graph=graph)


def train(trial: Trial, training: Training, tokens: Tensor, validation: Tensor, *, graph: bool) -> dict[str, Any]:
    """Train and evaluate: what a results file says of it; `unstable` says why it counts as that, or is None.

    Tokens and windows (n, sequence + 1) are on the device. With `graph` the step is replayed as a CUDA graph: the
    same kernels, without the waiting between them, which for a model this small is most of the time.
    """
    start = time.perf_counter()
    model = build(training, trial)
    device = tokens.device
    lr = torch.zeros((), dtype=torch.float64, device=device)
    optimizer = make_optimizer(model, trial, lr)
    batches = Batches(tokens, training.batch, training.sequence, trial.seed)
    windows = next(batches).clone()
    losses = torch.full((training.steps,), torch.nan, device=device)
    norms = losses.clone()
    step = _Stepper(_step_of(model, optimizer, windows), device if graph else None)
    done, lost = training.steps, None
    for number in range(training.steps):
        if number == _ZEROS and isinstance(optimizer, QuantizedAdam):
            lost = optimizer.lost()
        if number:
            windows.copy_(next(batches))
        lr.fill_(trial.lr * schedule(number, training))
        losses[number], norms[number] = step(number)
        if number % _LOOK == _LOOK - 1 and not math.isfinite(losses[number]):
            done = number + 1
            break
    curve = losses[:done].tolist()
    why = unstable(curve, training.vocabulary)
    loss = evaluate(model, next_token_loss, validation.split(training.batch)) if why is None else math.nan
    # What a step was given before anything overflowed.
    finite = norms[:done][norms[:done].isfinite()].tolist()
    return {
        "validation_loss": loss,
        "training_loss": statistics.fmean(curve[-LAST:]),
        "first_loss": curve[0],
        "unstable": why,
        "gradient_norm": {"median": statistics.median(finite), "largest": max(finite)} if finite else None,
        "lost": lost,
        "state_bytes": optimizer.state_bytes() / sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - start,
    }


def schedule(number: int, training: Training) -> float:
    """The share of the learning rate in step `number`, from 0: a linear rise, then a linear fall to a tenth."""
    if number < training.warmup:
        return (number + 1) / training.warmup
    left = (training.steps - number) / max(1, training.steps - training.warmup)
    return 0.1 + 0.9 * left


def unstable(losses: Sequence[float], vocabulary: int) -> str | None:
    """Why a run counts as unstable, or None.

    Either a loss is not finite, which is what an exploding gradient ends in; or the loss diverged: the mean of the
    last `LAST` steps is that of a uniform guess or more, or `RISE` above the lowest mean of as many steps before.
    """
    bad = next((number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if bad is not None:
        return f"the loss of step {bad} is not finite"
    means = [statistics.fmean(losses[i : i + LAST]) for i in range(max(1, len(losses) - LAST + 1))]
    if means[-1] >= math.log(vocabulary):
        return "diverged: no better than a uniform guess at the end"
    if means[-1] > min(means) + RISE:
        return f"diverged: {RISE} nats above its best at the end"
    return None


def _step_of(model: nn.Module, optimizer: Adam, windows: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """A step on whatever is in `windows`: its loss, and the norm of the whole gradient."""

    def step() -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = next_token_loss(model, windows)
        torch.autograd.backward(loss)
        gradients = [p.grad for p in model.parameters()]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        optimizer.step()
        return loss.detach(), norm

    return step


class _Stepper:
    """Calls a step, or from the fourth on replays it as a CUDA graph, if it is given a device.

    All on one stream: what autograd has seen on one stream cannot be captured on another.
    """

    def __init__(self, step: Callable[[], tuple[Tensor, Tensor]], device: torch.device | None) -> None:
        self._step = step
        self._stream = torch.cuda.Stream(device) if device is not None else None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        if self._stream is None:
            return self._step()
        if number == _EAGER:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._out = self._step()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._graph is None:
                out = self._step()
            else:
                self._graph.replay()
                out = self._out
        torch.cuda.current_stream().wait_stream(self._stream)
        return out
