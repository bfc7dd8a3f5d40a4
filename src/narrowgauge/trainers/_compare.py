"""`narrowgauge.compare`: the same training under each recipe, side by side, of anybody's model.

Runs go seed by seed, so that an interrupted comparison has whole pairs. For each run torch's generators are seeded,
then `make_model` is called, then `batches`. Batches draw their random numbers from a state of their own: dropout,
which may draw others in bf16 than in fp32, does not change them. The first batch and the weights are compared with
those of the other recipes, because a comparison of different starts says nothing about recipes.

After the last run the recipes' steps are timed in turns: in each round every recipe trains a new model for a few
steps. So all recipes are timed in the same minutes, whatever else the machine does, and one model is in memory at a
time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import recipes as recipe_book
from narrowgauge._arguments import Count, Flag, Size, check, check_choice, check_instance
from narrowgauge._batches import tensors
from narrowgauge._schedule import SCHEDULES
from narrowgauge.recipes import FittedRecipe, Recipe
from narrowgauge.trainers._compare_results import Json, assemble, plain
from narrowgauge.trainers._compare_run import Loss, Run, Settings, Timing, arguments, time_steps, train
from narrowgauge.trainers._compare_table import legend, tables
from narrowgauge.trainers._environment import describe_environment

# Of timed steps; runs of fewer than ten steps a round have fewer rounds.
_ROUNDS, _STEPS_OF_A_ROUND = 3, 10
_SAMPLE = 4096  # elements of a tensor that tell it from another


class Comparison:
    """What a comparison found; prints as a table.

    Attributes:
        results: the content of results.json: settings, environment, and under ``"recipes"`` what each recipe gave
            and cost, per seed and as a mean, with its curves.
    """

    def __init__(self, results: Json) -> None:
        self.results = results

    def __str__(self) -> str:
        return f"{tables(self.results)}\n\n{legend(self.results)}"

    __repr__ = __str__

    def save(self, directory: str | Path) -> Path:
        """Write results.json and report.html, a page with figures, into a folder; earlier ones are renamed.

        Returns:
            The path of the page.

        Raises:
            ModuleNotFoundError: if a package for pages is not installed, with the command that installs it;
                results.json is written.
        """
        from narrowgauge.cli._results import save

        try:
            save(self.results, Path(directory))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("narrowgauge"):
                raise
            hint = f"a page needs {error.name}; install it with: pip install 'narrowgauge[train]'"
            raise ModuleNotFoundError(hint, name=error.name) from None
        return Path(directory) / "report.html"


class CompareProgress:
    """What a comparison calls while it runs. This one prints a line after each run; subclass it for more."""

    def begin(self, name: str, seed: int) -> None:
        """A run begins."""

    def step(self, number: int, loss: float) -> None:
        """A step is done, the first of a run is 1."""

    def finish(self, name: str, run: Run, so_far: Comparison) -> None:
        """A run is done; `so_far` has it and those before."""
        print(f"{name}, seed {run.seed}: {outcome(run)}", flush=True)

    def timed(self, done: int, total: int) -> None:
        """The steps of `done` of `total` rounds of recipes are timed."""


def outcome(run: Run) -> str:
    """How a run ended, in words."""
    if run.diverged:
        return f"diverged at step {len(run.loss)}"
    if run.validation_loss is not None:
        return f"validation loss {run.validation_loss:.4f}"
    return f"training loss {run.training_loss:.4f}"


def compare(
    recipes: Sequence[str | Recipe],
    make_model: Callable[[], nn.Module],
    loss: Loss,
    batches: Callable[[], Iterable[Any]],
    *,
    steps: int,
    lr: float | None = None,
    seeds: int | Sequence[int] = 1,
    warmup: int = 10,
    schedule: str = "constant",
    final_lr: float = 0.1,
    validation: Iterable[Any] | None = None,
    perplexity: bool = False,
    arithmetic: str = "fp32",
    decay_all: bool = False,
    gauge_every: int = 5,
    progress: CompareProgress | None = None,
    facts: Mapping[str, Any] | None = None,
    **optimizer_arguments: Any,
) -> Comparison:
    """Train a model under each recipe with the same weights and batches; measure loss, memory, time and updates.

    Args:
        recipes: names, with settings of their own after an ``@`` (``"lion8bit@lr=3e-5"``), or recipes.
        make_model: makes the model, on the device for its training. Torch's generators are seeded before
            each call. Its weights are rounded to bf16 numbers, so that no recipe begins by rounding them.
        loss: ``loss(model, batch)`` gives a tensor of one element. The model has the dtype of the recipe, and float
            inputs must be cast to it.
        batches: ``batches()`` gives the batches of an epoch, in any form that `loss` takes. It is called again when
            they end. Its random state depends only on the seed and the epoch. Tensors, also in lists, tuples and
            dictionaries, are moved to the device of the model.
        steps: optimizer steps of each run.
        lr: learning rate of every recipe that does not set its own; None for the default of each optimizer.
        seeds: how many runs each recipe has, with the seeds 0, 1, ...; or the seeds.
        warmup: steps over which learning rates rise.
        schedule, final_lr: what rates do then: ``"constant"``, ``"linear"`` or ``"cosine"``; the last two end at
            this share of the rate.
        validation: batches to evaluate on after each run, which can be read more than once: a list, or a
            ``DataLoader``. Without them recipes are compared by their mean training loss of the last tenth.
        perplexity: whether the table shows e to the power of the loss; for losses in nats a token.
        arithmetic: ``"fp32"`` or ``"strict"``; recipes without strict arithmetic keep fp32.
        decay_all: whether norms and biases have weight decay too; see `Recipe.apply`.
        gauge_every: steps between measurements of the update; 0 for none.
        progress: an object whose methods are called while the comparison runs; None prints a line after each run.
        facts: more entries for results.json and the page, such as ``{"data": {"source": "..."}}``.
        **optimizer_arguments: for each optimizer that has them: ``betas``, ``eps``, ``weight_decay``,
            ``block_size``, ... ``betas`` are for rules with the same number of betas.

    Returns:
        The results. They print as a table, and ``save(directory)`` writes results.json and a page.

    Raises:
        ValueError: for unknown or equal recipes, for arguments that no optimizer has or that one refuses, and if
            `make_model` or `batches` give different weights or batches for the same seed.
    """
    chosen = named_recipes(recipes)
    check_choice("schedule", schedule, SCHEDULES)
    settings = Settings(
        steps=check("steps", steps, Size),
        lr=lr,
        warmup=check("warmup", warmup, Count),
        schedule=schedule,
        final_lr=final_lr,
        arithmetic=arithmetic,
        decay_all=check("decay_all", decay_all, Flag),
        gauge_every=check("gauge_every", gauge_every, Count),
        options=optimizer_arguments,
    )
    check_settings(chosen, settings)
    if validation is not None and iter(validation) is validation:
        raise ValueError("validation must be batches that can be read more than once, a list say, got an iterator")
    if isinstance(seeds, int):
        seeds = range(check("seeds", seeds, Size))
    if not seeds:
        raise ValueError("seeds must be one or more, got none")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be each once, got {list(seeds)}")
    work = _Work(chosen, make_model, loss, batches, settings, list(seeds))
    work.facts = {
        "command": None,
        "settings": {
            "recipes": list(chosen), "steps": steps, "seeds": len(seeds), "lr": lr, "warmup": warmup,
            "schedule": schedule, **({} if schedule == "constant" else {"final_lr": final_lr}),
            "arithmetic": arithmetic, "decay_all": decay_all, "gauge_every": gauge_every,
            **{name: plain(value) for name, value in optimizer_arguments.items()},
        },
        "data": {},
        "model": {},
        "measure": "training_loss" if validation is None else "validation_loss",
        "perplexity": check("perplexity", perplexity, Flag),
        "reference": reference(chosen),
        **(facts or {}),
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        return work.run(validation, progress or CompareProgress())


def named_recipes(recipes: Iterable[str | Recipe]) -> dict[str, Recipe]:
    """Recipes by what a table calls them: a name as it was given, a file's name, or a recipe's own.

    Files of the same name have as many of their folders before it as tell them apart.

    Raises:
        ValueError: for an unknown name, none at all, or one twice.
    """
    if isinstance(recipes, str):
        raise ValueError(f"recipes must be a list of names and recipes, got {recipes!r}")
    found: dict[str, Recipe] = {}
    recipes = list(recipes)
    texts = [each for each in recipes if isinstance(each, str)]
    for each in recipes:
        if not isinstance(each, str):
            check_instance("recipes", each, Recipe, "narrowgauge.recipes.get('D')")
        recipe = recipe_book.parse(each) if isinstance(each, str) else each
        name = each if isinstance(each, str) else each.label
        if isinstance(each, str) and isinstance(recipe, FittedRecipe):
            name = end_of_path(each, texts)
        if same := [other for other, known in found.items() if other == name or known == recipe]:
            got = f"{name} twice" if same[0] == name else f"{same[0]} and {name}, which are the same"
            raise ValueError(f"recipes must name each recipe once, got {got}")
        found[name] = recipe
    if not found:
        raise ValueError(f"recipes must name one or more of {', '.join(recipe_book.names())}, got none")
    return found


def end_of_path(text: str, texts: Sequence[str]) -> str:
    """The shortest end of a recipe's path that none of the others has, with the settings behind it."""
    path, file, settings = text.rpartition(".toml")
    others = {other for one in texts if (other := one.rpartition(".toml")[0]) != path}
    parts = path.split("/")
    ends = ("/".join(parts[-count:]) for count in range(1, len(parts)))
    end = next((end for end in ends if not any(f"/{other}".endswith(f"/{end}") for other in others)), path)
    return end + file + settings


def check_settings(recipes: Mapping[str, Recipe], settings: Settings) -> None:
    """Refuse what an optimizer would refuse, before anything is trained.

    Raises:
        ValueError: for an argument that no optimizer has, or a value that one refuses.
    """
    check_choice("arithmetic", settings.arithmetic, ("fp32", "strict"))
    for name in settings.options:
        if name == "seed":
            raise ValueError("seed must be left out: it is one of seeds")
        if not any(recipe.takes(name) for recipe in recipes.values()):
            kinds = sorted({recipe.optimizer.__name__ for recipe in recipes.values()})
            raise ValueError(f"{name} must be an argument of compare or of {' or '.join(kinds)}, and is of none")
    for name, recipe in recipes.items():
        try:
            recipe.check_arguments(**arguments(recipe, settings, 0))
        except ValueError as error:
            raise ValueError(f"{error} (recipe {name})") from None


def reference(recipes: Mapping[str, Recipe]) -> str:
    """The recipe that differences refer to: fp32 master weights, else fp32, else the first."""
    by_recipe = {recipe.name: name for name, recipe in reversed(list(recipes.items()))}
    return by_recipe.get("master") or by_recipe.get("fp32") or next(iter(recipes))


class _Work:
    """A comparison while it runs."""

    def __init__(
        self,
        recipes: dict[str, Recipe],
        make_model: Callable[[], nn.Module],
        loss: Loss,
        batches: Callable[[], Iterable[Any]],
        settings: Settings,
        seeds: list[int],
    ) -> None:
        self.facts: Json = {}
        self._recipes, self._settings, self._seeds = recipes, settings, seeds
        self._make_model, self._loss, self._batches = make_model, loss, batches
        self._runs: dict[str, list[Run]] = {}
        self._timings: dict[str, Timing] = {}
        self._seen: dict[tuple[str, int], int] = {}

    def run(self, validation: Iterable[Any] | None, progress: CompareProgress) -> Comparison:
        """Train all, then time all."""
        for seed in self._seeds:
            for name, recipe in self._recipes.items():
                progress.begin(name, seed)
                model = self._start(seed)
                stream = self._stream(seed)
                run = train(
                    recipe, model, self._loss, stream, self._settings,
                    seed=seed, validation=validation, on_step=progress.step,
                )  # fmt: skip
                del model
                self._runs.setdefault(name, []).append(run)
                progress.finish(name, run, self._found(interrupted=True))
        rounds = min(_ROUNDS, self._settings.steps // _STEPS_OF_A_ROUND)
        for number in range(rounds):
            for at, (name, recipe) in enumerate(self._recipes.items()):
                timing = self._timings.setdefault(name, Timing())
                model, stream = self._start(self._seeds[0]), self._stream(self._seeds[0])
                time_steps(recipe, model, self._loss, stream, self._settings, timing)
                del model  # one at a time
                progress.timed(number * len(self._recipes) + at + 1, rounds * len(self._recipes))
        return self._found(interrupted=False)

    def _found(self, interrupted: bool) -> Comparison:
        return Comparison(
            assemble(self._recipes, self._runs, self._timings, self._settings, self.facts, interrupted=interrupted)
        )

    def _start(self, seed: int) -> nn.Module:
        """The model that every recipe starts from: its weights are bf16 numbers, so that no recipe rounds them."""
        torch.manual_seed(seed)
        model = self._make_model()
        check_instance("make_model()", model, nn.Module)
        for dtype in (torch.bfloat16, torch.float32):
            recipe_book.cast(model, dtype)
        parameters = list(model.parameters())
        if not parameters:
            raise ValueError("make_model() must give a model with parameters, got one without")
        if "environment" not in self.facts:
            device = parameters[0].device
            threads = {"threads": str(torch.get_num_threads())}
            self.facts["environment"] = describe_environment(device) | threads
            count = sum(parameter.numel() for parameter in parameters)
            self.facts["model"] = {**self.facts["model"], "parameters": count}
        self._check_same("make_model()", "weights", seed, parameters)
        return model

    def _stream(self, seed: int) -> Iterator[Any]:
        stream = _Stream(self._batches, seed)
        self._check_same("batches()", "batches", seed, tensors(stream.first))
        return stream

    def _check_same(self, of: str, what: str, seed: int, found: Iterable[Tensor]) -> None:
        """Compare a part of each tensor with what another recipe got."""
        total = 0
        for tensor in found:
            part = tensor.detach().reshape(-1)[:_SAMPLE].cpu().contiguous()
            total = zlib.crc32(part.view(torch.uint8).numpy().tobytes(), total)
        if self._seen.setdefault((of, seed), total) != total:
            raise ValueError(
                f"{of} must give the same {what} each time it is called after torch.manual_seed({seed}), got "
                f"others: it must make them anew, with torch's random numbers"
            )


class _Stream:
    """The batches of a run, epoch after epoch, with random numbers of their own.

    Attributes:
        first: the first batch, which is drawn at once.
    """

    def __init__(self, batches: Callable[[], Iterable[Any]], seed: int) -> None:
        self._batches, self._seed, self._epoch = batches, seed, -1
        self._state = torch.get_rng_state()
        self._iterator: Iterator[Any] = iter(())
        self.first = self._next()
        self._pending = [self.first]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._pending.pop() if self._pending else self._next()

    def _next(self) -> Any:
        others = torch.get_rng_state()
        torch.set_rng_state(self._state)
        try:
            for batch in self._iterator:
                return batch
            self._epoch += 1
            torch.default_generator.manual_seed(self._seed + self._epoch)
            self._iterator = iter(self._batches())
            for batch in self._iterator:
                return batch
            raise ValueError("batches() must give one batch at least, got none")
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(others)
