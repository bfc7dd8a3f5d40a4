"""`narrowgauge compare`: the same training under each recipe, side by side.

Bad input is refused before anything is trained. Runs go seed by seed, so that an interrupted comparison has whole
pairs; after each run the results so far are on disk. A comparison runs in one process.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from narrowgauge import recipes as recipe_book
from narrowgauge import trainers
from narrowgauge.cli._compare_table import CompareDisplay
from narrowgauge.cli._console import asked_to_stop, complain
from narrowgauge.cli._environment import describe_environment, find_device, out_of_memory
from narrowgauge.cli._errors import UsageError, user_input
from narrowgauge.cli._report._compare_page import write_report
from narrowgauge.cli._results import assemble, set_aside, write_results
from narrowgauge.trainers import Run, Settings, TokenizedCorpus


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


def compare(options: CompareOptions, command: str) -> int:
    """Run the comparison; see the module.

    Args:
        options: what the user asked for.
        command: the command line, for the record.

    Returns:
        The exit status: 0, 130 if it was interrupted, 2 if a model did not fit into memory; in the latter two
        cases what was complete is written all the same.

    Raises:
        UsageError: in one line that names the option.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        world = os.environ["WORLD_SIZE"]
        raise UsageError(f"compare: got WORLD_SIZE={world}, runs in one process; start it without torchrun")
    with user_input():
        device = _check(options)
    record = Record(options, command, device)
    status = 0
    try:
        with record.display as display:
            tokens = _prepare(options, display, record.facts)
            with asked_to_stop(display.say, "stopping after this step, with the runs that are complete") as asked:
                _train_all(options, tokens, device, record, asked)
    except _OutOfMemory as error:
        complain(str(error))
        status = 2
    except KeyboardInterrupt:
        status = 130
    return record.close(status)


class _OutOfMemory(Exception):
    """A model did not fit; the message names the options that decide."""


class Record:
    """The runs that are finished, and their files.

    Attributes:
        facts: what the results say of the whole comparison.
        display: where it is shown.
    """

    def __init__(self, options: CompareOptions, command: str, device: torch.device) -> None:
        """Nothing is written before the first run is in."""
        self.display = CompareDisplay()
        self.facts: dict[str, Any] = {
            "command": command,
            "environment": describe_environment(device),
            "settings": options.as_json(),
            "reference": _reference(options.recipes),
        }
        self._out = options.out
        self._runs: dict[str, list[Run]] = {}

    def keep(self, name: str, run: Run) -> None:
        """Write a run down, at once."""
        if not self._runs:
            set_aside(self._out)
        self._runs.setdefault(name, []).append(run)
        self.display.finish(name, run)
        # Until the last run is in, the file says that it is not complete: a kill leaves it as it stands.
        write_results(assemble(self._runs, self.facts, interrupted=True), self._out)

    def close(self, status: int) -> int:
        """Write the results and the report, and show the table; give the exit status that was handed over."""
        if not self._runs:
            complain("stopped before the first run was complete; nothing was written")
            return status
        results = assemble(self._runs, self.facts, interrupted=status != 0)
        write_results(results, self._out)
        write_report(results, self._out / "report.html")
        self.display.table(results)
        self.display.say(f"{self._out / 'results.json'}\n{self._out / 'report.html'}")
        return status


def _check(options: CompareOptions) -> torch.device:
    """Refuse what cannot work, before minutes are spent on it; give the device."""
    if not options.recipes:
        raise UsageError(f"--recipes: got none, takes one or more of {', '.join(recipe_book.names())}")
    for name in options.recipes:
        recipe_book.get(name)
    canonical = [recipe_book.get(name).name for name in options.recipes]
    for name in canonical:
        if canonical.count(name) > 1:
            raise UsageError(f"--recipes: got {name} twice, takes each recipe once")
    if options.model not in trainers.presets():
        raise UsageError(f"--model: got {options.model!r}, takes one of {', '.join(trainers.presets())}")
    least = {
        "steps": 1, "seeds": 1, "seed": 0, "batch": 1, "sequence": 2, "vocabulary": 256, "validation_windows": 1,
        "warmup": 0, "block_size": 1, "min_quantized_size": 0, "gauge_every": 0,
    }  # fmt: skip
    for name, bound in least.items():
        if getattr(options, name) < bound:
            got = getattr(options, name)
            raise UsageError(f"--{name.replace('_', '-')}: got {got}, takes an integer of at least {bound}")
    most = {"vocabulary": 2**20, "block_size": 2**31 - 1, "min_quantized_size": 2**63 - 1}
    most |= dict.fromkeys(("steps", "seeds", "batch", "sequence", "validation_windows", "warmup"), 2**31 - 1)
    for name, bound in most.items():
        if getattr(options, name) > bound:
            got = getattr(options, name)
            raise UsageError(f"--{name.replace('_', '-')}: got {got}, takes an integer of at most {bound}")
    if options.seed + options.seeds > 2**32:
        raise UsageError(f"--seed: got {options.seed} with --seeds {options.seeds}, takes seeds below 2^32")
    if options.arithmetic not in ("fp32", "strict"):
        raise UsageError(f"--arithmetic: got {options.arithmetic!r}, takes 'fp32' or 'strict'")
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
        raise UsageError(f"--out: cannot make the folder {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise UsageError(f"--out: cannot write into {out}: takes a folder with write permission")


def _reference(names: tuple[str, ...]) -> str:
    """The recipe that differences refer to: fp32 master weights, else fp32, else the first."""
    by_recipe = {recipe_book.get(name).name: name for name in names}
    return by_recipe.get("master") or by_recipe.get("fp32") or names[0]


def _prepare(options: CompareOptions, display: CompareDisplay, facts: dict[str, Any]) -> TokenizedCorpus:
    """Read and tokenize the text; record what it is."""
    with user_input():
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
    options: CompareOptions, tokens: TokenizedCorpus, device: torch.device, record: Record, asked: list[int]
) -> None:
    windows = trainers.validation_windows(tokens.validation, options.sequence, options.validation_windows)
    display = record.display
    seeds = range(options.seed, options.seed + options.seeds)
    display.plan(len(seeds) * len(options.recipes), options.steps, options.batch * options.sequence)

    def on_step(number: int, loss: float) -> None:
        display.step(number, loss)
        if asked:
            raise KeyboardInterrupt

    for seed, name in itertools.product(seeds, options.recipes):
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
            raise _OutOfMemory(f"{sizes}: out of memory, takes smaller ones") from error
        record.keep(name, run)
        if asked:
            raise KeyboardInterrupt
