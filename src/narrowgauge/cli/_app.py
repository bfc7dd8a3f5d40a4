"""The command line: what it takes, and which module does it. The options are in `_options`."""

from __future__ import annotations

import io
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from narrowgauge import __version__
from narrowgauge.cli import _options
from narrowgauge.cli._files import UsageError
from narrowgauge.cli._fit_options import FitOptions, fit_hints, read_run
from narrowgauge.cli._options import command_of
from narrowgauge.cli._train import read_config, tokens, train, train_hints
from narrowgauge.trainers import TrainSettings

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,  # tables of help cut long names off
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train on narrow numbers, and gauge what they cost you.",
)
_bench = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Measure what things cost on this machine.",
    no_args_is_help=True,
)

# The base of typer's own complaints; it is click's or a copy of it inside typer, by version.
_TyperError = cast(
    "type[typer.BadParameter]", next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")
)


def run(arguments: list[str]) -> int:
    """Run a command line.

    Wrong input, and files that cannot be read or written, end in one line and status 2, with `--debug` in a
    traceback. Any other exception is a defect and passes through.
    """
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a dash that a terminal cannot show must not end a run
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]  # anywhere on the line, as people append it
    try:
        status = command.main(words or ["--help"], prog_name="narrowgauge", standalone_mode=False, obj=tuple(words))
    except (_TyperError, UsageError, OSError) as error:
        if debug:
            traceback.print_exc()
        text = error.format_message() if isinstance(error, _TyperError) else str(error)
        print(f"narrowgauge: {_flagged(command, words, ' '.join(text.split()))}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("narrowgauge: interrupted", file=sys.stderr)
        return 130
    return int(status or 0)


def _flagged(command: Any, words: list[str], text: str) -> str:
    """A message whose first word the library calls an argument, and this command line an option."""
    for word in words:
        if word not in getattr(command, "commands", ()):
            break
        command = command.commands[word]
    flags = {flag for option in command.params for flag in option.opts}
    name, must, rest = text.partition(" must ")
    flag = f"--{name.replace('_', '-')}"
    return f"{flag}{must}{rest}" if flag in flags else text


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


Run = Callable[[Any, typer.Context], int]


def _command(options: type, group: typer.Typer = app, **settings: Any) -> Callable[[Run], Run]:
    """Make a command of a function, under the function's name."""

    def decorate(function: Run) -> Run:
        group.command(name=function.__name__.strip("_"), **settings)(command_of(options, function))
        return function

    return decorate


def _line(context: typer.Context) -> str:
    """The command line, for the record."""
    return shlex.join(["narrowgauge", *context.obj])


# What a command alone needs is imported by it: the others answer at once.


@_command(_options.CompareOptions)
def _compare(options: Any, context: typer.Context) -> int:
    """Train the same small GPT once under each precision recipe, on real text, and show what each cost."""
    from narrowgauge.cli._compare import compare

    return compare(options, _line(context))


def _train(settings: TrainSettings, context: typer.Context) -> int:
    return train(settings)


_config = typer.Option(
    "--config", help="A TOML file of these flags; flags win.", callback=read_config, is_eager=True
)
app.command(
    name="train",
    help="Train a language model on text, or CLIP or ViT on images, and leave a folder that transformers loads. "
    "After a kill the same command goes on from the last checkpoint.",
)(command_of(TrainSettings, _train, train_hints(), config=Annotated[Path | None, _config]))


def _fit(options: Any, context: typer.Context) -> int:
    """Measure your model on your data, and choose a format for every tensor: recipe.toml, and a bill of costs."""
    from narrowgauge.cli._fit import fit

    return fit(options, context.obj)


_of_a_run = typer.Option(
    "--config", help="A TOML file of a training's flags; flags win.", callback=read_run, is_eager=True
)
app.command(name="fit")(command_of(FitOptions, _fit, fit_hints(), config=Annotated[Path | None, _of_a_run]))


@_command(_options.TokensOptions)
def _tokens(options: Any, context: typer.Context) -> int:
    """Learn a tokenizer and encode a text, which train --data maps into memory."""
    return tokens(options)


class _OptionalPath(typer.core.TyperCommand):
    """A command whose `--plot` may stand alone: without a path after it, it gets an empty one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            if words and words[-1] == "--plot=" and not word.startswith("-") and ("." in word or "/" in word):
                words[-1] += word
            else:
                words.append("--plot=" if word == "--plot" else word)
        return super().parse_args(ctx, words)


@_command(_options.FormatsOptions, cls=_OptionalPath)
def _formats(options: Any, context: typer.Context) -> int:
    """Show the float formats and codebooks there are, one of them, or what a number becomes in them."""
    from narrowgauge.cli._formats import formats

    return formats(options)


@_command(_options.ReportOptions)
def _report(options: Any, context: typer.Context) -> int:
    """Make one page of what gauges recorded in a run: advice, figures, numbers; or of several runs side by side."""
    from narrowgauge.cli._report._command import report

    return report(options)


@_command(_options.WatchOptions)
def _watch(options: Any, context: typer.Context) -> int:
    """Follow trainings in the terminal: loss, lost updates, RMS_t, alarms, advice. Ctrl-C ends it."""
    from narrowgauge.cli._watch import watch

    return watch(options)


@_command(_options.PlanOptions)
def _plan(options: Any, context: typer.Context) -> int:
    """Will it fit? The memory of a training step on a GPU, by recipe, without a GPU."""
    from narrowgauge.cli._plan import plan

    return plan(options)


app.add_typer(_bench, name="bench")


@_command(_options.BenchOptions, _bench)
def _optimizers(options: Any, context: typer.Context) -> int:
    """Milliseconds of an optimizer's step, beside what the speed of memory allows."""
    from narrowgauge.cli._bench._optimizers import bench_optimizers

    return bench_optimizers(options, _line(context))


@_command(_options.LinearOptions, _bench)
def _linear(options: Any, context: typer.Context) -> int:
    """Forward and backward of a linear layer by each plan, beside nn.Linear."""
    from narrowgauge.cli._bench._linear import bench_linear

    return bench_linear(options, _line(context))
