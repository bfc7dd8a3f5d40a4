"""What a GPU holds of a training that runs on several.

DDP (torch's DistributedDataParallel): everything on each GPU, and beside the gradients the buckets that they
are reduced in, which stay.

FSDP (`fully_shard` by block, resharded after the forward pass): weights, gradients and states cut by the number
of GPUs along each parameter's first side. A block's weights are gathered when it runs, with those of the next
one on their way; its gradients are whole until they are reduced, while the next block's are made. What is in no
block (embeddings, the last norm, the output) stays gathered from its use in the forward pass to the end of the
step. This is an estimate from above: it takes all of these to fall into the worst moment.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from narrowgauge.recipes._timeline import rounded

Parallel = Literal["ddp", "fsdp"]
PARALLEL: tuple[Parallel, ...] = ("ddp", "fsdp")


def gathered(model: nn.Module) -> int:
    """Bytes of whole parameters and whole gradients that FSDP has at its worst moment."""
    blocks = [block for blocks in _stacks(model) for block in blocks]
    everything = {id(p): rounded(p.nbytes) for p in model.parameters()}
    sizes = [sum(everything[id(p)] for p in set(block.parameters())) for block in blocks]
    inside = {id(p) for block in blocks for p in block.parameters()}
    root = sum(size for p, size in everything.items() if p not in inside)
    trained = sum(rounded(p.nbytes) for p in set(model.parameters()) if p.requires_grad and id(p) not in inside)
    return root + trained + 4 * max(sizes, default=0)


def _stacks(model: nn.Module) -> list[nn.ModuleList]:
    """Stacks of blocks: lists of modules that are in no other."""
    found: list[nn.ModuleList] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                found.append(child)
            else:
                look(child)

    look(model)
    return found
