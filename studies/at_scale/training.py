"""One long training under any optimizer, as fast as a GPU allows, which goes on where another call left it.

Model and loss are compiled as one graph; a pass takes as many windows as fit, and no step waits for the device.
The text is read once: its parts in order, the windows of a part in an order of the seed's. So a step's windows
follow from its number, and all rows of a seed see the same. Several GPUs may share a run: each takes some windows
of a step, and gradients are added up in their own format before anything looks at them.

Every row starts from the same weights, numbers of bf16, and all its parameters decay. Gradients are clipped by
torch for all. What is measured beside the training loss: the validation loss at fixed tokens, this library's
gauges, and at the end the tasks of `tasks.py`.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from narrowgauge import gauges
from narrowgauge._schedule import schedule
from narrowgauge.optim import NarrowOptimizer, UpdateStats
from narrowgauge.recipes import Adapt
from narrowgauge.trainers import next_token_loss, validation_windows
from narrowgauge.trainers._environment import describe_environment
from studies.at_scale import tasks
from studies.at_scale.parts import Parts, ids
from studies.bytes_and_loss.rows import Ours, Row
from studies.shared.language import gauges_of, measured_bytes, set_rate, start_of

LOOK_EVERY = 50  # steps between looks at the losses, each of which waits for the device
POINTS = 400  # of the curve of the training loss

Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all runs of a results file share."""

    model: str = "gpt2"
    sequence: int = 1024
    batch: int = 64  # windows a step
    micro: int = 64  # windows a pass of a GPU; a step takes several
    tokens: int = 500_000_000  # to train on at most: whole steps of what there is
    warmup: int = 300  # steps of the learning rate's rise
    final: float = 0.1  # share of it that is left at the end of the cosine
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # norm of all gradients at most
    validations: int = 20  # at equal distances, the last at the end
    windows: int = 512  # to validate on on the way; at the end eight times as many
    gauge_every: int = 50  # steps between measurements of our optimizers' updates
    questions: int = 512  # of each task
    save_every: float = 240.0  # seconds between checkpoints
    compile: bool = True
    ranks: int = 1  # GPUs that share a run
    device: str = "cuda"

    def steps(self, sizes: list[int]) -> int:
        """Steps of a run on parts of so many tokens."""
        return min(sum(self.steps_of(size) for size in sizes), self.tokens // (self.batch * self.sequence))

    def steps_of(self, size: int) -> int:
        """Whole steps in a part."""
        return max(0, (size - 1) // self.sequence) // self.batch


def batches(parts: Parts, setting: Setting, seed: int, step: int, end: float, device: str) -> Iterator[Tensor]:
    """The windows of the steps after one, int64 (batch, sequence + 1) on the device."""
    first = 0
    while first < len(parts.sizes) and step >= setting.steps_of(parts.sizes[first]):
        step -= setting.steps_of(parts.sizes[first])
        first += 1
    for number, tokens in enumerate(parts.train(first, end), first):
        windows = tokens.to(device).unfold(0, setting.sequence + 1, setting.sequence)
        shuffle = torch.Generator().manual_seed(seed * len(parts.sizes) + number)
        places = torch.randperm(len(windows), generator=shuffle).to(device)
        for at in range(step, setting.steps_of(len(tokens))):
            yield ids(windows[places[at * setting.batch : (at + 1) * setting.batch]])
        step = 0


class Run:
    """A training as it stands; what is not a tensor of the model or the optimizer is in `kept`."""

    def __init__(self, row: Row, setting: Setting, lr: float, seed: int, parts: Parts, device: str) -> None:
        self.setting, self.lr, self.device = setting, lr, device
        vocabulary = parts.index["vocabulary"]
        self.model = copy.deepcopy(start_of(setting.model, vocabulary, setting.sequence, seed)).to(device)
        options = {
            "lr": torch.tensor(lr, device=device) if row.family == "torchao" else lr,
            "betas": (setting.beta1, setting.beta2), "eps": setting.eps, "weight_decay": setting.weight_decay,
        }  # fmt: skip
        self.optimizer = row.optimizer(self.model, options, seed)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.steps = setting.steps(parts.sizes)
        self.kept: dict[str, Any] = {"losses": [], "validation": [], "times": [], "seconds": 0.0}
        self.watch: gauges.Watch | None = None
        adapts = isinstance(row, Ours) and row.adapts
        self.adapt = Adapt(self.model, self.optimizer, every=setting.gauge_every) if adapts else None
        loss: Callable[[Tensor], Tensor] = lambda windows: next_token_loss(self.model, windows)  # noqa: E731
        self.loss = torch.compile(loss, fullgraph=True, dynamic=False) if setting.compile else loss
        self.held_out = validation_windows(parts.validation(), setting.sequence, 8 * setting.windows)

    @property
    def rank(self) -> int:
        """Of this process among those of the run."""
        return dist.get_rank() if self.setting.ranks > 1 else 0

    def agreed(self, yes: bool) -> bool:
        """Whether any process of the run says yes."""
        if self.setting.ranks == 1:
            return yes
        said = torch.tensor(int(yes), device=self.device)
        dist.all_reduce(said)
        return bool(said)

    @property
    def step(self) -> int:
        """Steps taken and looked at."""
        return len(self.kept["losses"])

    def take(self, number: int, windows: Tensor) -> Tensor:
        """A step: its loss, on the device."""
        setting = self.setting
        part = schedule("cosine", number, steps=self.steps, warmup=setting.warmup, final=setting.final)
        set_rate(self.optimizer, self.lr * part)
        self.optimizer.zero_grad(set_to_none=True)
        passes = windows[self.rank :: setting.ranks].split(setting.micro)
        total = torch.zeros((), device=self.device)
        for micro in passes:
            loss = self.loss(micro) / (len(passes) * setting.ranks)
            torch.autograd.backward(loss)
            total += loss.detach()
        if setting.ranks > 1:
            dist.all_reduce(total)
            found = [p.grad for p in self.parameters if p.grad is not None]
            for dtype in dict.fromkeys(gradient.dtype for gradient in found):
                gradients = [gradient for gradient in found if gradient.dtype == dtype]
                joined = _flatten_dense_tensors(gradients)
                dist.all_reduce(joined)
                for gradient, added in zip(gradients, _unflatten_dense_tensors(joined, gradients), strict=True):
                    gradient.copy_(added)
        nn.utils.clip_grad_norm_(self.parameters, setting.clip)
        if self.watch is not None:
            self.watch.loss(total)
        self.optimizer.step()
        return total

    def validate(self, last: bool = False) -> float:
        """Mean loss of the validation windows, by the graph that trains: it is compiled already."""
        windows = self.held_out if last else self.held_out[:: max(1, len(self.held_out) // self.setting.windows)]
        passes = windows.split(self.setting.micro)
        # Of several the last must be as large as the others: another shape would be compiled anew.
        passes = passes[: max(1, len(windows) // self.setting.micro)]
        losses = [self.loss(ids(micro.to(self.device))).detach() for micro in passes]
        return float(torch.stack(losses).mean())

    def save(self, path: Path) -> None:
        """Write a checkpoint aside, then rename it; the first process does."""
        if self.rank:
            return
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "kept": self.kept,
            "adapt": self.adapt.state_dict() if self.adapt else None,
            "random": torch.cuda.get_rng_state(self.device) if self.device != "cpu" else torch.get_rng_state(),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        """Go on with a checkpoint of the same run."""
        # Peers keep moments in classes of their own.
        state = torch.load(path, map_location=self.device, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.adapt:
            self.adapt.load_state_dict(state["adapt"])
        self.kept = state["kept"]
        if self.device == "cpu":
            torch.set_rng_state(state["random"].cpu())
        else:
            torch.cuda.set_rng_state(state["random"].cpu(), self.device)


class Holder(nn.Module):
    """A model that is never called through this: a hook would part the compiled graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def train(
    row: Row, setting: Setting, lr: float, seed: int, parts: Parts, work: Path, end: float, device: str
) -> Result:
    """Train a row to the end, or to a checkpoint.

    Args:
        row: what is trained.
        setting, lr, seed: how.
        parts: the text.
        work: folder of the run's checkpoint and records; one that is there is gone on with.
        end: in seconds of `time.monotonic`: no step is begun after it.
        device: where.

    Returns:
        `device`, its name; `validation_loss` in nats a token (None if diverged), `validation`: [step, loss] on the
        way, `curve`: [step, mean training loss since the point before], `tasks`: share of right answers and that of
        chance, `gauges` by step, `advice` of the gauges, `bytes` a parameter, `tokens_per_second` between looks,
        `seconds`; `widened` of a row that adapts: [step, name, storage before, after]. With `failed` if it is not
        at its end; then the last validation is of the step where it ended.
    """
    begun = time.monotonic()
    run = Run(row, setting, lr, seed, parts, device)
    checkpoint, records = work / "checkpoint.pt", work / "gauges.jsonl"
    if checkpoint.exists():
        run.load(checkpoint)
    elif not run.rank:
        records.unlink(missing_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    ours = isinstance(run.optimizer, NarrowOptimizer) and not run.rank
    with ExitStack() as stack:
        if ours:
            run.watch = stack.enter_context(gauges.watch(
                Holder(run.model), run.optimizer, setting.gauge_every, path=records, gradients=False,
                activations=False, states_every=0, rms_every=0, ranks="own", resume_from=run.step or None,
            ))  # fmt: skip
        _steps(run, parts, seed, end, begun, checkpoint)
    run.kept["seconds"] += time.monotonic() - begun
    result = _result(run)
    if run.step < run.steps and not result["diverged"]:
        run.save(checkpoint)
        seen = [*result["validation"], [run.step, run.validate()]]  # the last one is not in the checkpoint
        result |= {"validation": seen, "failed": f"ended after step {run.step} of {run.steps} for want of time"}
    elif not result["diverged"]:
        result["validation_loss"] = run.validate(last=True)
        result["tasks"] = tasks.answered(run.model, parts, setting.sequence, setting.questions, device)
    if ours:
        result |= _gauged(records)
    if "failed" not in result:
        checkpoint.unlink(missing_ok=True)
    return result


def _steps(run: Run, parts: Parts, seed: int, end: float, begun: float, checkpoint: Path) -> None:
    """All steps up to the end, or the time's end, with what is looked at between them."""
    setting, first = run.setting, run.step
    due = {run.steps * (k + 1) // setting.validations for k in range(setting.validations)}
    waiting: list[Tensor] = []
    since, saved, whole = time.monotonic(), begun, True
    for number, windows in enumerate(batches(parts, setting, seed, first, end, run.device), first + 1):
        waiting.append(run.take(number, windows))
        if number % LOOK_EVERY and number not in due and number != run.steps:
            continue
        run.kept["losses"] += torch.stack(waiting).tolist()
        now = time.monotonic()
        if whole and len(waiting) == LOOK_EVERY:
            run.kept["times"].append((now - since) / len(waiting))
        waiting.clear()
        if not math.isfinite(run.kept["losses"][-1]):
            break
        whole = number not in due
        if number in due:
            run.kept["validation"].append([number, run.validate()])
            print(f"{number}/{run.steps}: {run.kept['validation'][-1][1]:.4f}", flush=True)
        if number == run.steps or run.agreed(time.monotonic() >= end):
            break
        if time.monotonic() - saved >= setting.save_every:
            run.save(checkpoint)
            saved, whole = time.monotonic(), False
        since = time.monotonic()
    run.kept["losses"] += [float(loss) for loss in waiting]  # of a part that did not come


def _gauged(path: Path) -> Result:
    """What the gauges saw: of each measured step the sums over all parameters; advice; alarms of lost updates.

    `all_lost` has for each tensor that raised one [the step, the tensor's name].
    """
    found = gauges.read_records(path)
    sums: dict[int, list[UpdateStats]] = {}
    for record in found:
        if record["kind"] == "update":
            sums.setdefault(record["step"], []).append(
                UpdateStats(torch.tensor(record["sums"], dtype=torch.float64))
            )
    totals = {step: UpdateStats.total(each) for step, each in sums.items()}
    rms = {"rms": [total.rms for total in totals.values()]}
    advice = [[a.urgency, a.rule, a.finding] for a in gauges.advise(found)]
    lost = [[record["step"], record["name"]] for record in found if record["kind"] == "lost"]
    return {"gauges": gauges_of(totals) | rms, "advice": advice, "all_lost": lost}


def _result(run: Run) -> Result:
    """What is known of a run at any step."""
    kept, setting = run.kept, run.setting
    width = max(1, math.ceil(run.steps / POINTS))
    losses = kept["losses"]
    curve = [
        [min(a + width, len(losses)), statistics.fmean(losses[a : a + width])] for a in range(0, len(losses), width)
    ]
    times = kept["times"][1:] or kept["times"]  # kernels are compiled before the first
    return {
        "device": describe_environment(torch.device(run.device))["device"],
        "validation_loss": None,
        "diverged": not all(map(math.isfinite, losses[-1:])),
        "steps": len(losses),
        "tokens": len(losses) * setting.batch * setting.sequence,
        "validation": kept["validation"],
        "curve": curve,
        "bytes": measured_bytes(run.model, run.optimizer),
        "tokens_per_second": setting.batch * setting.sequence / statistics.median(times) if times else None,
        "seconds": kept["seconds"],
    } | ({"widened": [[c.step, c.name, c.was, c.becomes] for c in run.adapt.changes]} if run.adapt else {})


def plain(setting: Setting) -> dict[str, Any]:
    """For a results file."""
    return asdict(setting)
