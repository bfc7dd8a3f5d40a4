"""How large things are in a training: weights beside updates, embeddings beside layers, one step beside the last.

    python -m studies.training_magnitudes.run --device cuda --out NAME.json
    python -m studies.training_magnitudes.run --small --out NAME.json # minutes on 2 CPU cores
    python -m studies.training_magnitudes.run --check --out runs/check.json # seconds on a CPU

Three claims rest on that. Collage: weights are far larger than updates, so a sum of both loses bits (Figure 2).
8-bit optimizers: the gradient of the token embedding has the largest elements, so it keeps 32-bit states (Appendix
C). SwitchBack: the largest magnitudes change smoothly from step to step, so that an average over the last steps
may set the scale of float8 (Section 2.3, Figure 11). A GPT and a BERT are trained with AdamW in fp32, and looked
at; nothing is quantized.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from narrowgauge.optim import AdamW
from narrowgauge.recipes._parallel import units
from narrowgauge.trainers._task import to_device
from studies.shared import language, options
from studies.shared.language import Setting
from studies.shared.resumable import carry_out

Result = dict[str, Any]
BETA2 = 0.999
MODELS = {"causal": "GPT", "masked": "BERT"}


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    causal: Setting
    masked: Setting
    every: int = (
        5  # steps between looks at weights and updates, which cost a copy; the others are looked at in each
    )


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
    model = language.start(setting, task.seed)
    examples = language.task_of(setting, task.seed)
    optimizer = AdamW(
        model.named_parameters(), lr=setting.lr, betas=(setting.beta1, BETA2), eps=setting.eps, weights="plain",
        states="fp32", weight_decay=setting.weight_decay, max_grad_norm=setting.clip or None,
    )  # fmt: skip
    looker = _Looker(model)
    for number in range(1, setting.steps + 1):
        language.set_rate(optimizer, setting.rate(number))
        optimizer.zero_grad()
        loss = examples.loss(model, to_device(examples.draw(), torch.device(setting.device)))
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
        layers = list(itertools.chain(*units(model)))
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
    Setting(gauge_every=0, model="bert", **language.MASKED),
)
_TINY = {"megabytes": 4, "vocabulary": 1024, "sequence": 64, "batch": 8, "steps": 200, "warmup": 40, "lr": 1e-3}
SMALL = Plan(
    replace(LARGE.causal, model="micro", **_TINY), replace(LARGE.masked, model="bert-micro", **_TINY),
)  # fmt: skip
_TOY = {"megabytes": 1, "vocabulary": 300, "sequence": 24, "batch": 4, "steps": 20, "warmup": 4}
CHECK = Plan(replace(SMALL.causal, **_TOY), replace(SMALL.masked, **_TOY))


def about(plan: Plan, seeds: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    settings = {kind: getattr(plan, kind) for kind in MODELS}
    return {
        **options.origin(plan.causal.device),
        "training": {
            **{kind: setting.plain() for kind, setting in settings.items()},
            "model": ", ".join(setting.model for setting in settings.values()),
            "steps": plan.causal.steps,
            "seed": 0,
            "seeds": seeds,
        },
        "data": language.about_text(plan.causal),
        "rows": [
            {
                "name": kind,
                "title": MODELS[kind],
                "model": s.model,
                "parameters": language.parameters_of(s, s.model),
            }
            for kind, s in settings.items()
        ],
    }


def main(
    out: options.Out,
    data: options.Text = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of each model.")] = 3,
    steps: Annotated[int | None, typer.Option(min=10, help="Optimizer steps. [300]")] = None,
    device: options.Device = "cpu",
    seconds: options.Seconds = math.inf,
    jobs: options.Jobs = 1,
    resume: options.Resume = False,
    small: options.Small = False,
    check: options.Check = False,
) -> None:
    """Train a GPT and a BERT in fp32, and write how large everything was."""
    options.one_thread(check)
    plan = CHECK if check else SMALL if small else LARGE
    changes = options.given(data=data, device=device, steps=steps)
    plan = replace(plan, **{kind: replace(getattr(plan, kind), **changes) for kind in MODELS})
    end = time.monotonic() + seconds
    seeds = 1 if check else seeds
    tasks = [Task(kind, seed) for seed in range(seeds) for kind in MODELS]
    make = functools.partial(run, plan=plan)
    carry_out(out, about(plan, seeds), tasks, make, end, jobs=jobs, resume=resume, grows=("seeds",))


if __name__ == "__main__":
    typer.run(main)
