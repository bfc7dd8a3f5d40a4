"""How a state storage of one's own becomes known: it is checked once, on a small moment on a CPU.

Eager torch, kernels, checkpoints and the bill rely on what is checked here, and none of them asks again.
"""

from __future__ import annotations

import itertools
from dataclasses import fields

import torch
from torch import Tensor

from narrowgauge._arguments import check_choice, check_instance
from narrowgauge.kernels._codec import BYTES, KINDS, Codec
from narrowgauge.storage._states import StateContext, StateStorage, Tensors, add_storage

_SHAPE, _BLOCK = torch.Size((5, 41)), 64  # several blocks, of which the last is cut short


def register_state(name: str, storage: StateStorage) -> None:
    """Make a state storage known under a name, in this process: `states` of every optimizer takes it then.

    A class that is defined anew, as in a notebook, takes the place of the one before.

    Args:
        name: what users type.
        storage: one of that name.

    Raises:
        ValueError: for a name that is taken, or not the storage's; where methods of the storage do not fit each
            other, naming the method; where it and its codec do not agree.
    """
    check_instance("storage", storage, StateStorage)
    if name != storage.name or not name.strip():
        raise ValueError(f"name must be a word, and the storage's, {storage.name!r}, got {name!r}")
    _check_class(storage)
    for signed, has_normalizer in itertools.product((False, True), repeat=2):
        of_slot = storage.for_slot(signed, has_normalizer)
        if (codec := of_slot.codec(signed)) is not None:
            _check_codec(of_slot, codec)
        _check_methods(of_slot, signed)
    add_storage(storage)


def _check_class(storage: StateStorage) -> None:
    kind = type(storage)
    own = [field.name for field in fields(StateStorage) if field.name in vars(kind)]
    if own and "__dataclass_fields__" not in vars(kind):
        name = kind.__name__
        raise ValueError(f"{name}, which sets {own[0]}, must be a dataclass: write @dataclass(frozen=True)")
    methods = ("encode", "decode")
    if not storage.dtype.is_floating_point and any(getattr(kind, m) is getattr(StateStorage, m) for m in methods):
        raise ValueError(f"{kind.__name__} must have encode and decode of its own for {storage.dtype}")


def _check_methods(storage: StateStorage, signed: bool) -> None:
    """Refuse `init`, `encode`, `decode` and `codes` that do not fit each other."""
    x = torch.linspace(-1.0, 2.0, _SHAPE.numel(), device="cpu").reshape(_SHAPE)
    x = x if signed else x.abs()
    context = StateContext(_SHAPE, signed, _BLOCK, torch.ones_like(x) if storage.normalized else None)
    start, made = storage.init(x, signed, _BLOCK), storage.encode(x, context)
    if (kept := _forms(start)) != (got := _forms(made)):
        raise ValueError(f"encode of storage {storage.name!r} must return what init does, {kept}, got {got}")
    try:
        bare = _forms(storage.init(x.to("meta"), signed, _BLOCK))
    except Exception as error:  # of anybody's
        raise ValueError(f"init of storage {storage.name!r} must run on the meta device: {error}") from error
    if bare != kept:
        raise ValueError(f"init of storage {storage.name!r} must return {kept} on the meta device too, got {bare}")
    for what, tensors in (("init", start), ("encode", made)):
        moment = storage.decode(tensors, context)
        if moment.shape != _SHAPE or moment.dtype != torch.float32:
            form = f"{moment.dtype} of shape {tuple(moment.shape)}"
            words = f"float32 of shape {tuple(_SHAPE)}, got {form}"
            raise ValueError(f"decode of storage {storage.name!r} must return {words}")
        if what == "init" and moment.any():
            raise ValueError(f"init of storage {storage.name!r} must make zeros, got {moment.abs().max():g}")
    averages = type(storage).accumulate is not StateStorage.accumulate
    if storage.rounded and not averages and "" not in start:
        words = "must be False without methods accumulate and value of its own"
        raise ValueError(f"rounded of storage {storage.name!r} {words}")
    if storage.quantized:
        codes = storage.codes(made, _SHAPE)
        if codes.dtype != torch.uint8 or codes.shape != _SHAPE:
            form = f"{codes.dtype} of shape {tuple(codes.shape)}"
            raise ValueError(f"codes of storage {storage.name!r} must be uint8 of {tuple(_SHAPE)}, got {form}")


def _forms(tensors: Tensors) -> dict[str, str]:
    def form(x: Tensor) -> str:
        return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"

    return {name: form(x) for name, x in sorted(tensors.items())}


def _check_codec(storage: StateStorage, codec: Codec) -> None:
    """Refuse a storage and a codec that differ: eager torch reads the flags of one, kernels those of the other."""
    for name, of_codec in (("normalized",) * 2, ("error_feedback",) * 2, ("stochastic", "needs_random")):
        own, others = getattr(storage, name), getattr(codec, of_codec)
        if own != others:
            words = f"{of_codec} of its codec, {others}"
            raise ValueError(f"{name} of the storage {storage.name!r} must be {words}, got {own}")
    tensors = storage.init(torch.zeros(_SHAPE, device="cpu"), True, _BLOCK)
    for word in codec.words:
        check_choice(f"kind of word {word.name!r} of the codec {codec.name!r}", word.kind, list(KINDS.values()))
        check_choice(f"a word of the codec {codec.name!r}", word.name, list(tensors))
        if BYTES[word.kind] != (kept := tensors[word.name]).element_size():  # a kernel would go past its end
            words = f"that of its tensor, {kept.dtype}, got {word.kind!r}"
            raise ValueError(f"kind of word {word.name!r} of the codec {codec.name!r} must be {words}")
