# ruff: noqa: E501
"""Junk for any argument of any public function: it works, or an error names the argument; nothing given is changed."""

from __future__ import annotations

import copy
import importlib
import math
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import CALLS, EXEMPT, FOLDER, Call
from torch import Tensor, nn

ROOMS = ("formats", "storage", "rules", "optim", "linear", "nn", "scaling", "distributed", "recipes")


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


def junk_of(value: Any) -> dict[str, Callable[[], Any]]:
    """What to put in a value's place."""
    found = dict(JUNK)
    if isinstance(value, Tensor):
        found |= {name: (lambda other=other: other.clone()) for name, other in spoilt(value)}
    if isinstance(value, nn.Module):
        found["in meta"] = lambda: copy.deepcopy(value).to("meta")
    return found


def snapshot(value: Any) -> Any:
    """What of a value would show that it was changed."""
    if isinstance(value, Tensor):
        return (value._version, tuple(value.shape), value.dtype, value.requires_grad)
    if isinstance(value, nn.Module):
        return {name: (snapshot(p), id(p)) for name, p in value.state_dict(keep_vars=True).items()}
    if isinstance(value, torch.optim.Optimizer):
        return copy.deepcopy(value.state_dict())["param_groups"]
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return {k: snapshot(v) for k, v in value.items()} if isinstance(value, dict) else None


def complaint(call: Call, name: str, arguments: dict[str, Any]) -> str | None:
    """What is wrong with how a call takes its arguments; None if it works, or refuses as it should."""
    before = {key: snapshot(value) for key, value in arguments.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call.then(call.function(**arguments))
            return None
        except (ValueError, TypeError) as error:
            said = str(error)
        except OSError as error:
            if error.filename is None:
                return f"{type(error).__name__}: {error}"
            said = f"{name}: {error}"  # which names the file
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:150]}"
    alias = dict(call.aliases).get(name, name)
    # Of two that do not go together either may be named.
    # torch has its words for a model without parameters, and a path of "" is the folder "."
    beside = "parameter list|^[.] has no checkpoint[.]json|" + "|".join(rf"^{other}: got" for other in arguments)
    if not re.search(rf"(?<![A-Za-z]){name}(?![A-Za-z])|{alias}|{beside}", said, re.IGNORECASE):
        return f"unnamed: {said[:150]}"
    changed = [key for key, value in arguments.items() if snapshot(value) != before[key]]
    return f"changed {changed}" if changed else None


def cases(of: str) -> Iterator[tuple[str, str]]:
    """Every argument of a call, and what to put there."""
    call = CALLS[of]
    for name, value in call.arguments().items():
        if name not in call.skip:
            yield from ((name, junk) for junk in junk_of(value))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # where a name that is taken for a file would be written
    FOLDER[:] = [tmp_path]
    torch.manual_seed(0)
    return tmp_path


@pytest.mark.parametrize("of", CALLS)
def test_the_call_is_right(of: str) -> None:
    """What is spoilt below works as it stands."""
    call = CALLS[of]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call.then(call.function(**call.arguments()))


@pytest.mark.parametrize("of", CALLS)
def test_an_argument_that_is_none_is_named(of: str) -> None:
    call, found = CALLS[of], {}
    for name, junk in cases(of):
        arguments = call.arguments()
        arguments[name] = junk_of(arguments[name])[junk]()
        why = complaint(call, name, arguments)
        if why is not None:
            found[f"{name}={junk}"] = why
    assert not found, "\n" + "\n".join(f"{of}({case}): {why}" for case, why in found.items())


def test_every_public_callable_is_tried_or_says_why_not() -> None:
    public = {
        f"{room}.{name}"
        for room in ROOMS
        for name in importlib.import_module(f"narrowgauge.{room}").__all__
        if callable(getattr(importlib.import_module(f"narrowgauge.{room}"), name))
    }
    values = {
        name
        for name in public
        if not isinstance(getattr(*_found(name)), type) and "__call__" not in dir(type(getattr(*_found(name))))
    }
    assert not public - values - CALLS.keys() - EXEMPT.keys()
    assert not EXEMPT.keys() - public, "exemptions of what is not there any more"
    assert not EXEMPT.keys() & CALLS.keys()
    assert not {name for name in CALLS if name.count(".") == 1} - public


def _found(name: str) -> tuple[Any, str]:
    room, _, last = name.partition(".")
    return importlib.import_module(f"narrowgauge.{room}"), last
