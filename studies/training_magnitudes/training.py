"""One training in fp32, and how large things are in it: weights, updates, gradients, what blocks give out."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim import AdamW
from narrowgauge.trainers._parallel import blocks
from studies.shared import language as language_run
from studies.shared.language import Setting

Result = dict[str, Any]
BETA2 = 0.999
MODELS = {"causal": "GPT", "masked": "BERT"}


@dataclass(frozen=True)
class Plan:
    """Attributes:
    causal, masked: what is trained of each kind.
    every: steps between looks at weights and updates, which cost a copy; the others are looked at in each.
    """

    causal: Setting
    masked: Setting
    every: int = 5


@dataclass(frozen=True)
class Task:
    """A run: ``"causal"`` or ``"masked"``, and a seed."""

    kind: str
    seed: int


def run(task: Task, plan: Plan) -> Result:
    """Train, and look.

    Returns:
        `loss` of each step; `looked`, the steps at which `weight_norm` and `update_norm` were taken; of each step
        `embedding_gradient`, the largest magnitude in the gradient of the token embedding, `median_gradient` and
        `largest_gradient`, the median and the largest of that over all other matrices; `max` and `mean` magnitudes
        of the gradient of a feed-forward weight in the middle, and of the output of the first and the last block;
        `second_moment_orders`, at the looks, orders of magnitude that second moments span, `median` and `most` of
        all matrices.
    """
    begun, setting = time.perf_counter(), getattr(plan, task.kind)
    model = language_run.start(setting, task.seed)
    examples = language_run.task_of(setting, task.seed)
    optimizer = AdamW(
        model.named_parameters(), lr=setting.lr, betas=(setting.beta1, BETA2), eps=setting.eps, weights="plain",
        states="fp32", weight_decay=setting.weight_decay, max_grad_norm=setting.clip or None,
    )  # fmt: skip
    looker = _Looker(model)
    for number in range(1, setting.steps + 1):
        language_run.set_rate(optimizer, setting.rate(number))
        optimizer.zero_grad()
        loss = examples.loss(model, language_run.moved(examples.draw(), setting.device))
        torch.autograd.backward(loss)
        looker.gradients(loss)
        if number % plan.every == 0:
            looker.update(optimizer)
        else:
            optimizer.step()
    found = looker.found()
    return {
        **found,
        "looked": list(range(plan.every, setting.steps + 1, plan.every)),
        "diverged": not math.isfinite(found["loss"][-1]),
        "seconds": time.perf_counter() - begun,
    }


class _Looker:
    """Numbers stay on the device until the end: waiting for them would cost more than they do."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        self._embedding = embedding
        self._others = [p for p in self._parameters if p.dim() == 2 and p is not embedding]
        layers = list(blocks(model))
        middle = layers[len(layers) // 2]
        # Of a block the widest matrix is of its feed-forward part.
        self._feed_forward = max(middle.parameters(), key=lambda p: p.numel())
        self._numbers: dict[str, list[Tensor]] = defaultdict(list)
        for name, block in (("first", layers[0]), ("last", layers[-1])):
            block.register_forward_hook(self._hook(f"{name} block"))

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            self._magnitudes(name, output[0] if isinstance(output, tuple) else output)

        return look

    @torch.no_grad()
    def _magnitudes(self, name: str, x: Tensor) -> None:
        magnitude = x.detach().abs()
        self._numbers[f"{name}, max"].append(magnitude.max())
        self._numbers[f"{name}, mean"].append(magnitude.mean())

    @torch.no_grad()
    def gradients(self, loss: Tensor) -> None:
        others = torch.stack(torch._foreach_norm([_gradient(p) for p in self._others], math.inf))
        numbers = self._numbers
        numbers["loss"].append(loss.detach())
        numbers["embedding_gradient"].append(_gradient(self._embedding).abs().max())
        numbers["median_gradient"].append(others.median())
        numbers["largest_gradient"].append(others.max())
        self._magnitudes("feed-forward gradient", _gradient(self._feed_forward))

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step, and the norms of the weights before it and of what it added."""
        before = [p.detach().clone() for p in self._parameters]
        optimizer.step()
        moved = torch._foreach_sub([p.detach() for p in self._parameters], before)
        self._numbers["weight_norm"].append(_norm(before))
        self._numbers["update_norm"].append(_norm(moved))
        spans = [orders(optimizer.state[p]["v"]) for p in self._parameters if p.dim() == 2]
        for name, of in (("median", torch.median), ("most", torch.max)):
            self._numbers[f"second_moment_orders, {name}"].append(of(torch.stack(spans)))

    def found(self) -> dict[str, list[float]]:
        return {name: torch.stack(numbers).tolist() for name, numbers in self._numbers.items()}


def orders(v: Tensor) -> Tensor:
    """Orders of magnitude that the elements of a matrix span, zeros and one in 1,000 at each end left aside."""
    x = v[v > 0]
    aside = x.numel() // 1000
    least, most = (x.kthvalue(k).values for k in (aside + 1, x.numel() - aside))
    return (most / least).log10()


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


def _norm(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).double().norm().float()


LARGE = Plan(
    Setting(gauge_every=0),
    Setting(gauge_every=0, model="bert", **language_run.MASKED),
)
_TINY = {"megabytes": 4, "vocabulary": 1024, "sequence": 64, "batch": 8, "steps": 200, "warmup": 40, "lr": 1e-3}
SMALL = Plan(
    replace(LARGE.causal, model="micro", **_TINY), replace(LARGE.masked, model="bert-micro", **_TINY),
)  # fmt: skip
_TOY = {"megabytes": 1, "vocabulary": 300, "sequence": 24, "batch": 4, "steps": 20, "warmup": 4}
CHECK = Plan(replace(SMALL.causal, **_TOY), replace(SMALL.masked, **_TOY))
