"""What a real step takes on the CPU, beside which plans are laid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from narrowgauge.recipes._timeline import rounded
from narrowgauge.trainers._compare_run import peak_memory


def saved_bytes(model: nn.Module, loss: Callable[[], Tensor], given: Tensor | None = None) -> int:
    """Bytes of the storages that autograd saves, without those of the model and of what is given."""
    known = [*model.parameters(), *model.buffers(), *([] if given is None else [given])]
    there = {t.untyped_storage()._cdata for t in known}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        kept = loss()
    assert kept.dim() == 0
    return sum(rounded(storage.nbytes()) for at, storage in saved.items() if at not in there)


def peak_bytes(step: Callable[[], object]) -> int:
    """The allocator's own count of a step."""
    return peak_memory(step, 0, torch.device("cpu"))[1]
