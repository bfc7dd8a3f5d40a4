"""Triton's interpreter as it is, without what it does again at every call of every function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """Patch the language once a launch, and look each dtype up once.

    A launch puts interpreted functions in place of the language's, and takes them back when it ends. A call of one
    device function by another, within it, looks through the whole language to do the same, and finds it done: a
    third of the time of kernels with many functions. The results are the same; where the interpreter is built in
    another way it is left alone.
    """
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype")):
        return
    plain: Callable[[Any], Any] = interpreter._patch_lang
    modules = (language, language.core)

    @functools.cache
    def seen_by(fn: Any) -> list[Any]:
        return [module for module in modules if any(value is module for value in fn.__globals__.values())]

    def patch_lang(fn: Any) -> Any:
        seen = seen_by(fn)
        # What is patched is no builtin of the language any more, until the launch gives it back.
        if seen and not any(language.core.is_builtin(module.load) for module in seen):
            return interpreter._LangPatchScope()
        return plain(fn)

    lookup: Callable[[Any], Any] = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def numpy_dtype(of: Any) -> Any:
        scalar = of.element_ty if isinstance(of, language.block_type) else of
        if type(scalar) is not language.dtype:  # pointers
            return lookup(of)
        if scalar.name not in found:
            found[scalar.name] = lookup(scalar)
        return found[scalar.name]

    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = numpy_dtype
    _share_types(language.core)
    _shorten_calls(interpreter, language.core)
    _reduce_by_halves(interpreter)


def _share_types(core: Any) -> None:
    """Work out what a type or a tensor of one shape has once, and give it to all of that shape.

    Each operation on a block makes a type and a tensor, and these make tuples of their shape: a third of the time.
    """
    block, tensor, scalar = core.block_type, core.tensor, core.dtype
    plain_block, plain_tensor, plain_equal = block.__init__, tensor.__init__, scalar.__eq__
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    tensors: dict[tuple[int, ...], dict[str, Any]] = {}

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sides = tuple(getattr(side, "value", side) for side in shape)
        if type(element_ty) is not scalar:  # pointers, which have more to tell them apart than a name
            plain_block(self, element_ty, shape)
            return
        if (element_ty.name, sides) not in blocks:
            plain_block(self, element_ty, shape)
            blocks[element_ty.name, sides] = dict(vars(self))
        vars(self).update(blocks[element_ty.name, sides], element_ty=element_ty)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sides = tuple(type.shape.values) if type.is_block() else ()
        if sides not in tensors:
            plain_tensor(self, handle, type)
            tensors[sides] = {name: value for name, value in vars(self).items() if name in ("shape", "numel")}
        vars(self).update(tensors[sides], handle=handle, type=type, dtype=type.scalar)

    def equal(self: Any, other: Any) -> bool:
        return bool(self.name == other.name if type(other) is scalar else plain_equal(self, other))

    one = block(core.float32, [2])
    if vars(one).keys() != {"element_ty", "shape", "numel", "name"}:
        return
    if vars(tensor(None, one)).keys() != {"handle", "shape", "numel", "type", "dtype"}:
        return
    block.__init__, tensor.__init__, scalar.__eq__ = make_block, make_tensor, equal


def _shorten_calls(interpreter: Any, core: Any) -> None:
    """Go from an operation to numpy with less on the way.

    Integers are added as integers of 64 bits once more, to find overflow, of which only debugging tells; that is a
    third of the time of kernels with random numbers. Two numbers or blocks of one shape and one wide dtype need no
    other shape or dtype, and are looked at for it three times.
    """
    if not all(
        hasattr(interpreter, name) for name in ("interpreter_builder", "interpreter_semantic", "_patch_attr")
    ):
        return
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    wrapper = core.builtin(lambda: None).__code__  # asks for the keyword that is given below

    def patch_attr(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*given, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr
    plain = type(semantic).binary_op_type_checking_impl
    wide, block = {"fp32", "fp64", "int32", "uint32", "int64", "uint64"}, core.block_type
    scalar = core.dtype

    def check(self: Any, lhs: Any, rhs: Any, *given: Any, **named: Any) -> tuple[Any, Any]:
        one, other = getattr(lhs, "type", None), getattr(rhs, "type", None)
        if type(one) is type(other) in (block, scalar) and one.name == other.name and one.scalar.name in wide:
            return lhs, rhs
        pair: tuple[Any, Any] = plain(self, lhs, rhs, *given, **named)
        return pair

    type(semantic).binary_op_type_checking_impl = check


def _reduce_by_halves(interpreter: Any) -> None:
    """Combine neighbors of a whole block at once, then neighbors of what is left, as a processor's lanes do.

    A function of a kernel's own that combines two numbers is called for each number of a block otherwise: a third
    of the time of steps. It is associative, or no GPU could reduce by it.
    """
    reduces = getattr(interpreter, "ReduceOps", None)
    if not all(hasattr(reduces, name) for name in ("generic_reduce", "to_tensor")):
        return
    plain = reduces.generic_reduce

    def generic_reduce(self: Any, given: Any) -> Any:
        axis, dtypes = self.axis, [one.dtype for one in given]
        if axis is None or given[0].handle.data.shape[axis].bit_count() != 1:
            return plain(self, given)
        values = [one.handle.data.swapaxes(axis, -1) for one in given]
        while values[0].shape[-1] > 1:
            pairs = [value[..., half::2] for half in (0, 1) for value in values]
            found = self.combine_fn.fn(*map(self.to_tensor, pairs, dtypes * 2))
            values = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
        values = [value.swapaxes(axis, -1) for value in values]
        if not self.keep_dims:
            values = [value.squeeze(axis) for value in values]
        return list(map(self.to_tensor, values, dtypes))

    reduces.generic_reduce = generic_reduce
