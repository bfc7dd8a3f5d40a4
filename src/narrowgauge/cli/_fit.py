"""`narrowgauge fit`: measure a model on its data, choose storages and plans, and write the recipe and the bill.

Model, data and loss are those of `narrowgauge train` with the same options.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from narrowgauge import recipes, trainers
from narrowgauge._files import set_aside
from narrowgauge.cli._compare import Record
from narrowgauge.cli._console import Display, asked_to_stop, complain
from narrowgauge.cli._environment import find_device, out_of_memory, refuse_processes
from narrowgauge.cli._files import UsageError, folder_to_write, user_input
from narrowgauge.cli._fit_options import OF_COMPARE, OF_TRAINING, FitOptions
from narrowgauge.cli._options import CompareOptions
from narrowgauge.cli._report._bill_page import MIXED, nats, write_bill
from narrowgauge.cli._results import REPORT
from narrowgauge.recipes import FittedRecipe
from narrowgauge.recipes._choices import TOLERANCE
from narrowgauge.trainers import DEFAULT_VOCABULARY, Comparison, presets
from narrowgauge.trainers._build import plain_model
from narrowgauge.trainers._compare_results import by_chance
from narrowgauge.trainers._data import Opened, open_task
from narrowgauge.trainers._image_models import ClipSizes
from narrowgauge.trainers._models import preset
from narrowgauge.trainers._run_folder import CHECKPOINTS, HISTORY
from narrowgauge.trainers._task import Examples, count, divided, to_device
from narrowgauge.trainers._tokens import is_prepared

RECIPE, BILL, CHECK = "recipe.toml", "bill.html", "verify"


def fit(options: FitOptions, words: Sequence[str]) -> int:
    """Run the command.

    Args:
        options: what the user asked for.
        words: the command line, from which the next commands are made.

    Returns:
        The exit status: 0, 2 if the model did not fit into memory, 130 if the check was stopped.
    """
    refuse_processes("fit")
    device = find_device(options.device)
    folder_to_write("--out", options.out)
    if any((options.out / name).exists() for name in (HISTORY, CHECKPOINTS)):
        raise UsageError(f"--out must not be the folder of a training, whose recipe it has, got {options.out}")
    path, commands = options.out / RECIPE, next_commands(options, words)
    try:
        with Display() as display:
            with user_input():
                work = _Work(options, open_task(options, display.stage), device)
            for note in work.opened.notes:
                display.say(note)
            with asked_to_stop(display.say, "stopping after this step, with nothing written") as asked:
                recipe = _chosen(work, display, asked)
            display.hide_stages()
        bill = recipe.bill()
        print(bill.text(display.console.width))
        if bill.over:
            complain(bill.over)
        set_aside(options.out, (RECIPE, BILL))
        recipe.save(path)
        write_bill(recipe, options.out / BILL, commands=commands)
        if options.verify:
            print(
                f"--verify: {2 * options.verify_seeds} trainings, of {MIXED} and of the choice "
                f"(--verify-seeds {options.verify_seeds}), with {options.verify_steps} steps each (--verify-steps)",
                flush=True,
            )
            found = _verify(work, recipe, shlex.join(["narrowgauge", *words]))
            if found is None:
                return 130
            checked = difference(found.results, options.verify_steps, recipe)
            print(checked)
            write_bill(
                recipe, options.out / BILL, checked=checked, checked_page=f"{CHECK}/{REPORT}", commands=commands
            )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        complain(f"--batch {options.batch}: out of memory, takes a smaller one, or a larger --accumulate")
        return 2
    print("\n".join(["", str(path), str(options.out / BILL), "", "next:", *commands]))
    return 0


def _chosen(work: _Work, display: Display, asked: Sequence[int]) -> FittedRecipe:
    """The recipe that is fitted to the model; a UsageError for what `recipes.fit` refuses."""
    options = work.options

    def progress(text: str, share: float) -> None:
        if asked:
            raise KeyboardInterrupt
        display.stage(text, share)

    try:
        return recipes.fit(
            work.model(options.seed), work.micro_batches, work.task.loss,
            **options.limit, steps=options.steps, schedule=options.schedule, warmup=options.warmup,
            final_lr=options.final_lr, linear=options.linear, batch=options.batch // options.accumulate,
            sequence=work.tokens, accumulate=options.accumulate, seconds=options.seconds, progress=progress,
            **work.hyperparameters, seed=options.seed,
        )  # fmt: skip
    except ValueError as error:
        # The one argument that no option is called after.
        raise UsageError(str(error).replace("bytes_per_parameter ", "--bytes ", 1)) from error


class _Work:
    """Model, batches and loss of the planned training.

    Attributes:
        options: of the command.
        opened: the data.
        task: what is trained on.
        tokens: of a sequence or a caption; None for images alone.
        hyperparameters: of the optimizer, for `recipes.fit` and for `trainers.compare`.
    """

    def __init__(self, options: FitOptions, opened: Opened, device: torch.device) -> None:
        self.options, self.opened, self.task, self._device = options, opened, opened.task, device
        sizes = preset(options.model)
        self.tokens = None if sizes.objective == "classes" else options.sequence
        if isinstance(sizes, ClipSizes):
            self.tokens = min(options.sequence, sizes.context)
        given = {name: value for name, value in options.hyperparameters.items() if name != "seed"}
        self.hyperparameters: dict[str, Any] = {"lr": options.lr, "decay_all": options.decay_all, **given}
        # By seed, the state of the task at its first batch.
        self._begins = {options.seed: self.task.state_dict()}

    def model(self, seed: int) -> nn.Module:
        """A new model, on the device."""
        made: nn.Module = plain_model(
            replace(self.options, seed=seed), self.opened.outputs, self.opened.end
        ).to(self._device)  # fmt: skip
        return made

    def batches(self, seed: int) -> Iterator[Examples]:
        """The batches of a seed, from its first. A new seed begins after the last batch that was drawn."""
        self.task.load_state_dict(self._begins.setdefault(seed, self.task.state_dict()))
        while True:
            yield to_device(self.task.draw(), self._device)

    def micro_batches(self) -> Iterator[Examples]:
        """The micro-batches of the batches, one after the other."""
        for examples in self.batches(self.options.seed):
            yield from divided(examples, self.options.accumulate)

    def loss(self, model: nn.Module, examples: Examples) -> Tensor:
        """The mean over the micro-batches of a batch; only one of them has its activations in memory at a time."""
        parts = divided(examples, max(1, self.options.accumulate * count(examples) // self.options.batch))
        if len(parts) == 1:
            return self.task.loss(model, examples)
        losses = [count(part) * checkpoint(self.task.loss, model, part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / count(examples)

    def validation(self) -> list[Examples]:
        """The held-out examples, in parts that memory has room for."""
        examples, size = self.task.validation(), self.options.batch // self.options.accumulate
        return divided(examples, math.ceil(count(examples) / size))


def _verify(work: _Work, recipe: FittedRecipe, command: str) -> Comparison | None:
    """Train with the choice and with D, from the same weights on the same batches; write the files of `compare`.

    Returns:
        The comparison; None if it was stopped. The files then have the runs that were complete.
    """
    options, out = work.options, work.options.out / CHECK
    folder_to_write("--out", out)
    shown = CompareOptions(
        out=out, recipes=f"{MIXED},{recipe.name}", steps=options.verify_steps, seeds=options.verify_seeds,
        batch=options.batch, sequence=work.task.units_per_example,
    )  # fmt: skip
    record, status = Record(shown, work.task.unit), 0
    try:
        with record.display as display, asked_to_stop(display.say, "stopping after this step") as record.asked:
            display.plan()
            record.found = trainers.compare(
                [MIXED, recipe],
                lambda: work.model(torch.initial_seed()),
                work.loss,
                lambda: work.batches(torch.initial_seed()),
                steps=options.verify_steps,
                seeds=range(options.seed, options.seed + options.verify_seeds),
                warmup=min(options.warmup, options.verify_steps // 4),
                schedule=options.schedule,
                final_lr=options.final_lr,
                validation=work.validation(),
                perplexity=work.task.unit == "tokens",
                progress=record,
                facts={
                    "command": command,
                    "data": {"batch": options.batch, "sequence": work.tokens},
                    "model": {"preset": options.model},
                },
                **work.hyperparameters,
            )
    except KeyboardInterrupt:
        status = 130
    return None if record.close(status) else record.found


def difference(results: dict[str, Any], steps: int, recipe: FittedRecipe) -> str:
    """The result of the check beside the estimate; the estimate has no sign, and is of the planned steps."""
    (row,) = (row for name, row in results["recipes"].items() if name != MIXED)
    between = row["difference"]
    if between is None:
        return f"Checked: within {steps:,} steps the choice or {MIXED} diverged, so there are no losses to compare."
    estimated, planned = recipe.bill().loss, recipe.facts.get("steps", steps)
    most = recipe.facts.get("tolerance", TOLERANCE)
    what = (
        f"Checked: the validation loss of the choice minus that of {MIXED}: estimated {nats(estimated)}, up or "
        f"down, after {planned:,} steps, measured {between['mean']:+.5f}"
    )
    if between["spread"] is None:
        return f"{what} after {steps:,}. With one seed no spread is known."
    text = (
        f"{what} ± {between['spread']:.5f} after {steps:,} over {between['pairs']} seeds: the mean of the "
        "differences of each seed, and their standard deviation."
    )
    apart = abs(between["mean"]) - estimated
    # A shorter run shows an estimate to be too low, and not to be too high; a longer one the other way round.
    shows = steps <= planned if apart > 0 else steps >= planned
    if shows and abs(apart) > max(by_chance(between["spread"], between["pairs"]), most):
        text += (
            f" The estimate is too {'low' if apart > 0 else 'high'} here: they are apart by more than chance "
            f"(95 %) and the tolerance of {most:g}."
        )
    return text


def next_commands(options: FitOptions, words: Sequence[str]) -> list[str]:
    """Command lines that use the recipe: `train` with the flags that were given, `compare` with those it needs."""
    path = str(options.out / RECIPE)
    given: list[str] = []
    taken = False
    for word in words[1:]:
        if word.startswith("--"):
            taken = _name(word) in (*OF_TRAINING, "config")
        given += [word] if taken else []
    commands = [["train", "--recipe", path, *given]]
    # compare takes no prepared tokens
    if options.model in presets() and not (options.data and is_prepared(options.data)):
        planned = replace(options, vocabulary=options.vocabulary or DEFAULT_VOCABULARY)
        commands.append(["compare", "--recipes", f"{MIXED},{path}"])
        for name in OF_COMPARE:
            if (value := getattr(planned, name)) not in (None, getattr(CompareOptions, name)):
                commands[-1] += [f"--{name.replace('_', '-')}", str(value)]
    return [shlex.join(["narrowgauge", *command]) for command in commands]


def _name(flag: str) -> str:
    return flag[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
