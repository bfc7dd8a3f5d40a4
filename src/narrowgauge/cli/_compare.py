"""`narrowgauge compare`: `narrowgauge.compare` of a small GPT on text.

Bad input is refused before anything is trained. After each run the results so far are on disk. A comparison runs in
one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from rich.progress import TaskID
from rich.text import Text

from narrowgauge import trainers
from narrowgauge._files import set_aside
from narrowgauge.cli._console import Display, asked_to_stop, complain
from narrowgauge.cli._environment import find_device, out_of_memory, refuse_processes
from narrowgauge.cli._files import UsageError, folder_to_write, user_input
from narrowgauge.cli._options import CompareOptions
from narrowgauge.cli._report._compare_page import write_report
from narrowgauge.cli._results import REPORT, RESULTS, write_results
from narrowgauge.recipes import FittedRecipe, Recipe
from narrowgauge.trainers import CompareProgress, Comparison, Run, TokenizedCorpus
from narrowgauge.trainers._compare import check_settings, named_recipes, outcome
from narrowgauge.trainers._compare_run import make_optimizer
from narrowgauge.trainers._compare_table import legend, tables
from narrowgauge.trainers._language import few_windows
from narrowgauge.trainers._parallel import ALONE
from narrowgauge.trainers._run_folder import locked
from narrowgauge.trainers._tokens import is_prepared

_SIZE = 2**31 - 1
# The least and the most of each option.
_BOUNDS = {
    "steps": (1, _SIZE), "seeds": (1, _SIZE), "seed": (0, 2**32), "batch": (1, _SIZE), "sequence": (2, _SIZE),
    "vocabulary": (256, 2**20), "validation_windows": (1, _SIZE), "warmup": (0, _SIZE), "block_size": (1, _SIZE),
    "min_quantized_size": (0, 2**63 - 1), "gauge_every": (0, 2**63 - 1), "threads": (1, 1024),
}  # fmt: skip


def compare(options: CompareOptions, command: str) -> int:
    """Run the comparison; see the module.

    Args:
        options: what the user asked for.
        command: the command line, for the record.

    Returns:
        The exit status: 0, 130 if it was interrupted, 2 if a model did not fit into memory; in the latter two
        cases what was complete is written all the same.
    """
    refuse_processes("compare")
    with contextlib.ExitStack() as stack:
        with user_input():
            device = _check(options)
            stack.enter_context(locked(options.out, ALONE))
        return _compared(options, device, command)


def _compared(options: CompareOptions, device: torch.device, command: str) -> int:
    """Train all, in a folder that no other run writes into."""
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads or threads)
    record, status = Record(options), 0
    try:
        with record.display as display:
            tokens = _prepare(options, display)
            with asked_to_stop(display.say, "stopping after this step, with the runs that are complete") as asked:
                record.asked = asked
                record.found = _train_all(options, tokens, device, record, command)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        complain(f"--batch {options.batch}, --sequence {options.sequence}: out of memory, takes smaller ones")
        status = 2
    except KeyboardInterrupt:
        status = 130
    finally:
        torch.set_num_threads(threads)
    return record.close(status)


class Record(CompareProgress):
    """The runs that are finished, their files, and the display.

    Attributes:
        display: where the comparison is shown.
        asked: not empty once Ctrl-C came.
        found: what was found so far.
    """

    def __init__(self, options: CompareOptions, unit: str = "tokens") -> None:
        """Nothing is written before the first run is in."""
        self.display = CompareDisplay(options, unit)
        self.asked: Sequence[int] = ()
        self.found: Comparison | None = None
        self._out = options.out

    def begin(self, name: str, seed: int) -> None:
        self.display.begin(f"{name}, seed {seed}")

    def step(self, number: int, loss: float) -> None:
        self.display.step(number, loss)
        self._stop_if_asked()

    def finish(self, name: str, run: Run, so_far: Comparison) -> None:
        """Write a run down, at once."""
        if self.found is None:
            set_aside(self._out, (RESULTS, REPORT))
        self.found = so_far
        self.display.finish(f"{name}, seed {run.seed}: {outcome(run)}")
        # Until the last run is in, the file says that it is not complete: a kill leaves it as it stands.
        try:
            write_results(so_far.results, self._out)
        except OSError as error:
            self.display.say(f"{error}; training goes on, and the table comes at the end")
        self._stop_if_asked()

    def timed(self, done: int, total: int) -> None:
        self.display.timed(done, total)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def close(self, status: int) -> int:
        """Write the results and the report, and show the table; give the exit status that was handed over."""
        if self.found is None:
            complain("stopped before the first run was complete; nothing was written")
            return status
        if self.found.results["interrupted"]:
            self.found.results["stopped"] = True  # for `watch`: no more runs come
        self.display.show(self.found.results)
        missing = "only the table above is left"
        try:
            self.display.say(str(write_results(self.found.results, self._out)))
            missing = f"once there is space, narrowgauge report {self._out} makes it"
            write_report(self.found.results, self._out / REPORT)
        except OSError as error:
            complain(f"{error}; {missing}")
            return status or 2
        self.display.say(str(self._out / REPORT))
        return status


def _check(options: CompareOptions) -> torch.device:
    """Refuse what cannot work, before minutes are spent on it; give the device."""
    check_settings(_named(options), options.settings())
    if options.model not in trainers.presets():
        raise UsageError(f"--model must be one of {', '.join(trainers.presets())}, got {options.model!r}")
    for name, (least, most) in _BOUNDS.items():
        got = getattr(options, name)
        if got is not None and not least <= got <= most:
            bound = f"least {least}" if got < least else f"most {most}"
            raise UsageError(f"--{name.replace('_', '-')} must be an integer of at {bound}, got {got}")
    if options.seed + options.seeds > 2**32:
        raise UsageError(f"--seed must leave all seeds below 2^32, got {options.seed} with --seeds {options.seeds}")
    folder_to_write("--out", options.out)
    return find_device(options.device)


def _named(options: CompareOptions) -> dict[str, Recipe]:
    try:
        return named_recipes(options.names)
    except ValueError as error:
        words = str(error)
        raise UsageError(f"--{words}" if words.startswith("recipes must") else words) from None


def _prepare(options: CompareOptions, display: CompareDisplay) -> tuple[TokenizedCorpus, dict[str, Any]]:
    """Read and tokenize the text; say what it is."""
    if options.data is not None and is_prepared(options.data):
        raise UsageError(f"--data must be the text itself for compare, got prepared tokens: {options.data}")
    with user_input():
        corpus = trainers.load_corpus(options.data, without="lines")  # as `train` reads it
    tokens = trainers.tokenize(corpus, options.vocabulary, on_progress=display.stage)
    with user_input():
        # Made here, before any training, so that text too short for the sizes asked for is refused at once.
        trainers.Batches(tokens.train, options.batch, options.sequence, options.seed)
        windows = trainers.validation_windows(tokens.validation, options.sequence, options.validation_windows)
    notes = (*corpus.notes, *few_windows(len(windows), options.validation_windows))
    for note in notes if options.data is not None else ():  # nobody can mend Python's own sources
        display.say(note)
    return tokens, {
        "notes": list(notes),
        "source": corpus.source,
        "bytes": corpus.total_bytes,
        "documents": len(corpus.train) + len(corpus.validation),
        "vocabulary": options.vocabulary,
        "train_tokens": len(tokens.train),
        "validation_tokens": len(tokens.validation),
        "validation_windows": len(windows),
        "bytes_per_token": tokens.bytes_per_token,
    }


def _train_all(
    options: CompareOptions,
    text: tuple[TokenizedCorpus, dict[str, Any]],
    device: torch.device,
    record: Record,
    command: str,
) -> Comparison:
    tokens, data = text
    windows = trainers.validation_windows(tokens.validation, options.sequence, options.validation_windows)

    def make_model() -> torch.nn.Module:
        seed = torch.initial_seed()
        model: torch.nn.Module = trainers.build_model(
            options.model, vocabulary=tokens.vocabulary, sequence=options.sequence, seed=seed
        )
        return model.to(device)

    settings = options.settings()
    fitted = [recipe for recipe in _named(options).values() if isinstance(recipe, FittedRecipe)]
    with user_input():  # one that was fitted to another model is refused before any training
        for recipe in fitted:
            make_optimizer(recipe, make_model(), settings, 0)
    record.display.plan()
    facts = {"command": command, "settings": options.as_json(), "data": data, "model": {"preset": options.model}}
    return trainers.compare(
        options.names,
        make_model,
        trainers.next_token_loss,
        lambda: trainers.Batches(tokens.train, options.batch, options.sequence, torch.initial_seed()),
        steps=settings.steps,
        lr=settings.lr,
        seeds=range(options.seed, options.seed + options.seeds),
        warmup=settings.warmup,
        validation=torch.split(windows, options.batch),
        perplexity=True,
        arithmetic=settings.arithmetic,
        decay_all=settings.decay_all,
        gauge_every=settings.gauge_every,
        progress=record,
        facts=facts,
        **settings.options,
    )


class CompareDisplay(Display):
    """Progress bars on a terminal, one line a run elsewhere; then the table."""

    def __init__(self, options: CompareOptions, unit: str) -> None:
        """No run has begun."""
        super().__init__()
        self._unit = unit
        self._all: TaskID | None = None
        self._run: TaskID | None = None
        self._steps, self._runs = options.steps, options.seeds * len(options.names)
        self._tokens, self._finished, self._started = options.batch * options.sequence, 0, 0.0

    def plan(self) -> None:
        """Training begins."""
        self.hide_stages()
        self._all = self.add("all runs", self._runs * self._steps)

    def begin(self, title: str, total: int | None = None) -> None:
        """A run starts, or what has other steps."""
        if self._run is not None:
            self.bars.update(self._run, visible=False)
        self._run = self.add(title, total or self._steps)
        self._started = self.bars.get_time()

    def step(self, number: int, loss: float) -> None:
        """A step is done."""
        assert self._run is not None
        assert self._all is not None
        seconds = max(1e-9, self.bars.get_time() - self._started)
        note = f"loss {loss:.3f}, {number * self._tokens / seconds:,.0f} {self._unit}/s"
        self.bars.update(self._run, completed=number, note=note)
        self.bars.update(self._all, completed=self._finished * self._steps + number)

    def finish(self, line: str) -> None:
        """A run is done; it leaves a line."""
        assert self._all is not None
        self._finished += 1
        self.bars.update(self._all, completed=self._finished * self._steps)
        self.say(line)

    def timed(self, done: int, total: int) -> None:
        """A recipe has had its turn."""
        if done == 1:
            self.begin("timing steps in turns", total)
        assert self._run is not None
        self.bars.update(self._run, completed=done)

    def show(self, results: dict[str, Any]) -> None:
        """The comparison as a table, with lines that say how to read it."""
        with contextlib.suppress(OSError):
            width = self.console.width
            for text, style in ((tables(results, width), ""), (legend(results, width), "dim")):
                self.console.print()
                self.console.print(Text(text, style=style), soft_wrap=True)
