"""What norms, activations and linear layers keep between forward and backward, held as codes in blocks of 128.

Autograd saves inputs: a norm its input, an activation its own, a gated product both factors, a linear layer what it
multiplied. They wait in 16 or 32 bits until the backward pass reads them once. Here they wait as codes of eight
bits, with a scale for each 128 elements of a row, and the backward pass computes with what the codes stand for.
The forward pass does not change.

Two things stay in 16 bits. Attention keeps what it saves: a softmax that is computed again from rounded queries
and keys no longer sums to one. A norm keeps its input, which the gradient of everything before it depends on: with
e4m3 there a small LLaMA learned more slowly, by the square of the noise (docs/decisions/held-activations.md). What
a norm saves in float32 is held in 16 bits.

Eager, `torch.autograd.graph.saved_tensors_hooks` run around a layer's forward pass. Every float tensor that it
saves and that is no weight becomes codes, once: layers that save the same tensor (queries, keys and values their
common input) share its codes; on a CPU only where it requires a gradient. What attention saves as it is, another
layer saves as it is too, not in codes beside it. Where other such hooks are active (activation checkpointing,
offloading to the CPU), they decide.

A compiler does not trace these hooks. For it a layer is computed twice, once as it is, without gradients, and once
from the rounded input, for the gradients alone: the values of the second are not read, so the compiler drops them
and keeps what its backward pass needs. That can be computed from the codes, which are smaller than anything else,
so it saves these, and fuses their making into the kernels around. Of a gated MLP it saves the codes of both
factors, and nothing for the multiply after them.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import textwrap
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.parametrize import is_parametrized

from narrowgauge._arguments import check_choice
from narrowgauge._torch_private import local, packs
from narrowgauge.linear._matmuls import make_schedule
from narrowgauge.linear._module import LowPrecisionConv1D, PlannedModule, planned_class
from narrowgauge.linear._ops import operations
from narrowgauge.linear._quantize import BLOCK, FORMATS, Format
from narrowgauge.linear._swap import KEEP, is_held, matches

_WIDE = (torch.bfloat16, torch.float16, torch.float32)
_LEAST = 32  # elements of a row: below, its scale is more than an eighth of its codes
_TOGETHER = 8  # of the last dimension, at least, where a row has several: an image's width
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin, nn.MultiheadAttention, nn.GLU)
# A number that is rounded across a limit gets another slope. Tanh and Sigmoid save outputs, and the gradient is the
# distance to their limit. RReLU saves its slopes before it draws them. Gradients had 17 to 24 dB; codes have 32.
_TURNS = (
    nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Threshold,
    nn.RReLU,
)  # fmt: skip
_TURNS_BY_NAME = ("ClippedGELUActivation", "LaplaceActivation")
# Small numbers decide these gradients, by their sign or as a divisor.
_OF_SMALL = ("ReLU", "LeakyReLU", "SELU", "Tanhshrink", "SqrtSoftplusActivation")
_CODES = "its plan saves codes"
# down(act(gate(x)) * up(x)), as a forward pass of transformers, torchtitan or LLaMA's own code says it.
_GATED = re.compile(
    r"def forward\(self, (?P<x>\w+)[^)]*\)[^:]*:\s*(?:\w+ = )?(?:return )?self\.(?P<down>\w+)\(\s*"
    r"(?P<act>self\.\w+|F\.silu|torch\.nn\.functional\.silu)\(self\.(?P<gate>\w+)\((?P=x)\)\) \* "
    r"self\.(?P<up>\w+)\((?P=x)\)\s*\)(?:\s*return \w+)?\s*$"
)


@dataclass
class HeldActivations:
    """The result of `hold_activations`.

    Attributes:
        format: of the codes.
        held: the modules whose saved activations are held in codes, and what each is: ``"norm"``,
            ``"activation"``, ``"linear"`` or ``"gated"``, an MLP whose product is held too.
        kept: why each other linear layer, norm and activation was kept, by name.
    """

    format: Format
    held: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Let autograd save as it does.

        Raises:
            RuntimeError: if a module's class has changed since, by a parametrization or `fully_shard`; then nothing
                is undone.
        """
        for module in self._modules:
            if not is_held(module):
                raise RuntimeError(
                    f"{type(module).__qualname__} must be the class that holding gave: remove first what was "
                    "applied after it"
                )
        release(self._modules)
        self._modules.clear()

    def __str__(self) -> str:
        lines = [
            f"held in {self.format}: {len(self.held)}",
            *(f"  {name}  {what}" for name, what in self.held.items()),
        ]
        return "\n".join([*lines, f"kept: {len(self.kept)}", *(f"  {n}  {why}" for n, why in self.kept.items())])


def hold_activations(model: nn.Module, format: Format = "e4m3", *, keep: Iterable[str] = KEEP) -> HeldActivations:
    """Hold what norms, activations, gated MLPs and linear layers save for the backward pass in eight bits.

    That is a byte and a 32nd for each element, in place of two or four; the input of a norm takes two bytes. The
    output of the model does not change, gradients have the noise of the codes. The model is changed in place;
    parameters and their names stay. Call it after layers are swapped, by `swap_linears` or a recipe, and before
    ``fully_shard`` and ``torch.compile``.

    A block that is checkpointed saves its input only, as before; compiled, it would round for nothing: hold
    activations instead of checkpointing, or in the blocks that are not checkpointed.

    Args:
        model: the model, or a part of it, such as its blocks.
        format: of the codes: ``"e4m3"`` or ``"e5m2"``, for values of many scales, or ``"int8"``, which has less
            noise for values of one. Compiled for CUDA, float8 needs compute capability 8.9.
        keep: modules to leave alone: a name, the last part of one, the name of a module around it, or a pattern
            with ``*``.

    Returns:
        What is held, what is not and why; `undo()` restores all.

    Raises:
        ValueError: for another format, a `keep` that is one string, and a model with nothing to hold.

    Example:
        >>> held = hold_activations(model.model.layers)
    """
    check_choice("format", format, tuple(FORMATS))
    if isinstance(keep, str):
        raise ValueError(f"keep must be a list of names such as ('lm_head',), got {keep!r}")
    report = HeldActivations(format)
    became: dict[nn.Module, _How] = {}
    around: list[nn.Module] = []
    inner: set[nn.Module] = set()  # parts of a gated product
    patterns, modules = tuple(keep), dict(model.named_modules())
    for name, module in modules.items():
        role, gated = _kind(module), _gated(module)
        inside = [(f"{name}.{part}".lstrip("."), getattr(module, part, None)) for part in gated or ()]
        if any(_why_not(at, part, format, patterns) not in (None, _CODES) for at, part in inside if part):
            gated = None  # it would hold a part that is left alone
        if role is None and gated is None:
            continue
        if why := _why_not(name, module, format, patterns):
            report.kept[name] = why
            continue
        if gated is not None:
            inner |= {part for part in (getattr(module, name, None) for name in gated[2:]) if part is not None}
        report.held[name] = role or "gated"
        if module not in inner:
            became[module] = gated or ("norm" if role == "norm" else "held")
        parent = modules.get(name.rpartition(".")[0]) if name else None
        if role == "linear" and parent is not None:
            around.append(parent)
    if not became:
        raise ValueError(
            f"model must have norms, activations or linear layers to hold, got a {type(model).__name__} with none"
        )
    for parent in around:
        if "forward" not in vars(parent) and not isinstance(parent, _Holding):
            became.setdefault(parent, "watched")
    for module, how in became.items():
        kind: Any = type(module)
        module.__class__ = _holding_class(kind, format, how)
        report._modules.append(module)
    return report


def release(modules: Iterable[nn.Module]) -> None:
    """Let held modules save as autograd does; others are left alone."""
    for module in modules:
        if is_held(module):
            module.__class__ = vars(type(module))["_was"]


# Which modules


# Of a gated MLP the names of its layers gate and up, of its activation ("F" for silu as a function) and of down.
_Gated = tuple[str, str, str, str]
_How = Literal["held", "norm", "watched"] | _Gated


def _kind(module: nn.Module) -> str | None:
    """What a module is that saves its input; None for any other."""
    kind = type(module)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return "norm"
    if kind.__name__.endswith(("RMSNorm", "LayerNorm")) and not any(True for _ in module.children()):
        return "norm"
    if isinstance(module, nn.Linear | LowPrecisionConv1D) or kind.__name__ in ("Conv1D",):
        return None if kind.__name__ == "NonDynamicallyQuantizableLinear" else "linear"
    if kind.__module__ in _ACTIVATIONS and not isinstance(module, _NOT_ELEMENTWISE):
        plain = not any(True for _ in module.parameters()) and not getattr(module, "inplace", False)
        return "activation" if plain else None
    return None


def _why_not(name: str, module: nn.Module, format: Format, keep: Sequence[str]) -> str | None:
    """Why a module is left alone; None if it is not."""
    if found := next((pattern for pattern in keep if matches(name, pattern)), None):
        return f"fits {found!r} of keep"
    if "forward" in vars(module):
        return "has a forward pass of its own, not of its class"
    if isinstance(module, _Holding):
        return "is held already"
    if isinstance(module, PlannedModule) and _saves_codes(module):
        return _CODES
    if isinstance(module, _TURNS) or type(module).__name__ in _TURNS_BY_NAME:
        return "its gradient jumps or vanishes at a limit: rounding would move numbers across it"
    jumps = isinstance(module, nn.ELU) and module.alpha != 1
    if (type(module).__name__ in _OF_SMALL or jumps) and format == "int8":
        return "its gradient needs small numbers, which int8 rounds to 0: take e4m3"
    return None


def _gated(module: nn.Module) -> _Gated | None:
    """The parts of a module whose forward pass is `down(act(gate(x)) * up(x))`; None for any other."""
    try:
        source = textwrap.dedent(inspect.getsource(type(module).forward))
    except (OSError, TypeError):
        return None
    found = _GATED.match(source)
    if found is None:
        return None
    layers = [getattr(module, found[name], None) for name in ("gate", "up", "down")]
    if any(not isinstance(layer, nn.Module) or _kind(layer) != "linear" for layer in layers):
        return None
    act = found["act"].removeprefix("self.") if found["act"].startswith("self.") else "F"
    return found["gate"], found["up"], act, found["down"]


def _saves_codes(module: PlannedModule) -> bool:
    """Whether a layer's plan saves codes of the input already."""
    return dict(make_schedule(module.plan, (True, True, False)).kept).get("input") is not None


# The forward pass


class _Holding:
    """Base of the classes of held modules, beside the class that a module had.

    Attributes:
        _was: that class.
        _format: of the codes.
        _how: ``"held"``, ``"norm"``, the parts of a gated MLP, or ``"watched"``: saves as it does, around layers
            that are held.
    """

    _was: ClassVar[Any]
    _format: ClassVar[Format]
    _how: ClassVar[_How]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, how = partial(self._was.forward, self), self._how
        if torch.compiler.is_compiling():
            # A norm has nothing in codes that compilers would save.
            if how in ("watched", "norm") or len(args) != 1 or kwargs or not torch.is_grad_enabled():
                return run(*args, **kwargs)
            if how == "held":
                return _by_rounded(run, self._format, args[0])
            return _compiled_gated(self, how, self._format, args[0])
        above = packs()
        if not torch.is_grad_enabled() or not (above is None or isinstance(above, _Watch)):
            return run(*args, **kwargs)
        hook: _Watch = _Watch()
        if how != "watched":
            first = local(args[0]) if how == "norm" and args else None
            normed = first if type(first) is Tensor else None
            made = any(map(is_parametrized, self.modules()))
            hook = _Pack(self._format, list(self.parameters()), made, normed)
        with saved_tensors_hooks(hook, _unpack):
            return run(*args, **kwargs)


@functools.cache
def _holding_class(kind: Any, format: Format, how: _How) -> type[nn.Module]:
    """The class of a held module, of its former class's name; one for each, which compiled code is shared by."""
    namespace = {
        "__module__": kind.__module__, "__doc__": kind.__doc__, "__qualname__": kind.__qualname__,
        "__reduce_ex__": _reduce, "_was": kind, "_format": format, "_how": how,
    }  # fmt: skip
    return type(kind.__name__, (_Holding, kind), namespace)


def _reduce(module: Any, protocol: SupportsIndex) -> Any:
    kind = type(module)
    reduced: Any = super(kind._was, module).__reduce_ex__(protocol)
    if "_was" not in vars(kind):  # derived from this one since, and pickled as it says itself
        return reduced
    planned = vars(kind._was).get("_planned")
    return (_empty, (planned or kind._was, planned is not None, kind._format, kind._how), *reduced[2:])


def _empty(kind: Any, planned: bool, format: Format, how: _How) -> nn.Module:
    made = _holding_class(cast(Any, planned_class(kind) if planned else kind), format, how)
    return made.__new__(made)


# Eager


class _Rows:
    """Rows that are held, in codes with scales, or in a dtype of 16 bits; and the dtype that they had."""

    def __init__(self, rows: Tensor, form: Format | torch.dtype) -> None:
        self.scale, self.dtype = None, rows.dtype
        if isinstance(form, torch.dtype):
            self.codes = rows.to(form)
        else:
            made = operations(rows).quantize_blocks(rows, "row128", "", form, False, rows.dtype)
            self.codes, self.scale = made[0], made[1]

    def values(self) -> Tensor:
        if self.scale is None:
            return self.codes.to(self.dtype)
        return operations(self.codes).dequantize(self.codes, self.scale, self.dtype)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that is held: its rows; the sizes of its dimensions in the order of memory, and that order.

    Of a DTensor that is the part on this rank, and `whole` makes it a DTensor again.
    """

    rows: _Rows
    shape: torch.Size
    order: list[int]
    whole: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that is saved as it is, detached: the graph must not hold itself. And the version it then had."""

    x: Tensor
    version: int


# By storage: codes of the tensors in it, as long as a graph holds them; None if a graph holds the storage itself.
_seen: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Any, _Rows] | None] = weakref.WeakKeyDictionary()


class _Watch:
    """Saves tensors as they are, and remembers their storages."""

    def __call__(self, x: Tensor) -> _Kept | _Held:
        here = local(x)
        if type(here) is Tensor and here.dtype in _WIDE:
            _seen[here.untyped_storage()] = None
        return _kept(x)


class _Pack(_Watch):
    """Saves tensors as codes.

    Args:
        format: of the codes.
        parameters: of the module; neither they nor copies of them in another dtype are activations.
        made: whether weights are made from them, by a parametrization.
        normed: the input of a norm, which is kept in 16 bits, and so is what it saves in float32.
    """

    def __init__(
        self, format: Format, parameters: Sequence[Tensor], made: bool, normed: Tensor | None = None
    ) -> None:
        self.format = format
        # One of another class than torch's keeps its numbers elsewhere. `functional_call` brings plain tensors.
        self.parameters = [p for p in map(local, parameters) if type(p) in (nn.Parameter, Tensor)]
        # Then a parameter that is saved in its own dtype is itself, and not made from another.
        self.plain = len(self.parameters) == len(parameters) and not made
        # Not the input itself, which would live as long as the graph does.
        self.normed = None if normed is None else weakref.ref(normed.untyped_storage())
        self.halves = normed.dtype if normed is not None and normed.element_size() == 2 else torch.bfloat16

    def __call__(self, given: Tensor) -> _Kept | _Held:
        x = local(given)
        if type(x) is not Tensor or x.dtype not in _WIDE or x.dim() < 2:
            return _kept(given)
        storage, form = x.untyped_storage(), self._form(x)
        if any(storage is p.untyped_storage() for p in self.parameters):
            return _kept(given)
        known = _seen.setdefault(storage, weakref.WeakValueDictionary())
        order = _by_memory(x)
        dense = x.detach().permute(order)
        trailing = _trailing(dense.shape)
        expanded = storage.nbytes() < x.numel() * x.element_size()
        if known is None or form is None or not trailing or dense.stride(-1) != 1 or expanded or self._is_copy(x):
            return super().__call__(given)
        width = math.prod(dense.shape[-trailing:])
        layout = None if dense.is_contiguous() else (x.shape, x.stride())
        key = x.storage_offset(), x.numel(), width, layout, x.dtype, x._version, form
        # numpy writes to a batch in the CPU's memory without a new version: its codes are not shared.
        found = known.get(key) if x.requires_grad or x.is_cuda else None
        if found is None:
            found = known[key] = _Rows(dense.reshape(-1, width).contiguous(), form)
        return _Held(found, dense.shape, order, _whole(given) if hasattr(given, "device_mesh") else None)

    def _form(self, x: Tensor) -> Format | torch.dtype | None:
        """What a tensor is held in; None for what it is in."""
        if self.normed is None:
            return self.format
        if x.dtype == torch.float32:
            return self.halves
        return None if x.untyped_storage() is self.normed() else self.format

    def _is_copy(self, x: Tensor) -> bool:
        """Whether a tensor may be a parameter in another form: by its shape, where nothing else can tell."""
        return any(x.shape == p.shape and not (self.plain and x.dtype == p.dtype) for p in self.parameters)


def _whole(x: Any) -> Callable[[Tensor], Tensor]:
    """What makes the part on this rank a DTensor like x."""
    made = partial(type(x).from_local, run_check=False, shape=x.shape, stride=x.stride())
    return partial(made, device_mesh=x.device_mesh, placements=x.placements)


def _kept(x: Tensor) -> _Kept:
    # A class that keeps its numbers elsewhere may not share its version with what is detached.
    return _Kept(x.detach() if type(x) in (Tensor, nn.Parameter) else x, x._version)


def _by_memory(x: Tensor) -> list[int]:
    """The dimensions from the widest stride to the narrowest, if memory has no gaps between them.

    Those of a matrix stay in their order: a transposed one is a weight.
    """
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    turned = x.dim() > 2 and not x.is_contiguous() and x.permute(order).is_contiguous()
    return order if turned else [*range(x.dim())]


def _trailing(shape: Sequence[int]) -> int:
    """How many dimensions at the end make a row; 0 if too few elements belong together, as one for each token."""
    width = 1
    for count, size in enumerate(reversed(shape[1:]) if len(shape) > 1 and shape[-1] >= _TOGETHER else (), 1):
        width *= size
        if width >= _LEAST:
            return count
    return 0


def _unpack(saved: _Kept | _Held) -> Tensor:
    if isinstance(saved, _Held):
        # `argsort` of an order is the way back.
        back = sorted(range(len(saved.order)), key=saved.order.__getitem__)
        here = saved.rows.values().reshape(saved.shape).permute(back)
        return here if saved.whole is None else saved.whole(here)
    x = saved.x
    if x._version != saved.version:  # torch looks only where no hook is
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {tuple(x.shape)} is at version {x._version}; expected version {saved.version} instead"
        )
    return x


# Compiled


def _compiled_gated(module: Any, parts: _Gated, format: Format, x: Tensor) -> Tensor:
    gate, up, act, down = parts
    activate = torch.nn.functional.silu if act == "F" else getattr(module, act)
    last = getattr(module, down)
    if not (_may_run_twice(last) and (not isinstance(activate, nn.Module) or _may_run_twice(activate))):
        return cast(Tensor, module._was.forward(module, x))  # what is run twice below must give the same twice
    return _by_rounded(lambda a, b: last(activate(a) * b), format, getattr(module, gate)(x), getattr(module, up)(x))


def _may_run_twice(module: Any) -> bool:
    """Whether a module gives the same when it is run twice: it has no hooks and no forward pass of the user's."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    own = type(module).forward is not nn.Linear.forward and isinstance(module, nn.Linear)
    if "forward" in vars(module) or (own and not isinstance(module, PlannedModule)):
        return False
    return all(getattr(hook, "repeatable", False) for hook in hooks)


def _by_rounded(run: Callable[..., Tensor], format: Format, *inputs: Tensor) -> Tensor:
    """The value of `run(*inputs)`, with the gradients of it at the rounded inputs."""
    if any(x.dtype not in _WIDE or not _trailing(x.shape) for x in inputs):
        return run(*inputs)
    with torch.no_grad():
        value = run(*inputs)
    result: Tensor = _Instead.apply(value, run(*(_Rounded.apply(x, format) for x in inputs)))  # type: ignore[no-untyped-call]
    return result


class _Rounded(torch.autograd.Function):
    """A tensor as its codes have it; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format) -> Tensor:
        rows = x.flatten(-_trailing(x.shape))
        return _rounded(rows, format).reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class _Instead(torch.autograd.Function):
    """The first tensor; the gradient is the second one's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, graded: Tensor) -> Tensor:
        # Not a view to autograd, which refuses in-place changes of views made within a function.
        same: Tensor = torch.ops.aten._unsafe_view.default(value, value.shape)
        return same

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        return None, g


def _rounded(x: Tensor, format: Format) -> Tensor:
    """`quantize(x, "row128", format)`, dequantized, in operations that a compiler fuses.

    The compiler weighs what to save by bytes, twice for what would be written for that alone. So there is nothing
    here that is written anyway, as a padded copy would be, and the codes are the smallest.
    """
    columns, dtype = x.shape[-1], FORMATS[format].dtype
    if columns > BLOCK and columns % BLOCK:
        whole = columns - columns % BLOCK
        return torch.cat((_rounded(x[..., :whole], format), _rounded(x[..., whole:], format)), -1)
    blocks = x.reshape(*x.shape[:-1], -1, min(columns, BLOCK)).to(torch.float32)
    absmax = blocks.abs().amax(-1, keepdim=True)
    # Literals, and what torch knows: with dynamic shapes a compiler takes other floats for variables.
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    usable = absmax >= 2.0**-110  # SMALLEST_ABSMAX
    inverse = torch.where(usable, largest / absmax, 0.0)
    scaled = (blocks * inverse).clamp(-largest, largest)
    codes = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
    scale = torch.where(usable, absmax / largest, 0.0)
    rounded: Tensor = (codes.to(torch.float32) * scale).to(x.dtype)
    return rounded.reshape(x.shape)
