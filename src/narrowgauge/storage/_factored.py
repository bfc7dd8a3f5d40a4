"""A second moment as its row means and its column means: `factored`, the storage of Adafactor.

A matrix of R rows and C columns is stored in R + C numbers. What is read is the outer product

    V_ij = r_i c_j / mean(r)

which has the stored row means and column means: sum_j V_ij / C = r_i mean(c) / mean(r), and both means are the mean
of the same matrix. So to decode, to add the new square and to encode again averages the means themselves:

    rows(b V + (1 - b) G^2) = b r + (1 - b) rows(G^2)

That is Adafactor's factored average, and any rule with a second moment can be stored so. The product is the matrix
of rank one nearest to the average in the generalized Kullback-Leibler divergence. It is right where an element's
scale is one of its row times one of its column, and wrong where single elements stand out.

Of more than two dimensions the last two are a matrix, and the others count matrices.

Source: Shazeer and Stern 2018, Adafactor, Section 3 and Algorithm 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.storage._blockwise import LARGEST
from narrowgauge.storage._states import StateContext, StateStorage, Tensors, add_storage, state_storage

LEAST_DIMS = 2


def factors(moment: Tensor) -> tuple[Tensor, Tensor]:
    """(row means, column means) of non-negative matrices (..., R, C): (..., R) and (..., C), in their dtype.

    Summed in float64. Infinities count as float32's largest number, NaN as zero; no matrix becomes infinite or NaN.
    """
    rows, columns = _means(moment)
    if not moment.is_cpu or not torch.isfinite(rows).all():  # a GPU does not wait for the answer
        rows, columns = _means(torch.nan_to_num(moment, nan=0.0, posinf=LARGEST, neginf=0.0))
    return rows.to(moment.dtype), columns.to(moment.dtype)


def _means(moment: Tensor) -> list[Tensor]:
    wide = moment.to(torch.float64) if moment.is_cpu else moment  # one conversion for both sums
    return [wide.sum(dim, dtype=torch.float64) / max(1, moment.shape[dim]) for dim in (-1, -2)]


def product(rows: Tensor, columns: Tensor, least: float | Tensor = 0.0) -> Tensor:
    """The matrices of row means and column means: r_i c_j / max(mean(r), least), (..., R, C); zero where all is."""
    count = max(1, rows.shape[-1])
    mean = (rows.sum(-1, keepdim=True, dtype=torch.float64) / count).to(rows.dtype).clamp_min(least)
    # A share is C at most, so no product on the way is larger than the result.
    shares = torch.where(mean > 0, columns / mean, 0.0)
    return (rows.unsqueeze(-1) * shares.unsqueeze(-2)).clamp_max_(LARGEST)


@dataclass(frozen=True)
class FactoredState(StateStorage):
    """Row means and column means of the last two dimensions, in float32; see the module.

    A moment of fewer than two dimensions has no rows, and a sign does not survive: both are stored in fp32. It is
    stored as a whole, so no part of it can be stepped by itself.
    """

    rounded: bool = False
    whole: bool = True
    least_dims: int = LEAST_DIMS

    def for_slot(self, signed: bool, has_normalizer: bool) -> StateStorage:
        return state_storage("fp32") if signed else self

    def init(self, p: Tensor, signed: bool, block_size: int) -> Tensors:
        *matrices, rows, columns = _matrices(p.shape)
        zeros = (torch.zeros(*matrices, count, dtype=self.dtype, device=p.device) for count in (rows, columns))
        return dict(zip(("rows", "columns"), zeros, strict=True))

    def decode(self, tensors: Tensors, context: StateContext) -> Tensor:
        return product(tensors["rows"], tensors["columns"]).view(context.shape)

    def encode(self, moment: Tensor, context: StateContext, random: Tensor | None = None) -> Tensors:
        rows, columns = factors(moment.reshape(_matrices(moment.shape)))
        return {"rows": rows, "columns": columns}

    def validate(self, tensors: Tensors, signed: bool) -> str | None:
        sound = all(bool((torch.isfinite(x) & (x >= 0)).all()) for x in tensors.values())
        return None if sound else "means that are negative or not finite"


def _matrices(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape of two dimensions at least: a vector is one row."""
    return (*(1,) * (LEAST_DIMS - len(shape)), *shape)


add_storage(FactoredState("factored", torch.float32))
