"""Triton's interpreter as it is, without what it does again at every call of every function."""

from __future__ import annotations

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

    def patch_lang(fn: Any) -> Any:
        seen = [module for module in modules if any(value is module for value in fn.__globals__.values())]
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
