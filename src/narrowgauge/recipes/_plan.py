"""Will it fit? The memory of a training step, before there is a GPU.

A step of the model runs on the meta device (`_trace`), and the plan is the memory that an allocator would have been
asked for at the worst moment. A plan of a number of parameters has no step: it counts what the recipe stores for
each parameter, and no activations.

In addition to tensors, cuBLAS takes 32 MiB for each thread that multiplies on a Hopper GPU: one runs the forward
pass, one the backward pass. Plans leave out CUDA's context (some 0.5 GB) and memory that the allocator holds
without using it, as `torch.cuda.max_memory_allocated` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from torch import nn

from narrowgauge._arguments import check_choice, check_instance, is_integer
from narrowgauge.linear import LinearPlan
from narrowgauge.linear._plan import named_plan
from narrowgauge.linear._quantize import FORMATS, Format
from narrowgauge.recipes._book import get
from narrowgauge.recipes._fitted import FittedRecipe
from narrowgauge.recipes._losses import Example, Loss, Step, step_of
from narrowgauge.recipes._parallel import MOST, OFFLOADS, PARALLEL, Offload, Parallel, Planner, bytes_each
from narrowgauge.recipes._recipe import Recipe
from narrowgauge.recipes._trace import Traced, from_config, without_memory

_SEQUENCE = 1024  # tokens of an example by default
_UNITS = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("b", 1000), ("ib", 1024))
}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes on each GPU.

    Attributes:
        model: name of the model's class, or a number of parameters.
        parameters: number of parameters.
        recipe, linear: names of the recipe and of the linear layers' plan.
        hold_activations: format of held activations, None for none.
        example: unit of a batch: ``"sequence"`` of tokens, ``"pair"`` of an image and its caption, ``"image"``.
        batch, sequence: examples a step on each GPU, and tokens of each; None for a number of parameters, and
            tokens of images without captions.
        checkpointing: whether blocks run again in the backward pass.
        accumulate: whether there are gradients of an earlier micro-batch.
        gpus, parallel: how many GPUs share the training, and how.
        offload: tensors on the host: ``"none"``, ``"states"`` with low words, or ``"gradients"`` as well.
        held: bytes that stay from step to step: weights, buffers, gradients, states, low words.
        host: bytes on the host, by kind; empty without offloading.
        saved: bytes that the forward pass saves for the backward pass; None for a number of parameters.
        at_peak: bytes at the worst moment, by kind: those held (gradients as far as they exist then), activations,
            the loss's intermediate tensors, the backward pass's own, buffers of communication, cuBLAS's workspaces.
        where: part of the step with the worst moment: forward, backward or optimizer.
        device_memory: bytes of the device; None if not given.
    """

    model: str
    parameters: int
    recipe: str
    linear: str | None = None
    hold_activations: str | None = None
    example: Example = "sequence"
    batch: int | None = None
    sequence: int | None = None
    checkpointing: bool = False
    accumulate: bool = False
    gpus: int
    parallel: Parallel
    offload: Offload
    held: Mapping[str, int]
    host: Mapping[str, int]
    saved: int | None = None
    at_peak: Mapping[str, int]
    where: str = "optimizer"
    device_memory: int | None
    _planner: Planner | None = field(default=None, repr=False, compare=False)
    _bytes: float = field(repr=False, compare=False)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step, as `torch.cuda.max_memory_allocated` counts."""
        return sum(self.at_peak.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None if that was not given."""
        return None if self.device_memory is None else self.peak <= self.device_memory

    @property
    def positions(self) -> int | None:
        """The most tokens that the model has positions for; None where no length can be asked."""
        return None if self._planner is None or self.sequence is None else self._planner.positions

    def largest_batch(self, device_memory: int | str | None = None) -> int:
        """The most examples a step on each GPU, at this length; 0 if not one fits.

        Raises:
            ValueError: without a memory, or for a plan of a mere number of parameters.
        """
        planner, memory = self._asked(device_memory)
        sequence = self.sequence or 0
        return largest(lambda batch: planner.peak(batch, sequence), memory, MOST)

    def longest_sequence(self, device_memory: int | str | None = None) -> int:
        """The most tokens a sequence, in this batch; 0 if not even one. Learned positions are a limit as well.

        Raises:
            ValueError: as `largest_batch` does, and for images without captions.
        """
        planner, memory = self._asked(device_memory)
        if self.sequence is None:
            raise ValueError(f"model_or_config must be a model that reads tokens, got a {self.model}")
        assert self.batch is not None
        batch = self.batch
        return largest(lambda tokens: planner.peak(batch, tokens), memory, planner.positions)

    def largest_model(self, device_memory: int | str | None = None) -> int:
        """How many parameters fit by the recipe's bytes for each, without activations.

        Raises:
            ValueError: without a memory.
        """
        return int(self._memory(device_memory) / self._bytes)

    def _memory(self, device_memory: int | str | None) -> int:
        memory = self.device_memory if device_memory is None else parse_bytes("device_memory", device_memory)
        if memory is None:
            raise ValueError("device_memory must be bytes, or a text such as '80GB', got None")
        return memory

    def _asked(self, device_memory: int | str | None) -> tuple[Planner, int]:
        if self._planner is None:
            raise ValueError(
                f"model_or_config must be a model or a configuration for a batch or a sequence, got {self.model}"
            )
        return self._planner, self._memory(device_memory)

    def record(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        names = (
            "model", "parameters", "recipe", "linear", "hold_activations", "example", "batch", "sequence",
            "checkpointing", "accumulate", "gpus", "parallel", "offload", "saved", "where", "peak", "device_memory",
            "fits",
        )  # fmt: skip
        parts = {"held": dict(self.held), "host": dict(self.host), "at_peak": dict(self.at_peak)}
        return {name: getattr(self, name) for name in names} | parts


@overload
def plan_memory(
    model_or_config: nn.Module | int | str | Any, recipe: Recipe | str, **options: Any
) -> MemoryPlan: ...


@overload
def plan_memory(
    model_or_config: nn.Module | int | str | Any,
    recipe: list[Recipe | str] | list[str] | list[Recipe] | tuple[Recipe | str, ...],
    **options: Any,
) -> list[MemoryPlan]: ...


def plan_memory(
    model_or_config: nn.Module | int | str | Any,
    recipe: Any,
    *,
    batch: int = 1,
    sequence: int | None = None,
    device_memory: int | str | None = None,
    linear: LinearPlan | str | None = None,
    hold_activations: Format | None = None,
    checkpointing: bool = False,
    gpus: int = 1,
    parallel: Parallel = "ddp",
    accumulate: bool = False,
    offload: Offload = "none",
    loss: Loss | None = None,
    **optimizer_arguments: Any,
) -> MemoryPlan | list[MemoryPlan]:
    """Plan the memory of training a model under a recipe on CUDA GPUs, eagerly, with fused attention.

    Args:
        model_or_config: a module (left alone: a copy without memory is planned with), a transformers configuration
            of a language model, a CLIP or a ViT, or a number of parameters. Or a text, as the command takes it: a
            preset of `narrowgauge train`, ``"timm:NAME"``, ``"7B"``, a folder with a config.json. A language preset
            has positions for `sequence` tokens.
        recipe: a recipe, its name, or the path of a fitted recipe's file; or a list of them, for a list of plans.
        batch: sequences, pairs of image and caption, or images a step on each GPU; with accumulation, of one
            micro-batch.
        sequence: tokens a sequence or a caption; as many as there are positions, 1024 at most, if None.
        device_memory: bytes of each GPU, or a text such as ``"80GB"`` (10^9) or ``"80GiB"`` (2^30).
        linear: the plan of linear layers, or its name such as ``"SWITCHBACK:e4m3"``; None leaves them.
        hold_activations: the format in which `narrowgauge.linear.hold_activations` holds what is saved; None leaves
            it.
        checkpointing: whether a transformers model's blocks keep their inputs only and run again in the backward
            pass.
        gpus: how many share the training.
        parallel: how: ``"ddp"`` or ``"fsdp"``, see `narrowgauge.recipes._parallel`.
        accumulate: whether gradients of several micro-batches are added up: all of them live through the step then.
        offload: tensors that `narrowgauge.distributed.CPUOffload` keeps on the host: ``"states"``, with low words,
            or ``"gradients"`` as well, each of which leaves the GPU as soon as it is made.
        loss: a function of a model without memory, a batch and a sequence that makes its own inputs on the meta
            device, runs the model once and returns the loss. If None, that of `narrowgauge.recipes._losses`: of
            transformers' CLIP the contrastive loss, of its ViT and of timm's models that of classes, of all else
            the cross entropy of a language model that takes `input_ids` and returns `logits`.
        **optimizer_arguments: as `Recipe.apply` takes them.

    Raises:
        ValueError: naming the argument.
    """
    several = isinstance(recipe, list | tuple)
    found = [get(one) if isinstance(one, str) else one for one in (recipe if several else [recipe])]
    for one in found:
        check_instance("recipe", one, Recipe)
    for name, size in (("batch", batch), ("sequence", 1 if sequence is None else sequence), ("gpus", gpus)):
        if not is_integer(size) or not 1 <= size <= MOST:
            raise ValueError(f"{name} must be an integer from 1 to {MOST}, got {size!r}")
    model: Any = model_or_config
    if isinstance(model, str):
        # Presets are the trainers', so that a plan is of the model that a training makes.
        from narrowgauge.trainers._named_models import named_model

        model = named_model("model_or_config", model, sequence=sequence)
    layers = named_plan(linear) if isinstance(linear, str) else linear
    check_choice("parallel", parallel, PARALLEL)
    check_choice("offload", offload, OFFLOADS)
    if hold_activations is not None:
        check_choice("hold_activations", hold_activations, tuple(FORMATS))
    _refuse_offload(offload, gpus, parallel, accumulate)
    for one in found:
        if layers is not None and one.layer_plans:
            refused = f"linear must be None with recipe {one.name!r}, which has plans of layers"
            raise ValueError(f"{refused}, got {layers.title}")
        if isinstance(one, FittedRecipe) and is_integer(model):
            raise ValueError(
                f"recipe must be one for any model with a number of parameters, got {one.name!r}, which was fitted "
                "to the parameters of one model: give that model"
            )
    memory = None if device_memory is None else parse_bytes("device_memory", device_memory)
    if is_integer(model):
        _check_count(
            model, linear=layers, hold_activations=hold_activations, loss=loss, checkpointing=checkpointing,
            accumulate=accumulate,
        )  # fmt: skip

    def planned(one: Recipe) -> MemoryPlan:
        device, host = bytes_each(one, gpus, parallel, offload)
        plan = partial(
            MemoryPlan, recipe=one.name, gpus=gpus, parallel=parallel, offload=offload, device_memory=memory,
            _bytes=sum(device.values()),
        )  # fmt: skip
        if is_integer(model):
            parts = {name: int(size * model) for name, size in device.items()}
            held = {name: size for name, size in parts.items() if name != "communication"}
            on_host = {name: int(size * model) for name, size in host.items()}
            return plan(model=f"{model:,} parameters", parameters=model, held=held, host=on_host, at_peak=parts)
        bare = without_memory(model) if isinstance(model, nn.Module) else from_config(model)
        kind = type(bare).__name__
        step = step_of(bare, gpus) if loss is None else Step("sequence", loss)
        if step.example == "pair" and accumulate:
            raise ValueError(
                f"accumulate must be False for a {kind} without a loss of your own, got True: an image is "
                "contrasted with all captions of a step, and the plan does not know how they are divided"
            )
        if checkpointing and hold_activations is not None:
            raise ValueError(
                "hold_activations must be None with checkpointing, whose blocks save their inputs only, got "
                f"{hold_activations!r}"
            )
        traced = Traced(
            bare, one, layers, checkpointing, step.loss, optimizer_arguments, accumulate, offload == "gradients",
            hold_activations,
        )  # fmt: skip
        planner = Planner(traced, gpus, parallel, offload)
        tokens = _tokens(sequence, planner.positions, step, kind)
        at_peak, saved, where = planner.at(batch, tokens or 0)
        return plan(
            model=kind, parameters=traced.parameters, linear=None if layers is None else layers.title,
            hold_activations=hold_activations, example=step.example, batch=batch, sequence=tokens,
            checkpointing=checkpointing, accumulate=accumulate, held=planner.held, host=planner.host, saved=saved,
            at_peak=at_peak, where=where, _planner=planner,
        )  # fmt: skip

    plans = [planned(one) for one in found]
    return plans if several else plans[0]


def _refuse_offload(offload: Offload, gpus: int, parallel: Parallel, accumulate: bool) -> None:
    if offload != "none" and parallel == "fsdp":
        raise ValueError(f"offload must be 'none' with parallel 'fsdp', which divides states, got {offload!r}")
    if offload == "gradients" and (gpus > 1 or accumulate):
        what = f"{gpus} GPUs, whose gradients are averaged" if gpus > 1 else "accumulate, whose gradients stay"
        raise ValueError(f"offload must be 'none' or 'states' with {what}, got 'gradients'")


def _check_count(count: int, **of_a_model: Any) -> None:
    for name, value in of_a_model.items():
        if value:
            raise ValueError(f"{name} must be left out for a number of parameters, got {value!r}")
    if count < 1:
        raise ValueError(f"model_or_config must be at least 1 parameter, and under 2^63, got {count}")


def _tokens(sequence: int | None, positions: int, step: Step, kind: str) -> int | None:
    """Tokens of an example: as asked for, or as many as there are positions."""
    if step.example == "image":
        if sequence is not None:
            raise ValueError(f"sequence must be None for a {kind}, whose images have no captions, got {sequence}")
        return None
    if sequence is not None and sequence > positions:
        raise ValueError(
            f"sequence must be at most {positions}, the number of positions that a {kind} has, got {sequence}"
        )
    return min(positions, _SEQUENCE) if sequence is None else sequence


def parse_bytes(name: str, value: int | str) -> int:
    """Bytes from a number above 0, or from a text with a unit: 80GB is 80 * 10^9, 80GiB is 80 * 2^30.

    A text without a unit is refused: 80 hardly means bytes.
    """
    if is_integer(value) and value > 0:
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower()) if isinstance(value, str) else None
    if found is None or found[2] not in _UNITS or float(found[1]) * _UNITS[found[2]] < 1:
        raise ValueError(f"{name} must be a number with its unit, such as '80GB' or '80GiB', got {value!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def largest(peak: Callable[[int], float], memory: float, limit: int, start: int = 1) -> int:
    """The largest count from `start` to `limit` with `peak(count) <= memory`; `start - 1` if none fits.

    A peak grows nearly along a line, with the batch and, where attention is fused, with the sequence. So the next
    count to try is where the line through the last two crosses the memory. A wrong guess costs a try, not
    correctness.
    """
    low, low_peak = start, peak(start)
    if low_peak > memory:
        return start - 1
    high, high_peak = 2 * start, 0.0
    while True:
        if low == limit:
            return limit
        high = min(high, limit)
        high_peak = peak(high)
        if high_peak > memory:
            break
        slope = (high_peak - low_peak) / (high - low)
        low, low_peak = high, high_peak
        # A little beyond the crossing, so that the next try is on the other side of it.
        guess = low + 1 + int(1.02 * (memory - low_peak) / slope) if slope > 0 else limit
        high = max(low + 1, min(guess, 64 * low))
    # How far each end is from the memory. Halving the distance of the end that stays keeps a curved peak from
    # moving one end only: the Illinois rule.
    below, above, last = memory - low_peak, high_peak - memory, 0
    while high - low > 1:
        part = below / (below + above)
        middle = min(max(low + int(part * (high - low)), low + 1), high - 1)
        there = peak(middle)
        if there <= memory:
            low, below = middle, memory - there
            above = above / 2 if last == 1 else above
            last = 1
        else:
            high, above = middle, there - memory
            below = below / 2 if last == -1 else below
            last = -1
    return low
