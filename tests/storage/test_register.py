"""A state storage whose methods do not fit each other is refused when it is registered, not in a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from narrowgauge import gauges, optim
from narrowgauge.storage import Codec, StateStorage, Word, _states, register_state, state_storage


@dataclass(frozen=True)
class Tenths(StateStorage):
    """int8 tenths, one scale for all: what a storage is, in a few lines."""

    quantized: bool = True
    rounded: bool = False

    def init(self, p: Any, signed: bool, block_size: int) -> Any:
        return {"codes": torch.zeros_like(p, dtype=torch.uint8), "unit": torch.full((1,), 0.1)}

    def encode(self, moment: Any, context: Any, random: Any = None) -> Any:
        codes = (moment * 10).round().clamp(-128, 127).to(torch.int8).view(torch.uint8)
        return {"codes": codes, "unit": torch.full((1,), 0.1)}

    def decode(self, tensors: Any, context: Any) -> Any:
        return tensors["codes"].view(torch.int8).float() * tensors["unit"]


@dataclass(frozen=True)
class Codes16(Tenths):
    """The same in int16: its methods fit each other, but gauges count codes of one byte."""

    def init(self, p: Any, signed: bool, block_size: int) -> Any:
        return {"codes": torch.zeros_like(p, dtype=torch.int16), "unit": torch.full((1,), 0.1)}

    def encode(self, moment: Any, context: Any, random: Any = None) -> Any:
        return {"codes": (moment * 10).round().to(torch.int16), "unit": torch.full((1,), 0.1)}

    def decode(self, tensors: Any, context: Any) -> Any:
        return tensors["codes"].float() * tensors["unit"]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_states, "_STORAGES", dict(_states._STORAGES))


def refused(**members: Any) -> str:
    wrong = dataclass(frozen=True)(type("Wrong", (Tenths,), {"__module__": __name__, **members}))
    with pytest.raises(ValueError, match="'wrong'") as caught:
        register_state("wrong", wrong("wrong", torch.uint8))
    assert "wrong" not in _states.state_storages()
    return str(caught.value)


def test_methods_that_do_not_fit_each_other_are_refused_by_name() -> None:
    def encode(made: Any) -> Any:
        return lambda self, moment, context, random=None: made(Tenths.encode(self, moment, context))

    got = "codes': 'uint8 of shape (5, 41)'}"
    assert refused(encode=encode(lambda t: {"codes": t["codes"]})).endswith(got)
    assert "encode of storage 'wrong' must return what init does" in refused(
        encode=encode(lambda t: {**t, "x": t["unit"]})
    )
    assert "got {'codes': 'int64" in refused(encode=encode(lambda t: {**t, "codes": t["codes"].long()}))
    half = refused(decode=lambda self, tensors, context: Tenths.decode(self, tensors, context)[:, :1])
    assert (
        half == "decode of storage 'wrong' must return float32 of shape (5, 41), got torch.float32 of shape (5, 1)"
    )
    ones = refused(init=lambda self, p, signed, block_size: Tenths.encode(self, torch.ones_like(p), None))
    assert ones == "init of storage 'wrong' must make zeros, got 1"
    assert refused(codes=lambda self, tensors, shape: tensors["codes"].long()).startswith(
        "codes of storage 'wrong'"
    )
    reads = refused(init=lambda self, p, signed, block_size: Tenths.init(self, p * float(p.sum() > 9), signed, 1))
    assert reads.startswith("init of storage 'wrong' must run on the meta device: ")
    wide = Codes16("wrong", torch.int16)
    with pytest.raises(ValueError, match=r"^codes of storage 'wrong' must be uint8, got torch\.int16$"):
        register_state("wrong", wide)
    word = Codec("wrong", (Word("code", "uint8"), Word("unit", "fp32")))
    assert refused(codec=lambda self, signed: word) == (
        "a word of the codec 'wrong' must be 'codes' or 'unit', got 'code'"
    )
    kind = Codec("wrong", (Word("codes", "int6"), Word("unit", "fp32")))
    assert refused(codec=lambda self, signed: kind).startswith("kind of word 'codes' of the codec 'wrong' must be")
    size = Codec("wrong", (Word("codes", "int16"), Word("unit", "fp32")))
    assert refused(codec=lambda self, signed: size) == (
        "kind of word 'codes' of the codec 'wrong' must be that of its tensor, torch.uint8, got 'int16'"
    )


def test_a_class_that_would_lose_its_options_or_cast_to_integers_is_refused() -> None:
    class Forgot(Tenths):
        quantized: bool = False

    with pytest.raises(ValueError, match=r"Forgot, which sets quantized, must be a dataclass: write @dataclass\("):
        register_state("forgot", Forgot("forgot", torch.uint8))
    with pytest.raises(ValueError, match=r"StateStorage must have encode and decode of its own for torch\.uint8"):
        register_state("cast", StateStorage("cast", torch.uint8))
    with pytest.raises(ValueError, match="rounded of storage 'tenths' must be False without methods accumulate"):
        register_state("tenths", Tenths("tenths", torch.uint8, rounded=True))


def test_a_class_that_is_defined_anew_takes_the_place_of_the_one_before() -> None:
    """A cell of a notebook runs twice; another storage is refused."""
    again = dataclass(frozen=True)(type("Tenths", (Tenths,), {"__module__": __name__, "__qualname__": "Tenths"}))
    register_state("tenths", Tenths("tenths", torch.uint8))
    register_state("tenths", again("tenths", torch.uint8))
    assert type(state_storage("tenths")) is again
    other = dataclass(frozen=True)(type("Other", (Tenths,), {"__module__": __name__}))
    with pytest.raises(ValueError, match="name must be new, got 'tenths', which another state storage has"):
        register_state("tenths", other("tenths", torch.uint8))


def test_gauges_look_into_a_storage_of_ones_own() -> None:
    """At the tenth measurement they count its codes."""
    register_state("tenths", Tenths("tenths", torch.uint8))
    model = torch.nn.Linear(100, 200)
    optimizer = optim.AdamW(model.named_parameters(), states={"m": "tenths", "v": "log8"})
    with gauges.watch(model, optimizer, every=1) as watch:
        for _ in range(11):
            model(torch.randn(8, 100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {row["format"] for row in watch.rows() if row.get("slot") == "m" and "format" in row} == {"tenths"}
