"""Will it fit? The memory of a training step, before there is a GPU.

For a model there is code for, a step is run without memory (`_trace`), and the plan is what an allocator would
have been asked for at the worst moment. For a mere number of parameters there is no such step: then the plan
has what the recipe keeps for each parameter, and says nothing of activations.

Beside tensors, cuBLAS takes 32 MiB for each thread that multiplies on a Hopper GPU: one runs the forward pass,
one the backward pass. What CUDA itself takes (its context, some 0.5 GB) and what the allocator holds without
using it are in no plan, as they are not in `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from narrowgauge._arguments import typed
from narrowgauge.linear import LinearPlan
from narrowgauge.recipes._recipe import Recipe, get
from narrowgauge.recipes._search import largest
from narrowgauge.recipes._share import PARALLEL, Parallel, gathered
from narrowgauge.recipes._sizes import parse_bytes
from narrowgauge.recipes._timeline import PARTS, Moment
from narrowgauge.recipes._trace import Held, Loss, Traced, bare, from_config, token_loss
from narrowgauge.storage import weight_storage

WORKSPACE = 2 * (32 << 20)
_MOST = 1 << 20  # sequences of a batch, tokens of a sequence


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each GPU.

    Attributes:
        model: what was planned: a class of models, or a number of parameters.
        parameters: how many it has.
        recipe, linear: names of the recipe and of the linear layers' plan.
        batch, sequence: sequences a step on each GPU, and tokens of each; None for a number of parameters.
        checkpointing: whether blocks run again in the backward pass.
        accumulate: whether there are gradients of an earlier micro-batch.
        gpus, parallel: how many GPUs share the training, and how.
        held: what is kept from step to step, gradients included: weights, buffers, gradients, states, low words.
        saved: what the forward pass leaves for the backward pass; None for a number of parameters.
        at_peak: what is there at the worst moment, by what it is: what is held (of the gradients those that exist
            then), activations, what the loss makes of the model's output, what the backward pass has for itself,
            buffers of communication, cuBLAS's workspaces.
        where: which part of the step the worst moment is in: forward, backward or optimizer.
        device_memory: bytes that there are; None if that was not asked.
    """

    model: str
    parameters: int
    recipe: str
    linear: str | None
    batch: int | None
    sequence: int | None
    checkpointing: bool
    accumulate: bool
    gpus: int
    parallel: Parallel
    held: Mapping[str, int]
    saved: int | None
    at_peak: Mapping[str, int]
    where: str
    device_memory: int | None
    _planner: _Planner | None = field(repr=False, compare=False)
    _bytes: float = field(repr=False, compare=False)

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step, as `torch.cuda.max_memory_allocated` counts."""
        return sum(self.at_peak.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the device's memory; None if that was not given."""
        return None if self.device_memory is None else self.peak <= self.device_memory

    def largest_batch(self, device_memory: int | str | None = None) -> int:
        """The most sequences a step on each GPU, at this length; 0 if not one fits.

        Raises:
            ValueError: without a memory, or for a plan of a mere number of parameters.
        """
        planner, memory = self._asked(device_memory)
        assert self.sequence is not None
        sequence = self.sequence
        return largest(lambda batch: sum(planner.at(batch, sequence)[0].values()), memory, _MOST)

    def longest_sequence(self, device_memory: int | str | None = None) -> int:
        """The most tokens a sequence, in this batch; 0 if not even one. Learned positions are a limit as well.

        Raises:
            ValueError: as `largest_batch` does.
        """
        planner, memory = self._asked(device_memory)
        assert self.batch is not None
        batch = self.batch
        return largest(lambda tokens: sum(planner.at(batch, tokens)[0].values()), memory, planner.positions)

    def largest_model(self, device_memory: int | str | None = None) -> int:
        """How many parameters of a model fit by what the recipe keeps for each, without activations.

        Raises:
            ValueError: without a memory.
        """
        return int(self._memory(device_memory) / self._bytes)

    def _memory(self, device_memory: int | str | None) -> int:
        memory = self.device_memory if device_memory is None else parse_bytes("device_memory", device_memory)
        if memory is None:
            raise ValueError("device_memory: got None, takes bytes, or a text such as '80GB'")
        return memory

    def _asked(self, device_memory: int | str | None) -> tuple[_Planner, int]:
        if self._planner is None:
            raise ValueError(
                f"model_or_config: got {self.model}, takes a model or a configuration where batch and sequence "
                "are asked for"
            )
        return self._planner, self._memory(device_memory)

    def record(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        names = (
            "model", "parameters", "recipe", "linear", "batch", "sequence", "checkpointing", "accumulate", "gpus",
            "parallel", "saved", "where", "peak", "device_memory", "fits",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "held": dict(self.held),
            "at_peak": dict(self.at_peak),
        }


@typed
def plan_memory(
    model_or_config: nn.Module | int | Any,
    recipe: Recipe | str,
    *,
    batch: int = 1,
    sequence: int = 1024,
    device_memory: int | str | None = None,
    linear: LinearPlan | None = None,
    checkpointing: bool = False,
    gpus: int = 1,
    parallel: Parallel = "ddp",
    accumulate: bool = False,
    loss: Loss | None = None,
    **optimizer_arguments: Any,
) -> MemoryPlan:
    """Plan the memory of training a model under a recipe on CUDA GPUs, eagerly, with fused attention.

    Args:
        model_or_config: a module (left alone: a copy without memory is planned with), a transformers configuration
            of a language model, or a number of parameters.
        recipe: a recipe or its name.
        batch: sequences a step on each GPU; with accumulation, of one micro-batch.
        sequence: tokens a sequence.
        device_memory: bytes of each GPU, or a text such as ``"80GB"`` (10^9) or ``"80GiB"`` (2^30).
        linear: what linear layers compute by; None leaves them.
        checkpointing: whether a transformers model's blocks keep their inputs only and run again in the backward
            pass.
        gpus: how many share the training.
        parallel: how: ``"ddp"`` or ``"fsdp"``, see `narrowgauge.recipes._share`.
        accumulate: whether gradients of several micro-batches are added up: all of them live through the step then.
        loss: a function of a model without memory, a batch and a sequence that makes its own inputs on the meta
            device, runs the model once and returns the loss. If None, the cross entropy of a language model that
            takes `input_ids` and returns `logits`.
        **optimizer_arguments: as `Recipe.apply` takes them.

    Raises:
        ValueError: naming the argument.
    """
    recipe = get(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: got {type(recipe).__name__}, takes a Recipe or its name")
    for name, count in (("batch", batch), ("sequence", sequence), ("gpus", gpus)):
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST:
            raise ValueError(f"{name}: got {count!r}, takes an integer from 1 to {_MOST}")
    if parallel not in PARALLEL:
        raise ValueError(f"parallel: got {parallel!r}, takes 'ddp' or 'fsdp'")
    memory = None if device_memory is None else parse_bytes("device_memory", device_memory)
    shards = gpus if parallel == "fsdp" else 1
    common: dict[str, Any] = {
        "recipe": recipe.name,
        "gpus": gpus,
        "parallel": parallel,
        "device_memory": memory,
        "_bytes": recipe.bytes_per_parameter() / shards + _buckets(recipe, gpus, parallel),
    }
    if isinstance(model_or_config, int) and not isinstance(model_or_config, bool):
        refused: dict[str, Any] = {"linear": linear, "loss": loss, "checkpointing": checkpointing or None}
        refused["accumulate"] = accumulate or None
        for name, value in refused.items():
            if value is not None:
                raise ValueError(f"{name}: got {value!r}, takes None for a mere number of parameters")
        return _of_count(model_or_config, recipe, shards, common)
    given: Any = model_or_config
    model = bare(given) if isinstance(given, nn.Module) else from_config(given)
    traced = Traced(model, recipe, linear, checkpointing, loss or token_loss, optimizer_arguments, accumulate)
    planner = _Planner(traced, gpus, parallel)
    if sequence > planner.positions:
        raise ValueError(
            f"sequence: got {sequence}, takes at most {planner.positions}, which is the number of positions that "
            f"{type(model).__name__} has"
        )
    at_peak, saved, where = planner.at(batch, sequence)
    return MemoryPlan(
        model=type(model).__name__,
        parameters=traced.parameters,
        linear=None if linear is None else str(linear).splitlines()[0],
        batch=batch,
        sequence=sequence,
        checkpointing=checkpointing,
        accumulate=accumulate,
        held=_named(planner.held) | {"gradients": planner.held.gradients},
        saved=saved,
        at_peak=at_peak,
        where=where,
        _planner=planner,
        **common,
    )


class _Planner:
    """A traced model on its GPUs: what a step of any batch and sequence takes on each."""

    def __init__(self, traced: Traced, gpus: int, parallel: Parallel) -> None:
        self._traced = traced
        self._sharded = parallel == "fsdp" and gpus > 1
        self.held = traced.held(gpus if self._sharded else 1)
        self._communication = 0
        if gpus > 1:
            self._communication = gathered(traced.model) if self._sharded else self.held.gradients

    @property
    def positions(self) -> int:
        """The most tokens that the model has positions for."""
        config = getattr(self._traced.model, "config", None)
        # Rotary positions can be worked out for any token; learned ones are rows of a table.
        if getattr(config, "rope_theta", None) is not None or getattr(config, "rope_parameters", None):
            return _MOST
        return int(getattr(config, "max_position_embeddings", None) or _MOST)

    def at(self, batch: int, sequence: int) -> tuple[dict[str, int], int, str]:
        """Bytes at the worst moment by what they are, those saved for the backward pass, where that moment is."""
        timeline = self._traced.trace(batch, sequence)
        if self._sharded:
            moment = timeline.peak(("activations", "loss", "backward"))
            moment = Moment(moment.where, {**moment.live, "gradients": self.held.gradients})
        else:
            moment = timeline.peak()
            if self._traced.accumulate:
                moment = Moment(moment.where, {**moment.live, "gradients": self.held.gradients})
        saved = timeline.at("backward").total
        parts = _named(self.held) | {str(part): moment.live[part] for part in PARTS}
        parts |= {"communication": self._communication, "workspaces": WORKSPACE}
        return parts, saved, moment.where


def _named(held: Held) -> dict[str, int]:
    return {
        "weights": held.weights, "buffers": held.buffers, "states": held.states, "low words": held.low_words,
    }  # fmt: skip


def _of_count(count: int, recipe: Recipe, shards: int, common: dict[str, Any]) -> MemoryPlan:
    if not 1 <= count < 2**63:
        got = count if count < 1 else "2^63 or more"
        raise ValueError(f"model_or_config: got {got}, takes at least 1 parameter, and under 2^63")
    low = weight_storage(recipe.weights).bytes_added(recipe.dtype)
    each = recipe.byte_breakdown()
    held = {
        "weights": each["weights"], "buffers": 0.0, "states": each["states"] - low, "low words": float(low),
        "gradients": each["gradients"],
    }  # fmt: skip
    parts = {name: int(size * count / shards) for name, size in held.items()}
    buckets = int(_buckets(recipe, common["gpus"], common["parallel"]) * count)
    return MemoryPlan(
        model=f"{count:,} parameters",
        parameters=count,
        linear=None,
        batch=None,
        sequence=None,
        checkpointing=False,
        accumulate=False,
        held=parts,
        saved=None,
        at_peak=parts | {"communication": buckets},
        where="optimizer",
        _planner=None,
        **common,
    )


def _buckets(recipe: Recipe, gpus: int, parallel: Parallel) -> float:
    """Bytes a parameter of DDP's buckets."""
    return float(recipe.dtype.itemsize) if gpus > 1 and parallel == "ddp" else 0.0
