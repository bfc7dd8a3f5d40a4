"""The stable embedding.

An embedding's gradient has a row for each token that occurred and zeros elsewhere, rows up to a hundred times
larger than other layers' gradients, and it changes from batch to batch: the hardest tensor there is for 8-bit
states. Three things together tame it: Xavier's uniform initialization (its bound keeps outliers out), a layer norm
on what comes out, and 32-bit states for the table.

Source: 8-bit Optimizers via Block-wise Quantization, Section 2.3 and Appendix C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from narrowgauge.storage import mark_states, marked_states


class StableEmbedding(nn.Embedding):
    """`nn.Embedding` with Xavier initialization, a layer norm on its output and 32-bit optimizer states.

    Add position embeddings after it. Takes all arguments of `nn.Embedding`; the output has the dtype of the table.
    Its table is marked (`narrowgauge.storage.mark_states`): optimizers of this library keep its moments in fp32
    whatever their `states` say. The norm's parameters are ``norm.weight`` and ``norm.bias``.

    Shapes: (...) of token indices to (..., embedding_dim).

    Source: 8-bit Optimizers via Block-wise Quantization, Section 2.3.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *args: Any, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, *args, **options)
        self.norm = nn.LayerNorm(embedding_dim, device=self.weight.device, dtype=self.weight.dtype)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        self._fill_padding_idx_with_zero()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        # Called whenever the module gets a parameter: made, loaded by assignment, replaced.
        super().register_parameter(name, param)
        if name == "weight" and param is not None:
            mark_states(param, "fp32")

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 sets sharded parameters without register_parameter unless a module overrides this.
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A move to another device may make another parameter, which lacks the mark.
        mark = marked_states(self.weight)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if mark is not None:
            mark_states(self.weight, mark)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled parameter comes without its mark.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        mark_states(self.weight, "fp32")

    def forward(self, input: Tensor) -> Tensor:
        return self.norm(super().forward(input)).to(self.weight.dtype)  # type: ignore[no-any-return]
