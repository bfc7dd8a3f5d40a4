"""Memory on each GPU when several share a training, and what offloading moves to the host.

DDP (torch's DistributedDataParallel): everything on each GPU, and the buckets in which gradients are reduced, which
stay allocated.

FSDP (`fully_shard` by `units`, resharded after the forward pass): weights, gradients and states cut by the number
of GPUs along each parameter's first side. A unit's weights are gathered when it runs, with those of the next
one on their way; its gradients are whole until they are reduced, while the next unit's are made. Parameters
outside of blocks (embeddings, the last norm, the output) stay gathered from their use in the forward pass to the
end of the step. This is an upper estimate: it takes all of these to fall into the worst moment.

States may be on the host (`narrowgauge.distributed.CPUOffload`): then a GPU has weights and gradients, and the host
a copy of each weight, room for each gradient, states and low words. Gradients may leave as well, each as soon as
the backward pass has made it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import nn

from narrowgauge.recipes._recipe import Recipe
from narrowgauge.recipes._timeline import PARTS, rounded
from narrowgauge.recipes._trace import Traced

MOST = 1 << 20  # sequences of a batch, tokens of a sequence
UNIT = 1 << 27  # parameters that FSDP2 gathers together
WORKSPACE = 2 * (32 << 20)  # bytes; cuBLAS's, of two threads

Parallel = Literal["ddp", "fsdp"]
PARALLEL: tuple[Parallel, ...] = ("ddp", "fsdp")
Offload = Literal["none", "states", "gradients"]
OFFLOADS: tuple[Offload, ...] = ("none", "states", "gradients")


class Planner:
    """A traced model on its GPUs: the memory of a step of any batch and sequence on each.

    Attributes:
        held: bytes that each GPU keeps from step to step, by what they are; gradients are all of them.
        host: bytes on the host, by what they are; none without offloading.
    """

    def __init__(self, traced: Traced, gpus: int, parallel: Parallel, offload: Offload) -> None:
        self._traced = traced
        self._sharded = parallel == "fsdp" and gpus > 1
        self.held = traced.held(gpus if self._sharded else 1)
        self.host: dict[str, int] = {}
        if offload != "none":
            self.host = traced.host()
            self.held |= {"states": 0, "low words": 0} | ({"gradients": 0} if offload == "gradients" else {})
        self._communication = 0
        if gpus > 1:
            self._communication = gathered(traced.model) if self._sharded else self.held["gradients"]

    @property
    def positions(self) -> int:
        """The most tokens that the model has positions for."""
        config: Any = getattr(self._traced.model, "config", None)
        config = getattr(config, "text_config", config)  # of a model of images and texts
        # Rotary positions exist for any token; learned ones are rows of a table.
        if getattr(config, "rope_theta", None) is not None or getattr(config, "rope_parameters", None):
            return MOST
        rows = int(getattr(config, "max_position_embeddings", None) or MOST)
        # RoBERTa's positions begin after the row of padding.
        skipped = [
            module.padding_idx + 1
            for name, module in self._traced.model.named_modules()
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None
        ]
        return rows - max(skipped, default=0)

    def peak(self, batch: int, sequence: int) -> int:
        """Bytes at the worst moment."""
        return sum(self.at(batch, sequence)[0].values())

    def at(self, batch: int, sequence: int) -> tuple[dict[str, int], int, str]:
        """Bytes at the worst moment by what they are, those saved for the backward pass, where that moment is."""
        timeline = self._traced.trace(batch, sequence)
        moment = timeline.peak(("activations", "loss", "backward")) if self._sharded else timeline.peak()
        saved = timeline.at("backward").total
        parts = {name: size for name, size in self.held.items() if name != "gradients"}
        parts |= {str(part): moment.live[part] for part in PARTS}
        if self._sharded or self._traced.accumulate:
            parts["gradients"] = self.held["gradients"]
        parts |= {"communication": self._communication, "workspaces": WORKSPACE}
        return parts, saved, moment.where


def bytes_each(
    recipe: Recipe, gpus: int, parallel: Parallel, offload: Offload
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes a parameter that a recipe keeps, by what they are: on each GPU, with DDP's buckets, and on the host."""
    low, all_of = recipe.low_bytes, recipe.byte_breakdown()
    device = {
        "weights": all_of["weights"], "buffers": 0.0, "states": all_of["states"] - low, "low words": low,
        "gradients": all_of["gradients"],
    }  # fmt: skip
    host: dict[str, float] = {}
    if offload != "none":
        host = {name: size for name, size in device.items() if name != "buffers"}
        device |= {"states": 0.0, "low words": 0.0} | ({"gradients": 0.0} if offload == "gradients" else {})
    shards = gpus if parallel == "fsdp" else 1
    device = {name: size / shards for name, size in device.items()}
    device["communication"] = float(recipe.dtype.itemsize) if gpus > 1 and parallel == "ddp" else 0.0
    return device, host


def gathered(model: nn.Module) -> int:
    """Bytes of whole parameters and whole gradients that FSDP has at its worst moment."""
    of_units = [{id(p): p for block in unit for p in block.parameters()} for unit in units(model)]
    everything = {id(p): rounded(p.nbytes) for p in model.parameters()}
    sizes = [sum(everything[p] for p in of_unit) for of_unit in of_units]
    inside = {p for of_unit in of_units for p in of_unit}
    root = sum(size for p, size in everything.items() if p not in inside)
    trained = sum(rounded(p.nbytes) for p in set(model.parameters()) if p.requires_grad and id(p) not in inside)
    return root + trained + 2 * sum(sorted(sizes)[-2:])  # the weights of two units, and their gradients


def units(model: nn.Module) -> list[list[nn.Module]]:
    """What `fully_shard` is given, one after the other: blocks in a row of `UNIT` parameters at most, or one block.

    FSDP2 gathers the weights and reduces the gradients of a unit together, and the host needs milliseconds for each
    (docs/decisions/fsdp2-host-bound.md). The blocks of a unit must run in the same forward pass, so they are of one
    `nn.ModuleList`.
    """
    found = []
    for stack in _stacks(model):
        whole = sum(p.numel() for p in stack.parameters())
        most = max(1, UNIT * len(stack) // max(1, whole))
        each = math.ceil(len(stack) / math.ceil(len(stack) / most))
        found += [list(stack[first : first + each]) for first in range(0, len(stack), each)]
    return found


def _stacks(model: nn.Module) -> list[nn.ModuleList]:
    """Stacks of blocks: lists of modules that are in no other."""
    found: list[nn.ModuleList] = []

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                found.append(child)
            else:
                collect(child)

    collect(model)
    return found
