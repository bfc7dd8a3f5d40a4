"""The commands and their options; what they do is in modules of their own."""

from __future__ import annotations

import io
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from narrowgauge import __version__, recipes
from narrowgauge.cli._errors import UsageError
from narrowgauge.cli._files import expanded
from narrowgauge.cli._train import tokens, train, train_command
from narrowgauge.trainers import DEFAULT_VOCABULARY, presets

# Ordered as a story: the reference, what fails, what repairs it, what costs least.
DEFAULT_RECIPES = ("D", "A", "B", "C", "adamw8bit-split8")

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train on narrow numbers, and gauge what they cost you.",
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
        print(f"narrowgauge: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("narrowgauge: interrupted", file=sys.stderr)
        return 130
    return int(status or 0)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, **settings)


@app.command(name="compare")
def _compare(
    context: typer.Context,
    out: Annotated[Path, _option("Folder for results.json and report.html.")] = Path("runs/compare"),
    data: Annotated[
        Path | None, _option("A text file or a folder of them.", show_default="Python's standard library")
    ] = None,
    recipe: Annotated[
        str, _option(f"Comma-separated: {', '.join(recipes.names())}; or A, B, C, D, D-MW.", "--recipes")
    ] = ",".join(DEFAULT_RECIPES),
    model: Annotated[str, _option("Model preset: " + ", ".join(presets()) + ".")] = "micro",
    steps: Annotated[int, _option("Optimizer steps a run.")] = 300,
    seeds: Annotated[int, _option("Runs a recipe, each with another seed.")] = 1,
    seed: Annotated[int, _option("The first seed.")] = 0,
    batch: Annotated[int, _option("Windows a step.")] = 16,
    sequence: Annotated[int, _option("Tokens a window.")] = 128,
    vocabulary: Annotated[int, _option("Tokens of the byte-level BPE; 256 means bytes.")] = 1024,
    validation_windows: Annotated[int, _option("Windows of held-out text to evaluate on.")] = 128,
    lr: Annotated[float, _option("Learning rate, after the warm-up.")] = 1e-4,
    warmup: Annotated[int, _option("Steps over which the learning rate rises.")] = 10,
    beta1: Annotated[float, _option("Decay rate of the first moment.")] = 0.9,
    beta2: Annotated[float, _option("Decay rate of the second moment.")] = 0.999,
    eps: Annotated[float, _option("Added to the root of the second moment.")] = 1e-8,
    weight_decay: Annotated[float, _option("Decoupled weight decay.")] = 0.1,
    arithmetic: Annotated[
        str, _option("'fp32', or 'strict': round every operation of float storages as the papers do.")
    ] = "fp32",
    block_size: Annotated[int, _option("Elements that share a scale in 8-bit states.")] = 256,
    min_quantized_size: Annotated[int, _option("Smaller parameters keep fp32 states, not 8-bit ones.")] = 4096,
    gauge_every: Annotated[int, _option("Steps between measurements of the update; 0 for none.")] = 5,
    device: Annotated[str, _option("'cpu', 'cuda', 'cuda:1', or 'auto': a GPU if there is one.")] = "auto",
) -> int:
    """Train the same small GPT once under each precision recipe, on real text, and show what each cost."""
    options = {name: value for name, value in locals().items() if name not in ("context", "recipe")}
    names = tuple(name.strip() for name in recipe.split(",") if name.strip())
    options["out"] = expanded("--out", out)
    # What a command alone needs is imported by it: the others answer at once.
    from narrowgauge.cli._compare import CompareOptions, compare

    return compare(CompareOptions(recipes=names, **options), shlex.join(["narrowgauge", *context.obj]))


app.command(name="train")(train_command(train))


@app.command(name="tokens")
def _tokens(
    out: Annotated[Path, _option("A new folder for the tokens.")],
    data: Annotated[
        Path | None, _option("A text file or a folder of them.", show_default="Python's standard library")
    ] = None,
    vocabulary: Annotated[int, _option("Tokens of the byte-level BPE; 256 means bytes.")] = DEFAULT_VOCABULARY,
    workers: Annotated[int | None, _option("Processes that encode.", show_default="one a core")] = None,
) -> int:
    """Learn a tokenizer and encode a text, which train --data maps into memory."""
    return tokens(data, out, vocabulary, workers)


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


@app.command(name="formats", cls=_OptionalPath)
def _formats(
    name: Annotated[
        str | None, typer.Argument(help="A float format (fp16, float8_e4m3fn, e3m4) or a codebook (dynamic).")
    ] = None,
    value: Annotated[str | None, _option("A number to look at: 0.1, 1e-8, 2^-14, inf.")] = None,
    plot: Annotated[
        str | None,
        _option("Draw instead: the maps, or the spacing of a float format.", metavar="[PATH.svg|.png|.pdf]"),
    ] = None,
    all: Annotated[bool, _option("Every binade of a float format.", "--all")] = False,
    codes: Annotated[bool, _option("Every code of a codebook or of a float of up to 8 bits.", "--codes")] = False,
    codebook: Annotated[bool, _option("The codebook NAME, not the float format.", "--codebook")] = False,
    unsigned: Annotated[bool, _option("A codebook without negative values.", "--unsigned")] = False,
    bits: Annotated[int | None, _option("Code width of a codebook.", show_default="its widest")] = None,
) -> int:
    """Show the float formats and codebooks there are, one of them, or what a number becomes in them."""
    options = locals() | {"plot": None if plot is None else Path(plot)}
    from narrowgauge.cli._formats import FormatsOptions, formats

    return formats(FormatsOptions(**options))


@app.command(name="report")
def _report(
    run: Annotated[Path, typer.Argument(help="A file that gauges were recorded to, or the folder it is in.")],
    out: Annotated[
        Path | None, _option("The page, or a folder for it.", show_default="gauges.html beside the records")
    ] = None,
) -> int:
    """Make one page of what the gauges of a training recorded: advice, figures, and their numbers."""
    from narrowgauge.cli._report import ReportOptions, report

    return report(ReportOptions(run, out))


@app.command(name="watch")
def _watch(
    run: Annotated[Path, typer.Argument(help="The file that gauges are recorded to, or the folder it will be in.")],
    once: Annotated[bool, _option("Print the page once and end, as into a pipe.", "--once")] = False,
    interval: Annotated[float, _option("Seconds between two looks.")] = 2.0,
) -> int:
    """Follow a training in the terminal: loss, lost updates, RMS_t, alarms, advice. Ctrl-C ends it."""
    from narrowgauge.cli._watch import WatchOptions, watch

    return watch(WatchOptions(run, once, interval))


@app.command(name="plan")
def _plan(
    model: Annotated[
        str,
        typer.Argument(help=f"{', '.join(presets(None))}; a folder with a config.json; or parameters, such as 7B."),
    ],
    recipe: Annotated[
        str, _option("Comma-separated, a column each: names, or A, B, C, D, D-MW.", "--recipe", "--recipes")
    ] = "D,adamw8bit-split8",
    linear: Annotated[
        str | None, _option("Plan of the linear layers: SWITCHBACK:int8, SWITCHBACK_M, ...", show_default="none")
    ] = None,
    batch: Annotated[int | None, _option("Sequences or images a step on each GPU.", show_default="8")] = None,
    sequence: Annotated[
        int | None, _option("Tokens a sequence or a caption.", show_default="1024, or the model's positions")
    ] = None,
    vocabulary: Annotated[int | None, _option("Tokens of a preset.", show_default="its family's")] = None,
    classes: Annotated[int | None, _option("Classes of a preset of ViT.", show_default="1000")] = None,
    checkpointing: Annotated[
        bool, _option("Blocks keep their inputs only, and run again in the backward pass.", "--checkpointing")
    ] = False,
    accumulate: Annotated[
        bool, _option("Gradients of several micro-batches are added up; --batch is one of them.", "--accumulate")
    ] = False,
    stable_embedding: Annotated[
        bool, _option("A layer norm behind the token embedding, whose states are fp32.", "--stable-embedding")
    ] = False,
    layer_scale: Annotated[
        float | None, _option("Learned scales behind each branch of a block.", show_default="none")
    ] = None,
    kq_norm: Annotated[bool, _option("Layer norms on queries and keys, head by head.", "--kq-norm")] = False,
    patch_norm: Annotated[str, _option("Layer norm on patches: none, before their embedding, or after.")] = "none",
    patch_dropout: Annotated[float, _option("Share of the patches of an image that is dropped.")] = 0.0,
    offload: Annotated[
        str, _option("On the CPU, with the step: none, states (low words too), or gradients as well.")
    ] = "none",
    memory: Annotated[str | None, _option("Of each GPU: 80GB, 79GiB. Also says what would fit.")] = None,
    gpus: Annotated[int, _option("GPUs that share the training.")] = 1,
    parallel: Annotated[str, _option("How they do: 'ddp' or 'fsdp'.")] = "ddp",
    json: Annotated[Path | None, _option("Results file.")] = None,
    figure: Annotated[Path | None, _option("Picture of the bars: .svg, .png or .pdf.")] = None,
) -> int:
    """Will it fit? The memory of a training step on a GPU, by recipe, without a GPU."""
    options = dict(locals())
    from narrowgauge.cli._plan import PlanOptions, plan

    return plan(PlanOptions(**options))


_bench = typer.Typer(add_completion=False, help="Measure what things cost on this machine.", no_args_is_help=True)
app.add_typer(_bench, name="bench")


@_bench.command(name="optimizers")
def _optimizers(
    context: typer.Context,
    lists: Annotated[
        str | None,
        _option(
            "Comma-separated: big, matrix, many-64, many-768, gpt2, gpt2-medium, vit-huge, or a shape: 4096x4096.",
            show_default="big,gpt2-medium,vit-huge on a GPU, else matrix,many-64,many-768",
        ),
    ] = None,
    only: Annotated[str | None, _option("Comma-separated parts of names of rows.", show_default="all")] = None,
    peers: Annotated[bool, _option("Other libraries' optimizers too, where installed.", "--peers")] = False,
    device: Annotated[str, _option("'cpu', 'cuda', 'cuda:1', or 'auto': a GPU if there is one.")] = "auto",
    seconds: Annotated[float, _option("How long to time each row.")] = 1.0,
    json: Annotated[Path | None, _option("Results file.")] = None,
    figure: Annotated[Path | None, _option("Picture of the times: .svg, .png or .pdf.")] = None,
) -> int:
    """Milliseconds of an optimizer's step, beside what the speed of memory allows."""
    options = {name: value for name, value in locals().items() if name != "context"}
    from narrowgauge.cli._bench._optimizers import BenchOptions, bench_optimizers

    return bench_optimizers(BenchOptions(**options), shlex.join(["narrowgauge", *context.obj]))


@_bench.command(name="linear")
def _linear(
    context: typer.Context,
    shapes: Annotated[
        str | None,
        _option(
            "Comma-separated: tokens, input and output features, such as 32768x1280x5120.",
            show_default="six on a GPU, three small ones on a CPU",
        ),
    ] = None,
    plans: Annotated[
        str | None,
        _option("Comma-separated: SWITCHBACK:int8, TENSORWISE_FP8:e4m3/e5m2, ...", show_default="all there are"),
    ] = None,
    dtype: Annotated[str, _option("Of the layer: bf16, fp16 or fp32.")] = "bf16",
    peers: Annotated[bool, _option("torchao's and bitsandbytes' layers too, at --shapes.", "--peers")] = False,
    tune: Annotated[bool, _option("Time all ways to multiply first, and keep the fastest.", "--tune")] = False,
    device: Annotated[str, _option("'cpu', 'cuda', 'cuda:1', or 'auto': a GPU if there is one.")] = "auto",
    seconds: Annotated[float, _option("How long to time each row.")] = 0.2,
    json: Annotated[Path | None, _option("Results file.")] = None,
    figure: Annotated[Path | None, _option("Picture of the times: .svg, .png or .pdf.")] = None,
) -> int:
    """Forward and backward of a linear layer by each plan, beside nn.Linear."""
    options = {name: value for name, value in locals().items() if name != "context"}
    from narrowgauge.cli._bench._linear import LinearOptions, bench_linear

    return bench_linear(LinearOptions(**options), shlex.join(["narrowgauge", *context.obj]))
