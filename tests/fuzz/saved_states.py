# ruff: noqa: E501
"""What has a `load_state_dict`: a good state of each, and what can be done to one."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import distributed, scaling
from narrowgauge.storage import quantize

Path = tuple[Any, ...]  # of keys, from the outermost


class Thing:
    def __repr__(self) -> str:
        return "Thing()"


# Made anew for every call.
JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "zero": lambda: 0, "minus one": lambda: -1, "1.5": lambda: 1.5,
    "nan": lambda: math.nan, "inf": lambda: math.inf, "-inf": lambda: -math.inf, "10^30": lambda: 10**30,
    "10^400": lambda: 10**400, "2^63": lambda: 2**63, "1e-320": lambda: 1e-320, "1j": lambda: 1j,
    "empty text": lambda: "", "no name": lambda: "no such name", "NUL": lambda: "\0", "bytes": lambda: b"x",
    "empty list": list, "list": lambda: [1, 2], "list of texts": lambda: ["a"], "dict": lambda: {"a": 1}, "tuple": lambda: (0.9,),
    "thing": Thing, "type": lambda: Thing, "function": lambda: (lambda *a, **k: None), "generator": lambda: iter([1]),
    "dtype": lambda: torch.int32, "device": lambda: torch.device("meta"), "meta": lambda: torch.ones(8, device="meta"),
    "tensor": lambda: torch.ones(3, 5), "scalar": lambda: torch.tensor(1.0), "empty": lambda: torch.empty(0),
    "ints": lambda: torch.arange(8), "bools": lambda: torch.ones(8, dtype=torch.bool),
    "complex": lambda: torch.ones(8, dtype=torch.complex64), "sparse": lambda: torch.ones(8).to_sparse(),
    "module": lambda: nn.Linear(3, 2), "empty module": nn.Identity,
    "a negative tensor": lambda: torch.tensor(-3.0), "a NaN tensor": lambda: torch.tensor(float("nan")),
    "an inf tensor": lambda: torch.tensor(float("inf")), "a NaN of numpy": lambda: np.float32("nan"),
    "a number in meta": lambda: torch.ones((), device="meta"), "a fraction": lambda: torch.tensor(0.5), "a count beyond": lambda: torch.tensor(1e30), "nested": lambda: [[[]]],
    "dict of dicts": lambda: {0: {0: {}}}, "list of dicts": lambda: [{}],
}  # fmt: skip


def spoilt(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor in other shapes, dtypes, places."""
    flat = x.detach().clone()
    yield "in meta", flat.to("meta")
    yield "0 elements", flat[:0]
    yield "more dims", flat[None]
    yield "strides", flat.repeat_interleave(2, dim=-1)[..., ::2] if flat.dim() else flat
    yield "fp64", flat.double()
    yield "fp16", flat.half()
    yield "ints", flat.to(torch.int64)
    yield "complex", flat.to(torch.complex64)
    yield "with gradient", flat.float().requires_grad_()
    yield "of nan", torch.full_like(flat.float(), math.nan)
    yield "of inf", torch.full_like(flat.float(), math.inf)
    yield "sparse", flat.to_sparse()
    yield "shorter", flat[..., :-1] if flat.dim() else flat


@dataclass(frozen=True)
class Subject:
    """Something that loads states.

    Attributes:
        made: makes one anew that has been used.
        used: uses one.
        others: makes states that others wrote and it is to read too.
        theirs: keys of groups whose values are for another library's optimizer to look at.
    """

    made: Callable[[], Any]
    used: Callable[[Any], None]
    others: Callable[[], list[Any]] = list
    theirs: tuple[str, ...] = ()


def parameters(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in (("w", (8, 20)), ("u", (3, 40)))
    ]


def stepped(optimizer: Any) -> None:
    if isinstance(optimizer, ng.optim.ScheduleFreeAdamW):
        optimizer.train()  # the mode is the state's
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.linspace(-1, 1, p.numel(), dtype=torch.float32).reshape(p.shape).to(p.dtype)
    optimizer.step()


def optimizer(
    make: Callable[[Any], Any],
    dtype: torch.dtype,
    others: Callable[[], list[Any]] = list,
    theirs: tuple[str, ...] = (),
) -> Subject:
    def made() -> Any:
        one = make(parameters(dtype))
        for _ in range(2):
            stepped(one)
        return one

    return Subject(made, stepped, others, theirs)


def ours(
    name: str, dtype: torch.dtype = torch.bfloat16, others: Callable[[], list[Any]] = list, **options: Any
) -> Subject:
    given = {"lr": 1e-2, "block_size": 64, "min_quantized_size": 100, **options}
    return optimizer(lambda ps: getattr(ng.optim, name)(ps, **given), dtype, others)


def of_torch() -> list[Any]:
    one = torch.optim.AdamW([p for _, p in parameters(torch.float32)], lr=1e-2)
    stepped(one)
    return [one.state_dict()]


def of_bitsandbytes() -> list[Any]:
    """As its 8-bit AdamW saves, in float32 where small."""
    state: dict[int, Any] = {}
    for place, (_, p) in enumerate(parameters(torch.float32)):
        entry: dict[str, Any] = {"step": 3}
        for number, signed in ((1, True), (2, False)):
            book = ng.formats.codebook("dynamic", signed)
            moment = p.detach() if signed else p.detach().square()
            coded = quantize(moment, book, 256)
            entry |= {f"state{number}": coded.codes, f"qmap{number}": book, f"absmax{number}": coded.scales.abs()}
        state[place] = entry if place else {"step": 3, "state1": p.detach().clone(), "state2": p.detach().square()}
    group = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "alpha": 0.0, "params": [0, 1]}
    return [{"state": state, "param_groups": [group]}]


def scaler(cls: Any, others: Callable[[], list[Any]] = list, **options: Any) -> Subject:
    def used(made: Any) -> None:
        for bad in (False, True):
            one = torch.optim.SGD([p for _, p in parameters(torch.float32)], lr=0.1)
            made.scale(one.param_groups[0]["params"][0].sum() * (torch.inf if bad else 1.0)).backward()
            made.step(one)
            made.update()
        float(made.get_scale())
        assert all(isinstance(count, int) and count >= 0 for count in (made.skipped_steps, *made.skipped.values()))

    def made() -> Any:
        one = cls("cpu", **options)
        used(one)
        return one

    return Subject(made, used, others)


def of_torch_scaler() -> list[Any]:
    return [torch.amp.GradScaler("cpu").state_dict()]


def hook(error_feedback: bool) -> Subject:
    def made() -> Any:
        one = distributed.compressed_allreduce_hook(error_feedback=error_feedback)
        memory = {"0/float32.0": torch.linspace(-1, 1, 64)} if error_feedback else {}
        one.load_state_dict({"step": 3, "ranks": 1, "memory": memory})
        return one

    def used(made: Any) -> None:
        assert made.step >= 0
        assert repr(made)
        for error in made.state_dict()["memory"].values():
            assert torch.isfinite(error).all()

    return Subject(made, used)


SUBJECTS: dict[str, Subject] = {
    "AdamW": ours("AdamW", torch.float32, lambda: of_torch() + of_bitsandbytes()),
    "AdamW8bit": ours("AdamW8bit", weights="split8"),
    "AdamW, 8bit": ours("AdamW", torch.float32, of_bitsandbytes, states="8bit"),
    "StableAdamW": ours("StableAdamW", weights="kahan", states="fp8"),
    "SGD": ours("SGD", weights="split", states="4bit", momentum=0.9),
    "LAMB": ours("LAMB", torch.float16, weights="master", states="expansion"),
    "Lion": ours("Lion", weights="expansion", states="log4"),
    "Adafactor": ours("Adafactor", weights="split8"),
    "ScheduleFreeAdamW": ours("ScheduleFreeAdamW", weights="split8", states="log8"),
    "Muon": ours("Muon", weights="stochastic", states="bf16"),
    "QuantizedGradients of AdamW8bit": optimizer(
        lambda ps: ng.optim.QuantizedGradients(
            ng.optim.AdamW8bit(ps, lr=1e-2, weights="split8", block_size=64, min_quantized_size=100),
            "linear", "stochastic", True,
        ),
        torch.bfloat16,
    ),
    "QuantizedGradients of torch's SGD": optimizer(
        lambda ps: ng.optim.QuantizedGradients(torch.optim.SGD([p for _, p in ps], lr=1e-2), error_feedback=True),
        torch.float32,
        theirs=tuple(torch.optim.SGD([nn.Parameter(torch.ones(1))]).defaults),
    ),
    "CPUOffload": optimizer(
        lambda ps: distributed.CPUOffload(
            ng.optim.AdamW8bit, ps, lr=1e-2, weights="split8", block_size=64, min_quantized_size=100
        ),
        torch.bfloat16,
    ),
    "DynamicLossScaler": scaler(scaling.DynamicLossScaler, of_torch_scaler, init_scale=2.0**10),
    "StaticLossScaler": scaler(scaling.StaticLossScaler),
    "TensorLossScaler": scaler(scaling.TensorLossScaler),
    "hook with error feedback": hook(True),
    "hook": hook(False),
}  # fmt: skip


def seen(value: Any) -> Any:
    """A value as something to be compared, tensors by their bits."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (value.dtype, tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    return [seen(item) for item in value] if isinstance(value, list | tuple) else value


def whole(made: Any) -> Any:
    """All of a subject that a refused state must leave as it was."""
    found = [seen(made.state_dict())]
    if isinstance(made, torch.optim.Optimizer):
        found += [seen([p for group in made.param_groups for p in group["params"]])]
        found += [[{k: seen(v) for k, v in group.items() if k != "params"} for group in made.param_groups]]
    if isinstance(made, scaling.LossScaler):
        found.append((made.get_scale(), made.skipped, made.skipped_steps))
    return found


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The way to every value inside others."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list | tuple) else ()
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: Path, change: Callable[[Any, Any], None]) -> Any:
    """A copy in which the container of a place was changed: by a function of that and the last key."""
    if not path:
        raise ValueError("path: got the state itself")
    key = path[0]
    if isinstance(value, tuple):
        return tuple(put(list(value), path, change))
    copied = copy.copy(value)
    if len(path) == 1:
        change(copied, key)
    else:
        copied[key] = put(copied[key], path[1:], change)
    return copied


def drop(container: Any, key: Any) -> None:
    del container[key]


def add(container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[f"{key} more"] = container[key]
    else:
        container.append(container[key])


def replaced(new: Any) -> Callable[[Any, Any], None]:
    def change(container: Any, key: Any) -> None:
        container[key] = new

    return change


def renamed(new: Any) -> Callable[[Any, Any], None]:
    def change(container: Any, key: Any) -> None:
        if isinstance(container, dict):
            container[new] = container.pop(key)
        else:
            container[key] = new

    return change


def changes(value: Any) -> Iterator[tuple[str, Callable[[Any, Any], None]]]:
    """What can be done at the place of a value."""
    yield "dropped", drop
    yield "once more", add
    for name, new in JUNK.items():
        yield name, replaced(new())
    if isinstance(value, Tensor):
        known = value.to(torch.float32) if value.dtype.itemsize == 1 and value.is_floating_point() else value
        for name, other in spoilt(known if value.dim() else known[None]):
            yield name, replaced(other)
        yield "bits turned", replaced((~value.view(torch.uint8)).view(value.dtype) if value.dim() else -value - 1)
    for key in (None, 7, -1, "x", (1, 2)):
        yield f"by {key!r}", renamed(key)


# What a place is changed to: how that is called, the way there, and what is done there. No way: the state itself.
Case = tuple[str, Path | None, Any]


def all_cases(subject: Subject, state: Any) -> list[Case]:
    found: list[Case] = [
        (name, path, change)
        for path in places(state)
        if not (path[0] == "param_groups" and len(path) > 2 and path[2] in subject.theirs)
        for name, change in changes(at(state, path))
    ]
    return found + [(name, None, new) for name, new in JUNK.items()]


def spoil(state: Any, case: Case) -> Any:
    _, path, change = case
    return change() if path is None else put(state, path, change)


def some(cases: list[Case], tries: int, seed: int) -> list[Case]:
    """So many of them, the same ones at every run."""
    return cases if len(cases) <= tries else random.Random(seed).sample(cases, tries)
