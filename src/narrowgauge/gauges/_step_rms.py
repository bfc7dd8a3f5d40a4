"""RMS_t of a few tensors at every step: what foretells a loss spike is over within a few steps.

A second moment with β2 = 0.95 has caught up with a gradient twenty steps after it grew, and the loss follows one to
eight steps after RMS_t: whoever looks at every tenth step misses most of it. So RMS_t alone, of the tensors where
the paper found it to tell something, the embeddings, and of the first layer behind them, is taken at the steps
between the due ones, too. It stays on the device, and goes to the host with the losses.

Where it comes from:

- torch's Adam, AdamW and Adagrad leave gradient and second moment behind: a sixteenth of the rows of each is read.
- An optimizer of narrowgauge on a GPU measures a sample of what its kernel does (``gauges = "sampled"``).
- On a CPU the specification says it of a sample of these tensors, beside their compiled step (`measure_ratios`).

Source: SwitchBack, Section 3.4 and Figure 20 (which layers), Appendix E (how many steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge import rules
from narrowgauge.gauges._features import kernels_take
from narrowgauge.gauges._history import is_embedding
from narrowgauge.gauges._intended import After, moments_of, ratio_graph, rule_of, scalars_of, table_of
from narrowgauge.gauges._measured_steps import dense
from narrowgauge.gauges._modules import plain_name
from narrowgauge.gauges._segments import SHARE, Segments, flat, is_sampled, kept, sample
from narrowgauge.gauges._update_records import OwnSteps, measures_itself
from narrowgauge.kernels._tables import sent

_LISTS = 64  # lists of names that are known


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
        self._sampled: OwnSteps | None = None
        self._held: Tensor | None = None
        self._begun, self._turn = False, 0
        self._segments: dict[tuple[int, ...], Segments] = {}
        # Of tables of the optimizer's sums, by the list of names that they stand under: which rows are wanted, and
        # their places here. Lists stay the same from step to step, and looking through hundreds of names each time
        # would cost more than measuring.
        self._wanted: dict[int, tuple[Sequence[str], Tensor, Tensor]] = {}

    def begin(self, turn: int) -> None:
        """A step is about to be taken; `turn` says which sample of long tensors is measured."""
        self.abandon()
        if not self._places:
            return
        self._begun, self._turn = True, turn
        self._held = getattr(self._optimizer, "found_inf", None)
        if not self._own:
            return
        on_host = getattr(self._optimizer, "on_host", False)  # states on the CPU, parameters on a GPU
        if not on_host and any(flat(p).is_cuda for p in self._places):
            self._sampled = OwnSteps(self._optimizer, "sampled")
            self._sampled.begin(0)
        else:
            self._optimizer.measure_ratios(self._places, turn)

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
        for at, sums in self._sampled_rows(home) if self._sampled is not None else self._placed(home):
            rows.index_copy_(0, at, sums.to(home, non_blocking=True))
        self.abandon()
        return rows

    def abandon(self) -> None:
        """Leave the optimizer as its user left it."""
        if self._sampled is not None:
            self._sampled.abandon()
        elif self._begun and self._own:
            self._optimizer.ratios()
        self._sampled, self._begun, self._held = None, False, None

    def _sampled_rows(self, home: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """Places, and sums, of what kernels have measured."""
        for names, table in self._optimizer.last_stats.tables():
            known = self._wanted.get(id(names))
            if known is None or known[0] is not names:
                if len(self._wanted) > _LISTS:
                    self._wanted.clear()
                known = self._wanted[id(names)] = (names, *self._looked_up(names, table.device, home))
            _, picked, at = known
            if at.numel():
                yield at, table[:, -2:].index_select(0, picked)

    def _looked_up(self, names: Sequence[str], device: torch.device, home: torch.device) -> tuple[Tensor, Tensor]:
        own = self._optimizer.names_of(self._places)
        places = {name: self._places[p] for p, name in own.items()}
        found = [(n, places[name]) for n, name in enumerate(names) if name in places]
        both = torch.tensor(found, dtype=torch.int64, device="cpu").view(-1, 2)
        return both[:, 0].to(device, non_blocking=True), both[:, 1].to(home, non_blocking=True)

    def _placed(self, home: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        """The same of all others."""
        for ps, sums in self._found():
            yield sent(np.array([self._places[p] for p in ps]), home), sums

    def _found(self) -> list[tuple[list[Tensor], Tensor]]:
        if self._own:
            ratios: dict[Tensor, Tensor] = self._optimizer.ratios()
            return [([p], sums.view(1, 2)) for p, sums in ratios.items()]
        return [found for group in self._optimizer.param_groups for found in self._of_group(group)]

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
