"""RMS_t of a few tensors at every step.

A second moment with β2 = 0.95 follows a grown gradient within twenty steps, and the loss follows RMS_t after one to
eight: every tenth step would miss most RMS spikes. So RMS_t of embeddings, which the paper found to precede loss
spikes, and of the first other layer is measured between due steps too. It goes to the host with the losses.

Of each tensor one row in sixteen is read, different ones at each step:

- torch's Adam, AdamW and Adagrad leave gradient and second moment to be read after the step.
- Optimizers of narrowgauge store the second moment as codes. They are copied before the step, and averaged with the
  gradient once more after it; a step that was not taken gives zeros.

Source: SwitchBack, Section 3.4 and Figure 20 (which layers), Appendix E (how many steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from narrowgauge import rules
from narrowgauge.gauges._magnitudes import kernels_take
from narrowgauge.gauges._watch._batched_rows import BatchedRows, BlockSample, Sample, flat, flat_gradient, to_device
from narrowgauge.gauges._watch._intended_update import (
    AfterStep,
    moments_of,
    ratio_graph,
    rule_of,
    scalars_of,
    table_of,
)
from narrowgauge.gauges._watch._update_stats import measures_itself, unless_skipped


class StepRms:
    """The sums of RMS_t of some parameters, one step at a time.

    Args:
        optimizer: any.
        ps: the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ps: Sequence[Tensor]) -> None:
        self._optimizer: Any = optimizer
        self._index = {p: index for index, p in enumerate(ps)}
        self._own = measures_itself(optimizer)
        self._hooks: list[RemovableHandle] = []
        self._batches: dict[tuple[int, ...], BatchedRows] = {}
        self.abandon()

    def abandon(self) -> None:
        """Forget a step that was begun."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._before: dict[Tensor, tuple[BlockSample, Any]] = {}
        self._grads: dict[Tensor, Tensor] = {}  # samples of gradients that are freed within the step
        self._begun = False
        self._found_inf: Tensor | None = None

    def begin(self, index: int) -> None:
        """Before a step; `index` is the number of the sample."""
        self.abandon()
        if not self._index:
            return
        self._begun, self._sample = True, Sample(index)
        self._found_inf = getattr(self._optimizer, "found_inf", None)
        for p in self._index if self._own else ():
            view = self._optimizer.parameter_view(p)
            if view is None or not p.requires_grad:
                continue
            rows = BlockSample.of_view(view, index)
            before = view.second_moment(rows.of)
            # A rank with nothing of it may have to help others to the gradient that is cut as the parameter is.
            if before is not None or not view.p.numel():
                self._before[p] = rows, before
                if getattr(self._optimizer, "in_backward", None) is not None:
                    self._hooks.append(p.register_hook(partial(self._copy_gradient, p)))  # type: ignore[no-untyped-call]

    def _copy_gradient(self, p: Tensor, grad: Tensor) -> None:
        self._grads.setdefault(p, self._before[p][0].of(flat_gradient(p, grad)).clone())

    def end(self, home: torch.device) -> Tensor | None:
        """After the step: the sums of g^2 / max(v_hat, eps^2) and of elements, float64 (parameters, 2).

        Zeros without a second moment or a gradient, and for a skipped step. None if `begin` was not called.

        Args:
            home: the device of the result.
        """
        if not self._begun:
            return None
        rows = torch.zeros(len(self._index), 2, dtype=torch.float64, device=home)
        for ps, sums in self._found():
            at = to_device([self._index[p] for p in ps], home)
            rows.index_copy_(0, at, sums.to(home, non_blocking=True))
        self.abandon()
        return rows

    def _found(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        if not self._own:
            for group in self._optimizer.param_groups:
                yield from self._of_group(group)
            return
        inverse = self._optimizer.inverse_scale()
        for p, (rows, before) in self._before.items():
            view = self._optimizer.parameter_view(p)
            grad = self._grads.get(p)
            if grad is None and view.grad is not None:
                grad = rows.of(view.grad)
            if before is None or grad is None:
                continue
            sums = before.ratio_sums(view, grad, inverse)
            if sums is not None:
                yield [p], sums[None] * (rows.elements / before.elements)

    def _of_group(self, group: Mapping[str, Any]) -> Iterable[tuple[list[Tensor], Tensor]]:
        rule, state = rule_of(self._optimizer, group), self._optimizer.state
        devices: dict[torch.device, dict[Tensor, tuple[Tensor, Tensor]]] = {}
        for p in group["params"]:
            if rule is None or p not in self._index or p.grad is None or p.is_complex():
                continue
            found = moments_of(group, state.get(p, {}))
            if "v" in found:
                grad = flat_gradient(p, p.grad)
                if grad.numel():
                    devices.setdefault(grad.device, {})[p] = grad, flat(found["v"])
        for some in devices.values():
            assert rule is not None
            ps, grads, moments = list(some), *map(list, zip(*some.values(), strict=True))
            scalars = scalars_of(rule, group, [state[p] for p in ps], grads[0].device)
            sums = self._ratios(rule, scalars, grads, moments)
            yield ps, unless_skipped(sums, self._found_inf)

    def _ratios(
        self, rule: rules.Rule, scalars: dict[str, rules.Scalar], grads: list[Tensor], moments: list[Tensor]
    ) -> Tensor:
        """The sums of some vectors, estimated from samples: float64 (vectors, 2)."""
        sample = self._sample
        sizes = [sample.size(grad.numel()) for grad in grads]
        if kernels_take([*grads, *moments]):
            from narrowgauge.kernels._updates import measure  # here: importing it imports triton

            names, numbers = tuple(scalars), table_of(scalars, len(grads), grads[0].device)
            graph = ratio_graph(rule, names)
            rows = [sample.rows_of(grad.numel()) for grad in grads]
            sums = measure(None, graph, names, numbers, {"grad": grads, "v": moments}, (), rows)[:, :1]
        else:
            batched = self._batches.setdefault(tuple(sizes), BatchedRows(tuple(sizes), grads[0].device))
            grad, v = (batched.rows([sample.of(x) for x in some], torch.float32) for some in (grads, moments))
            # The weight matters only to a decay in the gradient, which the second moment has averaged already.
            ratio = rules.squared_ratio(rule, AfterStep(), grad, grad, {"v": v}, batched.columns(scalars))
            assert ratio is not None
            sums = batched.sums([ratio])
        known = [[x.numel() / size, x.numel()] for x, size in zip(grads, sizes, strict=True)]
        factors = to_device(known, sums.device, np.float64)
        return torch.cat([sums * factors[:, :1], factors[:, 1:]], dim=1)
