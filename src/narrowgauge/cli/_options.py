"""The options of the commands: a class a command, a field an option under its name on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from narrowgauge import recipes
from narrowgauge.cli._files import UsageError, expanded, user_input
from narrowgauge.linear import LinearPlan, named_plan
from narrowgauge.trainers import DEFAULT_VOCABULARY, Settings, presets
from narrowgauge.trainers._extras import Extras

# Ordered as a story: the reference, what fails, what repairs it, what costs least.
DEFAULT_RECIPES = ("D", "A", "B", "C", "adamw8bit-split8")


def option(help: str, *names: str, **settings: Any) -> Any:
    """An option with its help; with names other than the field's, or as a switch, those."""
    return typer.Option(*names, help=help, **settings)


_DEVICE = option("'cpu', 'cuda', 'cuda:1', or 'auto': a GPU if there is one.")
_TEXT = option("A text file or a folder of them.", show_default="Python's standard library")
_TOKENS = option("Tokens of the byte-level BPE; 256 means bytes.")
_JSON = option("Results file.")


@dataclass(frozen=True)
class CompareOptions:
    out: Annotated[Path, option("Folder for results.json and report.html.")] = Path("runs/compare")
    data: Annotated[Path | None, _TEXT] = None
    recipes: Annotated[
        str,
        option(
            f"Comma-separated: {', '.join(recipes.names())}; or A, B, C, D, D-MW; or the file of a fitted one. "
            "With settings: lion8bit@lr=3e-5.",
            "--recipes",
        ),
    ] = ",".join(DEFAULT_RECIPES)
    model: Annotated[str, option("Model preset: " + ", ".join(presets()) + ".")] = "micro"
    steps: Annotated[int, option("Optimizer steps a run.")] = 300
    seeds: Annotated[int, option("Runs a recipe, each with another seed.")] = 1
    seed: Annotated[int, option("The first seed.")] = 0
    batch: Annotated[int, option("Windows a step.")] = 16
    sequence: Annotated[int, option("Tokens a window.")] = 128
    vocabulary: Annotated[int, _TOKENS] = 1024
    validation_windows: Annotated[int, option("Windows of held-out text to evaluate on.")] = 128
    lr: Annotated[float, option("Learning rate, after the warm-up.")] = 1e-4
    warmup: Annotated[int, option("Steps over which the learning rate rises.")] = 10
    beta1: Annotated[float, option("Decay rate of the first moment.")] = 0.9
    beta2: Annotated[float, option("Decay rate of the second moment.")] = 0.999
    eps: Annotated[float, option("Added to the root of the second moment.")] = 1e-8
    weight_decay: Annotated[float, option("Decoupled weight decay.")] = 0.1
    arithmetic: Annotated[
        str, option("'fp32', or 'strict': round every operation of float storages as the papers do.")
    ] = "fp32"
    block_size: Annotated[int, option("Elements that share a scale in 8-bit states.")] = 256
    min_quantized_size: Annotated[int, option("Smaller parameters keep fp32 states, not 8-bit ones.")] = 4096
    gauge_every: Annotated[int, option("Steps between measurements of the update; 0 for none.")] = 5
    device: Annotated[str, _DEVICE] = "auto"
    threads: Annotated[int | None, option("Threads of the CPU.", show_default="torch's choice")] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The recipes with their settings, as the user typed them."""
        found: list[str] = []
        for part in parts(self.recipes):
            # A comma also stands between the settings of a recipe: adamw8bit@lr=1e-4,weight_decay=0.
            if found and "@" in found[-1] and "=" in part and "@" not in part:
                found[-1] += f",{part}"
            else:
                found.append(part)
        return tuple(found)

    def settings(self) -> Settings:
        """The part that the training loop needs."""
        return Settings(
            self.steps, self.lr, self.warmup, arithmetic=self.arithmetic, decay_all=True,
            gauge_every=self.gauge_every,
            options={
                "betas": (self.beta1, self.beta2), "eps": self.eps, "weight_decay": self.weight_decay,
                "block_size": self.block_size, "min_quantized_size": self.min_quantized_size,
            },
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """All options as JSON values."""
        values = asdict(self) | {"out": str(self.out), "data": None if self.data is None else str(self.data)}
        return values | {"recipes": list(self.names)}


@dataclass(frozen=True)
class TokensOptions:
    out: Annotated[Path, option("A new folder for the tokens.")]
    data: Annotated[Path | None, _TEXT] = None
    vocabulary: Annotated[int, _TOKENS] = DEFAULT_VOCABULARY
    validation: Annotated[
        Path | None, option("A text to validate on, in place of a part of --data.", show_default=False)
    ] = None
    learn_from: Annotated[
        int | None, option("Megabytes of the text that the tokenizer is learned from.", show_default="all")
    ] = None
    workers: Annotated[int | None, option("Processes that encode.", show_default="one a core")] = None


@dataclass(frozen=True)
class FormatsOptions:
    name: Annotated[
        str | None, typer.Argument(help="A float format (fp16, float8_e4m3fn, e3m4) or a codebook (dynamic).")
    ] = None
    value: Annotated[str | None, option("A number to look at: 0.1, 1e-8, 2^-14, inf.")] = None
    plot: Annotated[  # empty: the default path
        str | None,
        option("Draw instead: the maps, or the spacing of a float format.", metavar="[PATH.svg|.png|.pdf]"),
    ] = None
    all: Annotated[bool, option("Every binade of a float format.", "--all")] = False
    codes: Annotated[bool, option("Every code of a codebook or of a float of up to 8 bits.", "--codes")] = False
    codebook: Annotated[bool, option("The codebook NAME, not the float format.", "--codebook")] = False
    unsigned: Annotated[bool, option("A codebook without negative values.", "--unsigned")] = False
    bits: Annotated[int | None, option("Code width of a codebook.", show_default="its widest")] = None


@dataclass(frozen=True)
class ReportOptions:
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A file that gauges were recorded to, or its folder; a folder of compare. Several make one page.",
        ),
    ]
    out: Annotated[
        Path | None,
        option(
            "The page, or a folder for it.",
            show_default="gauges.html beside the records; runs.html here for several",
        ),
    ] = None


@dataclass(frozen=True)
class WatchOptions:
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The file that gauges are recorded to, or its folder; a folder of compare. Several: a line each.",
        ),
    ]
    once: Annotated[bool, option("Print the page once and end, as into a pipe.", "--once")] = False
    interval: Annotated[float, option("Seconds between two looks.")] = 2.0


@dataclass(frozen=True)
class PlanOptions:
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(presets(None))}; timm:NAME; a folder with a config.json; or parameters, such as 7B."
        ),
    ]
    recipe: Annotated[
        str,
        option("Comma-separated, a column each: names, letters, files of fitted ones.", "--recipe", "--recipes"),
    ] = "D,adamw8bit-split8"
    linear: Annotated[
        str | None, option("Plan of the linear layers: SWITCHBACK:int8, SWITCHBACK_M, ...", show_default="none")
    ] = None
    hold_activations: Annotated[
        str | None, option("Held activations' format: e4m3, e5m2 or int8.", show_default="none")
    ] = None
    batch: Annotated[int | None, option("Sequences or images a step on each GPU.", show_default="8")] = None
    sequence: Annotated[
        int | None, option("Tokens a sequence or a caption.", show_default="1024, or the model's positions")
    ] = None
    vocabulary: Annotated[int | None, option("Tokens of a preset.", show_default="its family's")] = None
    classes: Annotated[
        int | None, option("Classes of a preset of ViT or a model of timm.", show_default="1000")
    ] = None
    checkpointing: Annotated[
        bool, option("Blocks keep their inputs only, and run again in the backward pass.", "--checkpointing")
    ] = False
    accumulate: Annotated[
        bool, option("Gradients of several micro-batches are added up; --batch is one of them.", "--accumulate")
    ] = False
    stable_embedding: Annotated[
        bool, option("A layer norm after the token embedding, whose states are fp32.", "--stable-embedding")
    ] = False
    layer_scale: Annotated[
        float | None, option("Learned scales after each branch of a block.", show_default="none")
    ] = None
    kq_norm: Annotated[bool, option("Layer norms on queries and keys, head by head.", "--kq-norm")] = False
    patch_norm: Annotated[str, option("Layer norm on patches: none, before their embedding, or after.")] = "none"
    patch_dropout: Annotated[float, option("Share of the patches of an image that is dropped.")] = 0.0
    offload: Annotated[
        str, option("On the CPU, with the step: none, states (low words too), or gradients as well.")
    ] = "none"
    memory: Annotated[str | None, option("Of each GPU: 80GB, 79GiB. Also says what would fit.")] = None
    gpus: Annotated[int, option("GPUs that share the training.")] = 1
    parallel: Annotated[str, option("How they do: 'ddp' or 'fsdp'.")] = "ddp"
    json: Annotated[Path | None, _JSON] = None
    figure: Annotated[Path | None, option("Picture of the bars: .svg, .png or .pdf.")] = None

    @property
    def additions(self) -> Extras:
        """What is added to the model."""
        return Extras(**{f.name: getattr(self, f.name) for f in fields(Extras)})


@dataclass(frozen=True)
class BenchOptions:
    lists: Annotated[
        str | None,
        option(
            "Comma-separated: big, matrix, many-64, many-768, gpt2, gpt2-medium, vit-huge, or a shape: 4096x4096.",
            show_default="big,gpt2-medium,vit-huge on a GPU, else matrix,many-64,many-768",
        ),
    ] = None
    only: Annotated[str | None, option("Comma-separated parts of names of rows.", show_default="all")] = None
    peers: Annotated[bool, option("Other libraries' optimizers too, where installed.", "--peers")] = False
    device: Annotated[str, _DEVICE] = "auto"
    seconds: Annotated[float, option("How long to time each row.")] = 1.0
    json: Annotated[Path | None, _JSON] = None
    figure: Annotated[Path | None, option("Picture of the times: .svg, .png or .pdf.")] = None


@dataclass(frozen=True)
class LinearOptions:
    shapes: Annotated[
        str | None,
        option(
            "Comma-separated: tokens, input and output features, such as 32768x1280x5120.",
            show_default="six on a GPU, three small ones on a CPU",
        ),
    ] = None
    plans: Annotated[
        str | None,
        option("Comma-separated: SWITCHBACK:int8, TENSORWISE_FP8:e4m3/e5m2, ...", show_default="all there are"),
    ] = None
    dtype: Annotated[str, option("Of the layer: bf16, fp16 or fp32.")] = "bf16"
    peers: Annotated[bool, option("torchao's and bitsandbytes' layers too, at --shapes.", "--peers")] = False
    tune: Annotated[bool, option("Time all ways to multiply first, and keep the fastest.", "--tune")] = False
    device: Annotated[str, _DEVICE] = "auto"
    seconds: Annotated[float, option("How long to time each row.")] = 0.2
    json: Annotated[Path | None, _JSON] = None
    figure: Annotated[Path | None, option("Picture of the times: .svg, .png or .pdf.")] = None


def parts(text: str) -> list[str]:
    """What stands between the commas of an option."""
    return [part.strip() for part in text.split(",") if part.strip()]


def plan_of(option: str, text: str) -> LinearPlan:
    """A plan of linear layers by its name and format: ``SWITCHBACK``, ``TENSORWISE_FP8:e4m3/e5m2``."""
    try:
        return named_plan(text)
    except ValueError as error:
        raise UsageError(f"{option} {str(error).removeprefix('plan ')}") from None


def command_of(
    options: type, run: Callable[[Any, typer.Context], int], hints: Mapping[str, Any] | None = None, **more: Any
) -> Callable[..., int]:
    """A function with the fields of a dataclass as its parameters, as typer makes commands of.

    Args:
        options: the dataclass.
        run: what is called with an instance of it; gives the exit status. Its docstring is the command's help.
        hints: the fields' annotations with typer's options in them; the dataclass' own if None. Fields that are
            not among them are no options, and stay at their defaults.
        more: further parameters with their annotations: options that are no fields, and are read before.
    """
    found = get_type_hints(options, include_extras=True) if hints is None else hints

    def command(context: typer.Context, **values: Any) -> int:
        given = {name: value for name, value in values.items() if name not in more}
        for name, value in given.items():
            if isinstance(value, Path):
                given[name] = expanded(f"--{name.replace('_', '-')}", value)
            elif isinstance(value, list):
                given[name] = [expanded("RUN", each) for each in value]
        with user_input():
            made = options(**given)
        return run(made, context)

    def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        default = inspect.Parameter.empty if default is MISSING else default
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    parameters = [parameter("context", typer.Context, MISSING)]
    defaults = {f.name: f.default for f in fields(options)}
    parameters += [parameter(name, found[name], defaults[name]) for name in found if name in defaults]
    parameters += [parameter(name, annotation, None) for name, annotation in more.items()]
    made: Any = command
    made.__signature__ = inspect.Signature(parameters, return_annotation=int)
    made.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": int}
    made.__doc__ = run.__doc__
    return command
