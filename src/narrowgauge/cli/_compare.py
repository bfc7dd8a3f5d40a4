"""`narrowgauge compare`: the same training under each recipe, side by side.

Bad input is refused before anything is trained. Runs go seed by seed, so that an interrupted comparison has whole
pairs; after each run the results so far are on disk. A comparison runs in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import TaskID
from rich.table import Table
from rich.text import Text

from narrowgauge import recipes as recipe_book
from narrowgauge import trainers
from narrowgauge.cli._console import Display, asked_to_stop, complain
from narrowgauge.cli._environment import describe_environment, find_device, out_of_memory
from narrowgauge.cli._files import UsageError, user_input
from narrowgauge.cli._options import CompareOptions
from narrowgauge.cli._report._compare_page import write_report
from narrowgauge.cli._results import assemble, set_aside, write_results
from narrowgauge.trainers import Run, TokenizedCorpus

_SIZE = 2**31 - 1
# The least and the most of each option.
_BOUNDS = {
    "steps": (1, _SIZE), "seeds": (1, _SIZE), "seed": (0, 2**32), "batch": (1, _SIZE), "sequence": (2, _SIZE),
    "vocabulary": (256, 2**20), "validation_windows": (1, _SIZE), "warmup": (0, _SIZE), "block_size": (1, _SIZE),
    "min_quantized_size": (0, 2**63 - 1), "gauge_every": (0, 2**63 - 1),
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
            "reference": _reference(options.names),
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
    if not options.names:
        raise UsageError(f"--recipes must name one or more of {', '.join(recipe_book.names())}, got none")
    for name in options.names:
        recipe_book.get(name)
    canonical = [recipe_book.get(name).name for name in options.names]
    for name in canonical:
        if canonical.count(name) > 1:
            raise UsageError(f"--recipes must name each recipe once, got {name} twice")
    if options.model not in trainers.presets():
        raise UsageError(f"--model must be one of {', '.join(trainers.presets())}, got {options.model!r}")
    for name, (least, most) in _BOUNDS.items():
        got = getattr(options, name)
        if not least <= got <= most:
            bound = f"least {least}" if got < least else f"most {most}"
            raise UsageError(f"--{name.replace('_', '-')} must be an integer of at {bound}, got {got}")
    if options.seed + options.seeds > 2**32:
        raise UsageError(f"--seed must leave all seeds below 2^32, got {options.seed} with --seeds {options.seeds}")
    if options.arithmetic not in ("fp32", "strict"):
        raise UsageError(f"--arithmetic must be 'fp32' or 'strict', got {options.arithmetic!r}")
    # The optimizer knows what its hyperparameters may be; ask it with the smallest model there is.
    probe = torch.nn.Linear(1, 1)
    for name in options.names:
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
    with user_input():
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
    display.plan(len(seeds) * len(options.names), options.steps, options.batch * options.sequence)

    def on_step(number: int, loss: float) -> None:
        display.step(number, loss)
        if asked:
            raise KeyboardInterrupt

    for seed, name in itertools.product(seeds, options.names):
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


class CompareDisplay(Display):
    """Progress bars on a terminal, one line a run elsewhere; then the table."""

    def __init__(self) -> None:
        """No run has begun."""
        super().__init__()
        self._all: TaskID | None = None
        self._run: TaskID | None = None
        self._steps = self._tokens = self._finished = 0
        self._started = 0.0

    def plan(self, runs: int, steps: int, tokens: int) -> None:
        """Announce how much training lies ahead: runs, steps a run, tokens a step."""
        self.hide_stages()
        self._steps, self._tokens = steps, tokens
        self._all = self.add("all runs", runs * steps)

    def begin(self, name: str, seed: int) -> None:
        """A run starts."""
        if self._run is not None:
            self.bars.update(self._run, visible=False)
        self._run = self.add(f"{name}, seed {seed}", self._steps)
        self._started = self.bars.get_time()

    def step(self, number: int, loss: float) -> None:
        """A step is done."""
        assert self._run is not None
        assert self._all is not None
        seconds = max(1e-9, self.bars.get_time() - self._started)
        note = f"loss {loss:.3f}, {number * self._tokens / seconds:,.0f} tokens/s"
        self.bars.update(self._run, completed=number, note=note)
        self.bars.update(self._all, completed=self._finished * self._steps + number)

    def finish(self, name: str, run: Run) -> None:
        """A run is done; it leaves a line."""
        assert self._all is not None
        self._finished += 1
        self.bars.update(self._all, completed=self._finished * self._steps)
        if run.validation_loss is None:
            outcome = f"diverged at step {len(run.loss)}"
        else:
            outcome = f"validation loss {run.validation_loss:.4f}"
        self.say(f"{name}, seed {run.seed}: {outcome}")

    def table(self, results: dict[str, Any]) -> None:
        """The comparison as a table, with a line that says how to read it."""
        with contextlib.suppress(OSError):
            self.console.print()
            for table in _tables(results, self.console.width):
                self.console.print(table)
                self.console.print()
            self.console.print(Text(_legend(results), style="dim"))


# Above this the table is one; below, numbers would be cut, so costs get a table of their own.
_WIDE = 140


def _tables(results: dict[str, Any], width: int) -> list[Table]:
    """One table, or two on a narrow terminal: what each recipe reached, and what it cost."""
    reference = results["reference"]
    rows = results["recipes"]
    reached = {
        "validation\nloss": lambda row: _loss(row),
        "perplex-\nity": lambda row: _number(row["perplexity"], 2),
        f"minus {reference}" if reference else "difference": lambda row: (
            "(reference)" if reference and row is rows[reference] else _difference(row["difference"])
        ),
        "EDQ\n%": lambda row: _number(row["edq"], 1, 100),
        "lost\n%": lambda row: _number(row["lost_updates"], 1, 100),
    }
    cost = {
        "bytes/param\nplanned": lambda row: _number(row["bytes_per_parameter"], 2),
        "\nmeasured": lambda row: _number((row["bytes"]["measured"] or {}).get("total"), 2),
        "peak\nMiB": lambda row: _number(row["peak_memory_bytes"], 1, 2.0**-20),
        "optimizer\nms": lambda row: _number(row["optimizer_ms"], 1),
        "step\nms": lambda row: _number(row["step_ms"], 1),
    }
    parts = [reached | cost] if width >= _WIDE else [reached, cost]
    return [_table(rows, columns) for columns in parts]


def _table(rows: dict[str, Any], columns: dict[str, Callable[[dict[str, Any]], str]]) -> Table:
    # Rich pads columns by two; one leaves room for every digit at 80 characters.
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("recipe", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(Text(name), *(read(row) for read in columns.values()))
    return table


def _loss(row: dict[str, Any]) -> str:
    return "diverged" if row["diverged"] else _with_spread(row["validation_loss"], row["validation_loss_spread"])


def _number(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"


def _with_spread(value: float | None, spread: float | None) -> str:
    return _number(value, 4) + ("" if spread is None else f" ± {spread:.4f}")


def _difference(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "–"
    text = f"{difference['mean']:+.5f}"
    if difference["spread"] is None:
        return text
    mark = " ~" if difference["within_spread"] else " ≈" if difference["within_reference_spread"] else ""
    return f"{text} ± {difference['spread']:.5f}{mark}"


def _legend(results: dict[str, Any]) -> str:
    lines = [
        "EDQ: how far what is stored moved along the intended update (100%: nothing is missing along it). Lost "
        "updates: intended changes that left what is stored as it was."
    ]
    seeds = max(len(row["seeds"]) for row in results["recipes"].values())
    if seeds > 1:
        lines.append(
            "±: standard deviation over seeds, of the loss and of the paired difference. ~ marks one within "
            f"its own spread, ≈ one within the spread of {results['reference']}'s loss."
        )
    else:
        lines.append("One seed: differences have no spread to be compared with (--seeds 3 gives one).")
    lines += [
        f"{name}: {row['title']}" for name, row in results["recipes"].items() if "computed in" in row["title"]
    ]
    if results["interrupted"]:
        lines.append("Interrupted: runs that were not complete are missing.")
    return "\n".join(lines)
