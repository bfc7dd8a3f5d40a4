"""Precision that adapts while a model trains: a storage that loses too much becomes the next wider one.

A recipe is chosen before the training. Later the learning rate falls and gradients change, so a storage that is
wide enough at the first step may be too narrow at the last. `Adapt` measures at every tenth step what rounding
changes, and converts storages in the running optimizer:

    adapt = ng.recipes.Adapt(model, optimizer)      # one line; the loop stays as it is
    ...
    {"optimizer": optimizer.state_dict(), "adapt": adapt.state_dict(), ...}     # in a checkpoint

Three things are measured, each by a *quality* that is 1 if nothing is lost. For weights and moments it is the dot
product of the stored update and the intended one, over the squared norm of the latter (Collage, Definition 3.3).
Rounding errors that cancel over many elements leave it at 1.

* **Weights**: the update that is stored. The optimizer's step measures it. An update below a twentieth of the
  tensor's longest is not judged: it comes at the end of a learning rate's decay, and hardly moves the weight.
* **Moments**: the step that stored moments make, beside the step that exact moments would make. First moments in
  `log4` and `log8` lose nothing, because their error is added to the weight.
* **Linear layers with a plan**: 1 minus the error of each multiply in eight bits, as a share of its result, on the
  batch of that step. Layers inside a compiled region, and attentions with a plan, are not measured.

If the median of three measurements is off from 1 by more than the tolerance, the storage becomes the next wider one
of `_WIDER_WEIGHTS` or `_WIDER_STATES`, or the layer computes in high precision. Each change is a line in the log. A
storage that is still off after three more measurements is widened again. All other storages are not judged: among
them weights that are rounded stochastically, which are right in the mean and whose quality on a small tensor is
mostly noise; weights that are stored exactly; `kahan` and `expansion` weights of bf16; and moments in floats.

Nothing is measured between those steps, and measuring changes no bit: a run in which nothing is widened has the
same bits as a run without `Adapt`. At a step that measures, the host waits for the device once. Processes of the
default process group add their sums before they decide, so all decide alike.
"""

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge._arguments import Positive, Size, check, check_instance
from narrowgauge._before_step import BeforeStep, capturing
from narrowgauge._module_names import clean_name, unwrap_model, unwrap_optimizer
from narrowgauge._update_sums import Longest
from narrowgauge.linear._function import linear
from narrowgauge.linear._module import LowPrecisionConv1D, LowPrecisionLinear
from narrowgauge.linear._plan import HIGH_PRECISION, MULTIPLIES
from narrowgauge.optim import NarrowOptimizer

LOG = logging.getLogger("narrowgauge.recipes")

_WIDER_WEIGHTS = {
    torch.bfloat16: {"plain": "split8", "split8": "split"},
    torch.float16: {"plain": "kahan", "kahan": "master"},
}
_WIDER_STATES = {"4bit": "log8", "log4": "log8", "8bit": "log8", "fp8": "log8", "log8": "fp32"}
_MEASUREMENTS = 3  # decided by the median of this many
_ROWS = 4096  # rows of a layer's input that are measured, at most

Key = tuple[str, str]  # a parameter or layer, and "weights", a moment's slot, or a multiply


@dataclass(frozen=True)
class Change:
    """A storage that was widened, or a layer that was taken out of its plan.

    Attributes:
        step: the step after which.
        name: of the parameter, or of the layer.
        what: ``"weights"``, the slot of a moment, or ``"layer"``.
        was, becomes: the storages, or the plans.
        quality: the median that was off by more than the tolerance; 1 would mean that nothing was lost.
        tolerance: how far from 1 it may be.
    """

    step: int
    name: str
    what: str
    was: str
    becomes: str
    quality: float
    tolerance: float

    def __str__(self) -> str:
        off, of = 100 * abs(1 - self.quality), "update" if self.what == "weights" else "step"
        how = f"{off:.0f} % of its {of} was lost" if self.quality < 1 else f"its {of} was {off:.0f} % too large"
        if self.what == "layer":
            how = f"a product was off by {off:.0f} %"
        allowed = f"(tolerance {100 * self.tolerance:g} %)"
        return f"step {self.step}: {self.name}: {self.what} {self.was} -> {self.becomes}: {how} {allowed}"


class Adapt:
    """Widens what loses too much, while a model trains; see the module's text.

    It uses hooks of the optimizer's step, so it works in any loop, also in those of other libraries. Make it after
    the optimizer, and before a checkpoint is loaded.

    Args:
        model: the model, which may be wrapped; the log has its names.
        optimizer: one of narrowgauge's, or a wrapper that has it as ``optimizer``.
        tolerance: how far the quality may be from 1: 0.1 is a tenth of each step.
        every: weights are measured at multiples of this step.
        states_every: moments and layers are measured at multiples of this step; by default 10 times `every`.
        say: called with each change, in place of a warning of the logger ``narrowgauge.recipes``.

    Attributes:
        say: the function that is called with each change.
        step: number of steps taken.
        changes: in order, those before a resumed run's checkpoint included.

    Raises:
        TypeError: for another optimizer.
        ValueError: for an argument that is out of range, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        tolerance: float = 0.1,
        every: int = 10,
        states_every: int | None = None,
        say: Callable[[Change], object] | None = None,
    ) -> None:
        check_instance("model", model, nn.Module)
        optimizer = unwrap_optimizer(optimizer)
        if not isinstance(optimizer, NarrowOptimizer):
            raise TypeError(f"optimizer must be one of narrowgauge.optim, got a {type(optimizer).__name__}")
        self.tolerance = check("tolerance", tolerance, Positive)
        self.every = check("every", every, Size)
        self.states_every = check("states_every", 10 * every if states_every is None else states_every, Size)
        self.step, self.changes = 0, list[Change]()
        self._optimizer = optimizer
        self.say: Callable[[Change], object] = say or (lambda change: LOG.warning("%s", change))
        self._model = bare = unwrap_model(model)
        self._parameters = self._named()
        kinds = (LowPrecisionLinear, LowPrecisionConv1D)
        self._layers = {clean_name(n): m for n, m in bare.named_modules() if isinstance(m, kinds)}
        self._recent: dict[Key, list[float]] = {}
        self._sums: dict[Key, Tensor] = {}
        self._longest = Longest()  # of each parameter's intended updates
        self._setting = optimizer.gauges
        hooks = [layer.register_forward_hook(self._layer_hook(name)) for name, layer in self._layers.items()]
        before = optimizer.register_step_pre_hook(BeforeStep(self._before_step))
        self._handles: list[Any] = [*hooks, before, optimizer.register_step_post_hook(self._after_step)]
        self._expect()

    def remove(self) -> None:
        """Stop measuring. Storages that were widened remain so."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._optimizer.gauges = self._setting

    def _named(self) -> dict[str, Tensor]:
        return {clean_name(name): p for name, p in self._model.named_parameters()}

    def _due(self, every: int) -> bool:
        """Whether the next step measures."""
        return (self.step + 1) % every == 0

    def _expect(self) -> None:
        # Before the backward pass, which may step parameters. Gauges that were on before remain on.
        self._optimizer.gauges = self._setting or self._due(self.every)

    # Measurements: sums by key, float64 (2,), whose ratio is a quality.

    @torch.no_grad()
    def _before_step(self) -> None:
        """Measure moments; their exact values are gone after the step."""
        if self._due(self.every):  # another watcher may have switched the gauges off
            self._optimizer.gauges = True
        if not self._due(self.states_every):
            return
        for name, p in self._parameters.items():
            if p.grad is not None and any(what != "weights" for what, _, _ in self._wider(name)):
                self._sums |= {(name, slot): sums for slot, sums in self._optimizer.moment_quality(p).items()}

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if capturing():
            return
        weights, states = self._due(self.every), self._due(self.states_every)
        if weights or states:
            self._parameters = self._named()  # some may be new
        if weights:
            names = {p: name for name, p in self._parameters.items()}
            for ps, rows in self._optimizer.measured():
                pairs = rows[:, [1, 0]].unbind()  # stored_dot, intended_squared
                self._sums |= {(names[p], "weights"): pair for p, pair in zip(ps, pairs, strict=True) if p in names}
        self.step += 1
        if weights or states:
            self._judge(weights, states)
        self._sums.clear()
        self._expect()

    def _layer_hook(self, name: str) -> Callable[..., None]:
        def returned(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not isinstance(layer, LowPrecisionLinear | LowPrecisionConv1D):
                return  # another recipe has taken its plan away
            wanted = layer.training and output.requires_grad and self._due(self.states_every)
            if torch.compiler.is_compiling() or not wanted or not layer.plan.formats or not args:
                return
            x = _rows(args[0])

            def measure(gradient: Tensor) -> None:
                for multiply, sums in _multiply_sums(layer, x, _rows(gradient)).items():
                    self._sums[name, multiply] = sums

            output.register_hook(measure)  # type: ignore[no-untyped-call]

        return returned

    def _wider(self, name: str) -> Iterable[tuple[str, str, str]]:
        """What of a parameter could be wider: ("weights" or a slot, its storage, the next wider one)."""
        p = self._parameters[name]
        if p not in self._optimizer.state:
            return
        plan = self._optimizer.plan_of(p)
        if becomes := _WIDER_WEIGHTS.get(plan.dtype, {}).get(plan.weight.name):
            yield "weights", plan.weight.name, becomes
        for slot in plan.slots:
            if not slot.storage.error_feedback and (becomes := _WIDER_STATES.get(slot.storage.name)):
                yield slot.slot.name, slot.storage.name, becomes

    # Decisions

    def _judge(self, weights: bool, states: bool) -> None:
        """Act on the sums of a step."""
        due = {"weights": weights}
        storages = {
            (name, what): (was, becomes)
            for name in self._parameters
            for what, was, becomes in self._wider(name)
            if due.get(what, states)
        }
        kinds = (LowPrecisionLinear, LowPrecisionConv1D)
        planned = {name: layer for name, layer in self._layers.items() if isinstance(layer, kinds)}
        layers = {name: layer for name, layer in planned.items() if states and layer.plan.formats}
        multiplies = [(name, what) for name in layers for what in MULTIPLIES]
        quality = self._qualities([*storages, *multiplies])
        for (name, what), (was, becomes) in storages.items():
            if (found := self._crossed((name, what), quality)) is not None:
                with warnings.catch_warnings():  # a conversion warns of bits that were lost before it
                    warnings.filterwarnings("ignore", "param_groups: dropped", UserWarning)
                    self._optimizer.convert(self._parameters[name], **{what: becomes})
                self._changed(name, what, was, becomes, found)
        for name, layer in layers.items():
            crossed = [self._crossed((name, what), quality) for what in MULTIPLIES]
            if off := [each for each in crossed if each is not None]:
                was = layer.plan.name
                layer.set_plan(HIGH_PRECISION)
                self._changed(name, "layer", was, HIGH_PRECISION.name, min(off))

    def _qualities(self, keys: list[Key]) -> dict[Key, float]:
        """The quality by key, of the sums of all ranks; NaN where nothing was measured."""
        if not keys:
            return {}
        home = next(iter(self._parameters.values())).device
        none = torch.zeros(2, dtype=torch.float64, device=home)
        table = torch.stack([self._sums.get(key, none).to(home, non_blocking=True) for key in keys])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(table)
        pairs = dict(zip(keys, table.tolist(), strict=True))
        for (name, what), (_, squares) in pairs.items():
            if what == "weights" and self._longest.is_short(name, math.sqrt(squares)):
                pairs[name, what] = [0.0, 0.0]
        ratios = {key: a / b if b else math.nan for key, (a, b) in pairs.items()}
        return {key: 1 - math.sqrt(x) if key[1] in MULTIPLIES else x for key, x in ratios.items()}

    def _crossed(self, key: Key, quality: Mapping[Key, float]) -> float | None:
        """The median of the last measurements if it is off by more than the tolerance."""
        if not math.isfinite(quality[key]):
            return None
        recent = self._recent[key] = [*self._recent.get(key, ()), quality[key]][-_MEASUREMENTS:]
        median: float = statistics.median(recent)
        if len(recent) < _MEASUREMENTS or abs(1 - median) <= self.tolerance:
            return None
        del self._recent[key]
        return median

    def _changed(self, name: str, what: str, was: str, becomes: str, quality: float) -> None:
        change = Change(self.step, name, what, was, becomes, quality, self.tolerance)
        self.changes.append(change)
        self.say(change)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the step, the changes, and the measurements that later decisions need."""
        recent = [[name, what, list(values)] for (name, what), values in self._recent.items()]
        changes = [asdict(change) for change in self.changes]
        longest = {name: [*seen] for name, seen in self._longest.seen.items()}
        return {"step": self.step, "changes": changes, "recent": recent, "longest": longest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: make its changes, without calling `say`, and take its measurements.

        Load the optimizer's state before or after this.

        Raises:
            ValueError: for a change of a parameter or layer that this model does not have.
        """
        self._parameters = self._named()
        changes = [Change(**change) for change in state["changes"]]
        for change in changes:
            known: Mapping[str, Any] = self._layers if change.what == "layer" else self._parameters
            if change.name not in known:
                raise ValueError(f"state_dict: changes must be of this model, got one of {change.name!r}")
        for change in changes:
            if change.what == "layer":
                self._layers[change.name].set_plan(HIGH_PRECISION)
            else:
                self._optimizer.convert(self._parameters[change.name], **{change.what: change.becomes})
        self.step, self.changes = state["step"], changes
        self._recent = {(name, what): list(values) for name, what, values in state["recent"]}
        self._longest = Longest(state.get("longest"))
        self._expect()


def _rows(x: Tensor) -> Tensor:
    """A copy of rows of a matrix, at equal distances."""
    rows = x.detach().reshape(-1, x.shape[-1])
    return rows[:: -(-len(rows) // _ROWS)].clone()


def _multiply_sums(layer: Any, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """By multiply in eight bits, float64 (2,): the squared norms of its error and of its result.

    Args:
        layer: with a plan.
        x, g: rows of its input and of the gradient of its output.
    """
    weight = layer.weight.t() if isinstance(layer, LowPrecisionConv1D) else layer.weight
    plan = replace(layer.plan, tensor_absmax="step")  # the averages of the training are not changed

    def products(plan: Any) -> list[Tensor]:
        with torch.enable_grad():
            a, w = (t.detach().to(g.dtype, copy=True).requires_grad_() for t in (x, weight))
            y = linear(a, w, None, plan)
            return [y.detach(), *torch.autograd.grad(y, (a, w), g)]

    found: dict[str, Tensor] = {}
    for multiply, ours, exact in zip(MULTIPLIES, products(plan), products(HIGH_PRECISION), strict=True):
        if getattr(plan, multiply) is not None:
            error, whole = (t.to(torch.float64).square().sum() for t in (ours.float() - exact.float(), exact))
            found[multiply] = torch.stack([error, whole])
    return found
