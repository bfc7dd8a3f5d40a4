"""Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, Unpack

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from narrowgauge import rules
from narrowgauge._arguments import is_integer, is_number
from narrowgauge.optim._groups import undecayed
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import Options


class Muon(NarrowOptimizer):
    """Muon: orthogonalized momentum for matrices, in any weight storage, its momentum in any state storage.

    Arguments up to `adjust_lr_fn` are those of `torch.optim.Muon`, in its order and with its defaults.

    Biases, norms and embeddings take another rule, in groups that name it: ``Muon([{"params": matrices}, {"params":
    others, "rule": "adamw", "lr": 3e-4}])``. `for_model` makes these groups.

    Args:
        params: matrices (two dimensions), named or in groups; float32, bfloat16 or float16.
        lr: learning rate, a number or a 0-d tensor.
        weight_decay: decoupled decay.
        momentum: decay rate of the momentum.
        nesterov: orthogonalize the momentum as it will be.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: iterations, fewer than 100.
        adjust_lr_fn: ``"original"`` (also None) scales steps by sqrt(max(1, rows / columns)), ``"match_rms_adamw"``
            by 0.2 sqrt(max(rows, columns)), ``"spectral_unclamped"`` by sqrt(rows / columns).
        **options: the options of every optimizer; see `Options`. Slot: ``"m"``. ``arithmetic="strict"`` rounds
            what is elementwise; the orthogonalization is in bf16 with float32 accumulation in any case.

    Raises:
        ValueError: for a wrong value, shape or combination, by name.
        RuntimeError: for a complex parameter.

    Source: Jordan et al. 2024; Liu et al. 2025; as in torch.
    """

    rule = rules.Muon()
    refusals: ClassVar[Mapping[str, str]] = {
        "lr": "Learning rate should be >= 0 but is",
        "momentum": "momentum should be >= 0 but is",
        "weight_decay": "weight decay should be >= 0 but is",
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = rule.coefficients,
        eps: float = rule.eps,
        ns_steps: int = rule.steps,
        adjust_lr_fn: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        hyperparameters = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, hyperparameters, options)

    def base_rule(self, group: Mapping[str, Any]) -> rules.Rule:
        coefficients, steps, ratio = (group[key] for key in ("ns_coefficients", "ns_steps", "adjust_lr_fn"))
        if ratio not in (None, "original", "match_rms_adamw", "spectral_unclamped"):
            raise ValueError(f"Adjust learning rate function {ratio} is not supported")
        if not is_integer(steps) or not 0 <= steps < 100:
            raise ValueError(
                "Number of steps must be less than 100 for computational efficiency; "
                f"ns_steps must be from 0 to 99, got {steps!r}"
            )
        three = isinstance(coefficients, tuple | list) and len(coefficients) == 3
        if not three or not all(map(is_number, coefficients)):
            raise ValueError(
                f"Coefficients must be a tuple of exactly 3 values; ns_coefficients is {coefficients!r}"
            )
        return rules.Muon(tuple(coefficients), steps, group["eps"], ratio or "original")

    def check(self, group: Mapping[str, Any]) -> None:
        super().check(group)
        for p in group.get("params", ()):
            if p.is_complex():
                raise RuntimeError(f"Muon does not support complex parameters, got {p.dtype}")
            if p.dim() != 2:
                raise ValueError(
                    f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()}"
                )

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        heads: Sequence[str] = ("lm_head", "head", "classifier", "fc"),
        others: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Muon for the matrices of a model's hidden layers, AdamW for all other parameters, in one optimizer.

        AdamW steps embeddings, output layers and every parameter that does not have two dimensions of several
        elements; gains of weight norms are of one column. A weight that is tied to an embedding counts as an
        embedding. Norms and biases do not decay (see `split_decay`).

        Args:
            model: parameters that do not require gradients are left out.
            lr: learning rate of the matrices.
            weight_decay: of the matrices, and of AdamW's parameters unless `others` has its own.
            heads: output layers, by the last part of their names. If the model has `get_output_embeddings()`, that
                layer is one too.
            others: options of AdamW's groups, such as ``{"lr": 3e-4, "betas": (0.9, 0.95)}``. Without them AdamW
                has its defaults.
            **options: Muon's other arguments, and shared options of all groups.
        """
        output = getattr(model, "get_output_embeddings", lambda: None)()

        def is_apart(name: str, module: nn.Module) -> bool:
            tables = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            return tables or module is output or name.rpartition(".")[2] in heads

        apart = [module for name, module in model.named_modules() if is_apart(name, module)]
        kept, bare = {id(p) for m in apart for p in m.parameters()}, undecayed(model)
        adamw = {"rule": "adamw", "weight_decay": weight_decay, **(others or {})}
        groups: list[dict[str, Any]] = [
            {"params": []},
            {"params": [], **adamw},
            {"params": [], **adamw, "weight_decay": 0.0},
        ]
        for name, p in model.named_parameters():
            if p.requires_grad:
                number = 2 if id(p) in bare else 1 if id(p) in kept or p.dim() != 2 or min(p.shape) < 2 else 0
                groups[number]["params"].append((name, p))
        return cls([group for group in groups if group["params"]], lr, weight_decay, **options)
