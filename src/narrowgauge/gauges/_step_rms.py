"""RMS_t of a few tensors at every step: what foretells a loss spike is over within a few steps.

A second moment with β2 = 0.95 has caught up with a gradient twenty steps after it grew, and the loss follows one to
eight steps after RMS_t: whoever looks at every tenth step misses most of it. So RMS_t alone, of the tensors where
the paper found it to tell something, the embeddings, and of the first layer behind them, is taken at the steps
between the due ones, too. It stays on the device, and goes to the host with the losses.

Of each tensor one row in sixteen is read, another at every step:

- torch's Adam, AdamW and Adagrad leave gradient and second moment to be read after the step.
- An optimizer of narrowgauge keeps its second moment in codes. So the moment is decoded before the step, and what
  the step makes of it and of the gradient is worked out after it; a step that was not taken has nothing.

Source: SwitchBack, Section 3.4 and Figure 20 (which layers), Appendix E (how many steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge import rules
from narrowgauge.gauges._features import kernels_take
from narrowgauge.gauges._history import is_embedding
from narrowgauge.gauges._intended import (
    After,
    Averaging,
    moments_of,
    numbers_of,
    ratio_graph,
    rule_of,
    scalars_of,
    table_of,
)
from narrowgauge.gauges._measured_steps import dense
from narrowgauge.gauges._modules import plain_name
from narrowgauge.gauges._segments import SHARE, RowSample, Segments, flat, is_sampled, kept, sample
from narrowgauge.gauges._update_records import measures_itself
from narrowgauge.kernels._tables import sent


def parameters_with_rms(
    model: nn.Module, names: Mapping[Tensor, str], wanted: Iterable[str] | None
) -> list[Tensor]:
    """The parameters whose RMS_t is taken at every step.

    Args:
        model: without wrappers.
        names: of the parameters, in the model's order.
        wanted: names; None for the weights of embeddings and of the first other layer with a matrix.

    Raises:
        TypeError: for what is no list of names.
        ValueError: for a name that no parameter has.
    """
    if wanted is not None:
        given = [wanted] if isinstance(wanted, str) else wanted
        if not isinstance(given, Iterable):
            raise TypeError(f"rms_of: got {wanted!r}, takes names of parameters")
        owners = {name: p for p, name in names.items()}
        given = list(dict.fromkeys(given))
        unknown = [name for name in given if name not in owners]
        if unknown:
            raise ValueError(f"rms_of: got {unknown[0]!r}, takes names of the model's parameters")
        return [owners[name] for name in given]
    found = embeddings(model, names)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight in names and weight.dim() >= 2 and weight not in found:
            return [*found, weight]
    return list(found)


def embeddings(model: nn.Module, names: Mapping[Tensor, str]) -> dict[Tensor, None]:
    """The weights of embeddings, by what their modules are or how they are called; arguments as above."""
    found: dict[Tensor, None] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight not in names or weight.dim() < 2:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_embedding(plain_name(f"{name}.weight")):
            found[weight] = None
    return found | {p: None for p, name in names.items() if p.dim() >= 2 and is_embedding(name)}


@dataclass(frozen=True, eq=False)
class _ParameterBefore:
    """What one of narrowgauge's optimizers has of a parameter before a step, as a sample of its rows.

    Attributes:
        plan, group: the parameter's, as the optimizer shows them.
        rows: the sample.
        weight, second_moment: float32.
        steps: how many steps the parameter has taken: 0-d.
    """

    plan: Any
    group: Mapping[str, Any]
    rows: RowSample
    weight: Tensor
    second_moment: Tensor
    steps: Tensor

    @classmethod
    def of(cls, view: Any, turn: int) -> _ParameterBefore | None:
        """That of a parameter; None where it has no elements, or its rule no second moment."""
        plan, p = view.plan, view.p
        slot = next((slot for slot in plan.slots if slot.slot.name == "v"), None)
        if slot is None or not p.numel():
            return None
        rows = row_sample(view, turn)
        some = rows.of(p)
        state = view.state
        if state:
            read = [*slot.keyed(slot.tensors(state)), *([plan.weight_key] if plan.weight_key is not None else [])]
            state = {"step": state["step"]} | {key: rows.of(state[key]) for key in read}
        else:
            state = plan.init(some, view.group)
        low = state[plan.weight_key] if plan.weight_key is not None else None
        weight = plan.weight.read(some, low).to(torch.float32, copy=True)
        moment = slot.decode(state, some.shape).to(torch.float32, copy=True)
        return cls(plan, view.group, rows, weight, moment, state["step"].clone())

    def sums(self, after: Any, grad: Tensor, inverse: Tensor | None) -> Tensor | None:
        """The two sums of the step that was taken, zeros if it was not: float64 (1, 2).

        Args:
            after: the parameter as the optimizer shows it after the step.
            grad: the sample's.
            inverse: of a loss scale; None without one.
        """
        grad = grad.reshape(self.weight.shape).to(torch.float32)
        for factor in (inverse, after.clipping):
            grad = grad if factor is None else grad * factor.to(grad.device, non_blocking=grad.is_cuda)
        step = float(self.steps) + 1 if self.steps.is_cpu else self.steps.to(torch.float64) + 1
        scalars = self.plan.rule.scalars(numbers_of(self.group), step)
        ratio = rules.squared_ratio(
            self.plan.rule, Averaging(), self.weight, grad, {"v": self.second_moment}, scalars
        )
        if ratio is None:
            return None
        total = ratio.sum(dtype=torch.float64) * (self.rows.elements / ratio.numel())
        sums = torch.stack([total, torch.full_like(total, self.rows.elements)])[None]
        return torch.where(after.state["step"] > self.steps, sums, 0.0) if after.state else torch.zeros_like(sums)


def row_sample(view: Any, turn: int) -> RowSample:
    """Which rows of a parameter are looked at: whole blocks of its moments."""
    blocks = [slot.block_size for slot in view.plan.slots if slot.storage.quantized]
    return RowSample(view.p.numel(), max(blocks, default=1), turn)


class StepRms:
    """The sums of RMS_t of some parameters, one step at a time.

    Args:
        optimizer: any.
        ps: the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ps: Sequence[Tensor]) -> None:
        self._optimizer: Any = optimizer
        self._places = {p: place for place, p in enumerate(ps)}
        self._own = measures_itself(optimizer)
        self._before: dict[Tensor, _ParameterBefore] = {}
        self._caught: dict[Tensor, Tensor] = {}  # samples of gradients that are freed within the step
        self._hooks: list[RemovableHandle] = []
        self._held: Tensor | None = None
        self._begun, self._turn = False, 0
        self._segments: dict[tuple[int, ...], Segments] = {}

    def begin(self, turn: int) -> None:
        """A step is about to be taken; `turn` says which sample of long tensors is measured."""
        self.abandon()
        if not self._places:
            return
        self._begun, self._turn = True, turn
        self._held = getattr(self._optimizer, "found_inf", None)
        if not self._own:
            return
        for p in self._places:
            view = self._optimizer.parameter_view(p)
            before = _ParameterBefore.of(view, turn) if view is not None and p.requires_grad else None
            if before is not None:
                self._before[p] = before
                if getattr(self._optimizer, "in_backward", None) is not None:
                    self._hooks.append(p.register_hook(partial(self._catch, p)))  # type: ignore[no-untyped-call]

    def _catch(self, p: Tensor, grad: Tensor) -> None:
        self._caught.setdefault(p, self._before[p].rows.of(flat(grad)).clone())

    def end(self, home: torch.device) -> Tensor | None:
        """The sum of g^2 / max(v_hat, eps^2), and of how many elements: float64 (parameters, 2).

        Zeros for a parameter without: no second moment, no gradient, a step that was skipped. None if `begin` was
        not called.

        Args:
            home: the device of the result.
        """
        if not self._begun:
            return None
        rows = torch.zeros(len(self._places), 2, dtype=torch.float64, device=home)
        for ps, sums in self._found():
            at = sent(np.array([self._places[p] for p in ps]), home)
            rows.index_copy_(0, at, sums.to(home, non_blocking=True))
        self.abandon()
        return rows

    def abandon(self) -> None:
        """Forget a step that was begun."""
        for hook in self._hooks:
            hook.remove()
        self._before, self._caught, self._hooks = {}, {}, []
        self._begun, self._held = False, None

    def _found(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        if not self._own:
            for group in self._optimizer.param_groups:
                yield from self._of_group(group)
            return
        inverse = self._optimizer.inverse_scale()
        for p, before in self._before.items():
            view = self._optimizer.parameter_view(p)
            grad = self._caught.get(p)
            if grad is None and view.grad is not None:
                grad = before.rows.of(view.grad)
            sums = before.sums(view, grad, inverse) if grad is not None else None
            if sums is not None:
                yield [p], sums

    def _of_group(self, group: Mapping[str, Any]) -> Iterable[tuple[list[Tensor], Tensor]]:
        rule, state = rule_of(self._optimizer, group), self._optimizer.state
        devices: dict[torch.device, list[Tensor]] = {}
        for p in group["params"]:
            if p in self._places and p.grad is not None and not p.is_complex() and flat(p).numel():
                devices.setdefault(flat(p).device, []).append(p)
        for ps in devices.values():
            moments = [moments_of(group, state.get(p, {})) for p in ps]
            if rule is None or not all("v" in of for of in moments):
                continue
            grads = [flat(dense(p.grad)) for p in ps]
            scalars = scalars_of(rule, group, [state[p] for p in ps], grads[0].device)
            found = self._ratios(rule, scalars, grads, [flat(of["v"]) for of in moments])
            if self._held is not None:
                found = torch.where(torch.as_tensor(self._held).to(found.device).reshape(()) > 0, 0.0, found)
            yield ps, found

    def _ratios(
        self, rule: rules.Rule, scalars: dict[str, rules.Scalar], grads: list[Tensor], moments: list[Tensor]
    ) -> Tensor:
        """The sums of some vectors, from samples: float64 (vectors, 2)."""
        lengths = [kept(grad.numel(), self._turn, SHARE) for grad in grads]
        if kernels_take([*grads, *moments]):
            from narrowgauge.kernels._updates import measured  # here and not above: it brings triton

            names, share = tuple(scalars), (SHARE, self._turn % SHARE)
            samples = [share if is_sampled(grad.numel(), SHARE) else (1, 0) for grad in grads]
            numbers = table_of(scalars, len(grads), grads[0].device)
            inputs = {"grad": grads, "v": moments}
            graph = ratio_graph(rule, names)  # type: ignore[arg-type]  # rules are values, and have hashes
            found = measured(None, graph, names, numbers, inputs, (), samples)[:, :1]
        else:
            segments = self._segments.setdefault(tuple(lengths), Segments(tuple(lengths), grads[0].device))
            grad, v = (
                segments.rows([sample(x, self._turn, SHARE) for x in some], torch.float32)
                for some in (grads, moments)
            )
            # The weight is looked at for a decay in the gradient, of which the second moment is made already.
            ratio = rules.squared_ratio(rule, After(), grad, grad, {"v": v}, segments.columns(scalars))
            assert ratio is not None
            found = segments.sums([ratio])
        known = [[x.numel() / length, x.numel()] for x, length in zip(grads, lengths, strict=True)]
        factors = sent(np.array(known, dtype=np.float64), found.device)
        return torch.cat([found * factors[:, :1], factors[:, 1:]], dim=1)
