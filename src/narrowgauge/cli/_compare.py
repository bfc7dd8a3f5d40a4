"""`narrowgauge compare`: the same training under each recipe, side by side.

All that can be refused is refused before anything is trained. Runs go seed by seed, so that an interrupted
comparison has whole pairs; after each run the results so far are on disk. Under `torchrun` processes share the
runs, and the first writes (`_crew`).
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge import recipes as recipe_book
from narrowgauge import trainers
from narrowgauge.cli._crew import Crew
from narrowgauge.cli._display import Display, asked_to_stop, complain
from narrowgauge.cli._environment import describe_environment, find_device, out_of_memory
from narrowgauge.cli._report import write_report
from narrowgauge.cli._results import assemble, set_aside, write_results
from narrowgauge.trainers import Run, Settings, TokenizedCorpus
from narrowgauge.trainers._parallel import own_device


@dataclass(frozen=True)
class CompareOptions:
    """The command's options under their names on the command line."""

    out: Path
    data: Path | None
    recipes: tuple[str, ...]
    model: str
    steps: int
    seeds: int
    seed: int
    batch: int
    sequence: int
    vocabulary: int
    validation_windows: int
    lr: float
    warmup: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    arithmetic: str
    block_size: int
    min_quantized_size: int
    gauge_every: int
    device: str

    def settings(self) -> Settings:
        """The part that the training loop needs."""
        return Settings(**{name: getattr(self, name) for name in Settings.__dataclass_fields__})

    def as_json(self) -> dict[str, Any]:
        """All options as JSON values."""
        values = asdict(self) | {"out": str(self.out), "data": None if self.data is None else str(self.data)}
        return values | {"recipes": list(self.recipes)}


# What may differ from one process to another: where things are, on the machine that it runs on.
_OWN = ("out", "data", "device")


def compare(options: CompareOptions, command: str) -> int:
    """Run the comparison; see the module.

    Args:
        options: what the user asked for.
        command: the command line, for the record.

    Returns:
        The exit status: 0, 130 if it was interrupted, 2 if a model did not fit into memory; in the latter two
        cases what was complete is written all the same.

    Raises:
        ValueError: for input that cannot work, in one line that names the option.
    """
    device = own_device(_check(options))
    crew = Crew.find()
    crew.agree({name: value for name, value in options.as_json().items() if name not in _OWN})
    display = Display(quiet=not crew.first)
    facts: dict[str, Any] = {
        "command": command,
        "environment": describe_environment(device),
        "settings": options.as_json(),
        "reference": _reference(options.recipes),
    }
    if crew.world > 1:
        facts["environment"]["processes"] = f"{crew.world}, each with runs of its own"
    record = Record(options, display, facts)
    status = 0
    try:
        with display:
            tokens = _prepare(options, display, facts)
            with asked_to_stop(display.say, "stopping after this step, with the runs that are complete") as asked:
                _train_all(options, tokens, device, crew, record, asked)
    except KeyboardInterrupt:
        status = 130
    if not crew.first:
        return status
    record.keep(crew.handed_in(len(record.tasks)))  # what others finished before an interruption
    if crew.failure:
        complain(crew.failure)
        status = 2
    return record.close(status)


class Record:
    """The runs that are finished, and their files.

    Attributes:
        tasks: recipe and seed of each run that was asked for, in the order in which they are made.
    """

    def __init__(self, options: CompareOptions, display: Display, facts: dict[str, Any]) -> None:
        """Nothing is written before the first run is in."""
        seeds = range(options.seed, options.seed + options.seeds)
        self.tasks = [(name, seed) for seed in seeds for name in options.recipes]
        self.display = display
        self._out, self._facts = options.out, facts
        self._runs: dict[int, Run] = {}

    def keep(self, runs: dict[int, Run]) -> None:
        """Write down runs by the numbers of their tasks, at once."""
        if not runs:
            return
        if not self._runs:
            set_aside(self._out)
        for number, run in sorted(runs.items()):
            self.display.finish(self.tasks[number][0], run)
        self._runs |= runs
        # Until the last run is in, the file says that it is not complete: a kill leaves it as it stands.
        write_results(self._results(interrupted=True), self._out)

    def close(self, status: int) -> int:
        """Write the results and the report, and show the table; give the exit status that was handed over."""
        if not self._runs:
            complain("stopped before the first run was complete; nothing was written")
            return status
        results = self._results(interrupted=status != 0)
        write_results(results, self._out)
        write_report(results, self._out / "report.html")
        self.display.table(results)
        self.display.say(f"{self._out / 'results.json'}\n{self._out / 'report.html'}")
        return status

    def _results(self, interrupted: bool) -> dict[str, Any]:
        by_recipe: dict[str, list[Run]] = {}
        for number, run in sorted(self._runs.items()):
            by_recipe.setdefault(self.tasks[number][0], []).append(run)
        return assemble(by_recipe, self._facts, interrupted=interrupted)


def _check(options: CompareOptions) -> torch.device:
    """Refuse what cannot work, before minutes are spent on it; give the device."""
    if not options.recipes:
        raise ValueError(f"--recipes: got none, takes one or more of {', '.join(recipe_book.names())}")
    for name in options.recipes:
        recipe_book.get(name)
    canonical = [recipe_book.get(name).name for name in options.recipes]
    for name in canonical:
        if canonical.count(name) > 1:
            raise ValueError(f"--recipes: got {name} twice, takes each recipe once")
    if options.model not in trainers.presets():
        raise ValueError(f"--model: got {options.model!r}, takes one of {', '.join(trainers.presets())}")
    least = {
        "steps": 1, "seeds": 1, "seed": 0, "batch": 1, "sequence": 2, "vocabulary": 256, "validation_windows": 1,
        "warmup": 0, "block_size": 1, "min_quantized_size": 0, "gauge_every": 0,
    }  # fmt: skip
    for name, bound in least.items():
        if getattr(options, name) < bound:
            got = getattr(options, name)
            raise ValueError(f"--{name.replace('_', '-')}: got {got}, takes an integer of at least {bound}")
    most = {"vocabulary": 2**20, "block_size": 2**31 - 1, "min_quantized_size": 2**63 - 1}
    most |= dict.fromkeys(("steps", "seeds", "batch", "sequence", "validation_windows", "warmup"), 2**31 - 1)
    for name, bound in most.items():
        if getattr(options, name) > bound:
            got = getattr(options, name)
            raise ValueError(f"--{name.replace('_', '-')}: got {got}, takes an integer of at most {bound}")
    if options.seed + options.seeds > 2**32:
        raise ValueError(f"--seed: got {options.seed} with --seeds {options.seeds}, takes seeds below 2^32")
    if options.arithmetic not in ("fp32", "strict"):
        raise ValueError(f"--arithmetic: got {options.arithmetic!r}, takes 'fp32' or 'strict'")
    # The optimizer knows what its hyperparameters may be; ask it with the smallest model there is.
    probe = torch.nn.Linear(1, 1)
    for name in options.recipes:
        trainers.make_optimizer(recipe_book.get(name), probe, options.settings(), options.seed)
        probe.to(torch.float32)
    _check_out(options.out)
    return find_device(options.device)


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: cannot make the folder {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise ValueError(f"--out: cannot write into {out}: takes a folder with write permission")


def _reference(names: tuple[str, ...]) -> str:
    """The recipe that differences refer to: fp32 master weights, else fp32, else the first."""
    by_recipe = {recipe_book.get(name).name: name for name in names}
    return by_recipe.get("master") or by_recipe.get("fp32") or names[0]


def _prepare(options: CompareOptions, display: Display, facts: dict[str, Any]) -> TokenizedCorpus:
    """Read and tokenize the text; record what it is."""
    corpus = trainers.load_corpus(options.data)
    tokens = trainers.tokenize(corpus, options.vocabulary, on_progress=display.stage)
    # Made here, before any training, so that text too short for the sizes asked for is refused at once.
    trainers.Batches(tokens.train, options.batch, options.sequence, options.seed)
    windows = trainers.validation_windows(tokens.validation, options.sequence, options.validation_windows)
    model = _model(options, tokens, options.seed)
    facts["data"] = {
        "source": corpus.source,
        "bytes": corpus.total_bytes,
        "documents": len(corpus.train) + len(corpus.validation),
        "vocabulary": options.vocabulary,
        "train_tokens": len(tokens.train),
        "validation_tokens": len(tokens.validation),
        "validation_windows": len(windows),
        "bytes_per_token": tokens.bytes_per_token,
    }
    facts["model"] = {"preset": options.model, "parameters": trainers.parameter_count(model)}
    return tokens


def _model(options: CompareOptions, tokens: TokenizedCorpus, seed: int) -> torch.nn.Module:
    """The model every recipe starts from: its weights are bf16 numbers, so that no recipe has to round them."""
    model: torch.nn.Module = trainers.build_model(
        options.model, vocabulary=tokens.vocabulary, sequence=options.sequence, seed=seed
    )
    for dtype in (torch.bfloat16, torch.float32):
        recipe_book.cast(model, dtype)
    return model


def _train_all(
    options: CompareOptions,
    tokens: TokenizedCorpus,
    device: torch.device,
    crew: Crew,
    record: Record,
    asked: list[int],
) -> None:
    windows = trainers.validation_windows(tokens.validation, options.sequence, options.validation_windows)
    display, count = record.display, len(record.tasks)
    display.plan(count, options.steps, options.batch * options.sequence)

    def stop_if_asked() -> None:
        if asked:
            raise KeyboardInterrupt

    def on_step(number: int, loss: float) -> None:
        display.step(number, loss)
        crew.beat()
        stop_if_asked()

    for number in crew.numbers(count):
        name, seed = record.tasks[number]
        display.begin(name, seed)
        try:
            run = trainers.train(
                recipe_book.get(name),
                _model(options, tokens, seed).to(device),
                iter(trainers.Batches(tokens.train, options.batch, options.sequence, seed)),
                windows,
                options.settings(),
                seed=seed,
                on_step=on_step,
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            sizes = f"--batch {options.batch}, --sequence {options.sequence}"
            crew.fail(number, f"{sizes}: out of memory, takes smaller ones")
            break
        crew.hand_in(number, run)
        if crew.first:
            record.keep(crew.handed_in(count))
    if crew.first:
        for runs in crew.rest(count):
            record.keep(runs)
            stop_if_asked()
