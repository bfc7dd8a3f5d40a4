"""A weight that is there as codes alone: eight bits with one scale for all of it.

A plan that scales W by the tensor multiplies nothing but its codes, so who brings W from elsewhere may bring
codes: a byte an element instead of two or four. `CodedWeight` is such a weight as a parameter of a layer. To
autograd it is a matrix of the weight's dtype, with a gradient like any other; a layer by a plan takes its codes,
and any other operation what they stand for.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from narrowgauge.linear._quantize import Format, ScaledCodes


class Form(NamedTuple):
    """What codes are codes of: their format, and the dtype of the matrix that they stand for."""

    format: Format
    dtype: torch.dtype


class Coded(NamedTuple):
    """Codes as they lie in memory, and what they are codes of.

    Attributes:
        codes: (rows, columns), any strides.
        scale: float32 (1, 1).
        form: what they are codes of.
    """

    codes: Tensor
    scale: Tensor
    form: Form

    def dequantize(self) -> Tensor:
        """What they stand for."""
        return ScaledCodes(self.codes, self.scale).dequantize(self.form.dtype)

    def t(self) -> Coded:
        """Those of the transposed matrix, in the same memory."""
        return self._replace(codes=self.codes.t())


class CodedWeight(torch.Tensor):
    """A matrix of which there are codes.

    Attributes:
        coded: the codes.
    """

    coded: Coded

    @staticmethod
    def __new__(cls, coded: Coded) -> Self:
        """A tensor of the shape of the codes and the dtype of what they stand for, without memory of its own."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, coded.codes.shape, strides=coded.codes.stride(), dtype=coded.form.dtype, device=coded.codes.device
        )
        made.coded = coded
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CodedWeight({self.coded.form.format}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation takes no None
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        of = getattr(args[0], "coded", None) if args else None
        if of is not None:
            if func in (_aten.detach.default, _aten.alias.default):
                return cls(of)
            if func is _aten.t.default:
                return cls(of.t())
            if func is _aten.as_strided.default and (rows := _first_rows(*args, **(kwargs or {}))):
                return cls(of._replace(codes=of.codes[:rows]))
        plain = torch.utils._pytree.tree_map_only(CodedWeight, _dequantized, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


_aten = torch.ops.aten


def _dequantized(weight: CodedWeight) -> Tensor:
    return weight.coded.dequantize()


def _first_rows(weight: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> int:
    """How many rows of a matrix are asked for, if it is the first ones and whole; else 0."""
    rows, *others = size
    same = tuple(others) == weight.shape[1:] and tuple(stride) == weight.stride() and not storage_offset
    return rows if same and rows <= len(weight) else 0
