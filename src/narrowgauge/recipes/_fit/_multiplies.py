"""The error of a linear layer's multiplies in eight bits, on the inputs and gradients of the layer itself.

With inputs X (b, n), weights W (m, n) and gradients G (b, m) of the output, the multiplies are X Wᵀ, G W and Gᵀ X.
The error of one of them is measured against the same product without codes:

    ρ = ‖Y₈ - Y‖ / ‖Y‖

over all records of the layer. For `output` the median over the rows of Y of the same ratio is taken if it is
larger. A few tokens with large features have most of ‖Y‖², so the ratio of the norms does not show that a
tensor-wise scale rounds all other tokens to zero. What follows a layer mostly normalizes each token by itself, so
each token counts. `grad_weight` is a sum over tokens, in which a small row counts for little: there the ratio of
the norms is right.

**Samples.** A record has some of the rows, evenly spaced, but the scales of the whole: the absmax of each column of
X and G is that of all rows. So the errors of `output` and `grad_input`, row by row, are those of the whole.
`grad_weight` is a sum over b, of which the sample has fewer terms. If the terms and their errors are independent,
both norms grow as √b and ρ stays the same. In a real model ρ² of `grad_weight` changes as b to the power -0.36 to
0.12 (`docs/studies/inner_product_noise.md`). In float8, and in int8 with tensor-wise scales, the sample thus shows
a larger error than the whole sum has, and in int8 with a scale for each column a somewhat smaller one. The error is
also too large if the sample lacks a large row: that row sets the scales, and most of the whole sum would be its
own.

The arithmetic is `quantize` and `scaled_matmul` of `narrowgauge.linear`, simulated: the codes are those of the real
layer, but products are summed without the tensor cores' "fast" accumulation, which keeps fewer bits. The rounding
of results to bf16 is not counted, because the layer in high precision has it too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge._arguments import Size, check
from narrowgauge.linear import EightBit, quantize
from narrowgauge.linear._plan import Multiply
from narrowgauge.linear._quantize import Format, ScaledCodes, Scaling
from narrowgauge.linear._reference import scaled_matmul
from narrowgauge.linear._swap import KEEP, READ_BY_ATTENTION, Candidate, candidates

_PACKED = "its projections are one weight, which attention multiplies by without a layer: not measured"
# Rows or columns of a result that are computed: its norm is estimated from these, evenly spaced.
_RESULTS = 128
# Whether the left and the right operand are transposed in each product.
_TRANSPOSED: dict[Multiply, tuple[bool, bool]] = {
    "output": (False, True),
    "grad_input": (False, False),
    "grad_weight": (True, False),
}


class Record(NamedTuple):
    """A sample of a layer's call in a micro-batch.

    Attributes:
        x, g: the same rows of input (rows, n) and output gradient (rows, m), on the CPU, in the dtype that the
            layer computes in.
        x_absmax, g_absmax: the largest magnitude of each column over all rows, float32 (1, n) and (1, m).
        tokens: how many rows there were.
    """

    x: Tensor
    g: Tensor
    x_absmax: Tensor
    g_absmax: Tensor
    tokens: int


@dataclass(eq=False)
class Recorded:
    """A layer that `swap_linears` would swap, and its records.

    Attributes:
        layer: the layer, with its name.
        parameter: the name of its weight, as `model.named_parameters` has it.
        records: a record for each call in each micro-batch.
    """

    layer: Candidate
    parameter: str
    records: list[Record]
    _begun: int = 0  # micro-batches before this one
    _was_backward: bool = False

    def begins(self) -> int:
        """Index of the micro-batch of a forward pass: the first after a backward pass begins a new one."""
        self._begun += self._was_backward
        self._was_backward = False
        return self._begun

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._was_backward = True


class LayerRecords:
    """Records inputs and output gradients of linear layers while it is active.

    It changes no bit of what the model computes. Each call of a layer gives a record, and gradient checkpointing
    changes no record. A layer whose output has no gradient is not recorded.

    Args:
        model: the model; its layers are those that `swap_linears` would swap.
        keep: layers to leave out, as `swap_linears` takes them.
        rows: how many rows of a call to keep.
        batches: how many micro-batches to keep, the first ones. A micro-batch is a forward and a backward pass.

    Attributes:
        layers: the layers, by name.
        kept: why each other layer that multiplies by a weight is left out, by name.

    Raises:
        ValueError: for `rows` or `batches` that are no integer of at least 1.

    Example:
        >>> with LayerRecords(model) as records:
        ...     loss(model, batch).backward()
    """

    def __init__(self, model: nn.Module, keep: Iterable[str] = KEEP, rows: int = 256, batches: int = 4) -> None:
        self.rows, self.batches = check("rows", rows, Size), check("batches", batches, Size)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.layers: dict[str, Recorded] = {}
        self.kept: dict[str, str] = {}
        self._hooks: list[RemovableHandle] = []
        for one in candidates(model, tuple(keep)):
            reason = one.reason or (None if one.holder is None else READ_BY_ATTENTION)
            if reason is None and isinstance(one.module, nn.MultiheadAttention):
                reason = _PACKED
            if reason is not None:
                self.kept[one.name] = reason
            else:
                self.layers[one.name] = Recorded(one, names[one.weight], [])  # type: ignore[index]

    def __enter__(self) -> Self:
        for recorded in self.layers.values():
            # First of the layer's hooks: others may change the output.
            hook = recorded.layer.module.register_forward_hook(
                functools.partial(self._forward, recorded), prepend=True, with_kwargs=True
            )
            self._hooks.append(hook)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def _forward(self, recorded: Recorded, _: nn.Module, args: tuple[Any, ...], named: Any, output: Tensor) -> None:
        x: Tensor = args[0] if args else next(iter(named.values()))
        if not output.requires_grad or x.numel() == 0 or recorded.begins() >= self.batches:
            return
        x = x.to(output.dtype).reshape(-1, x.shape[-1])
        kept = _spaced(len(x), self.rows, x.device)
        x_rows, x_absmax = x[kept].cpu(), _column_absmax(x)

        @torch.no_grad()
        def backward(g: Tensor) -> None:
            if not self._hooks:
                return
            g = g.reshape(-1, g.shape[-1])
            recorded.add(Record(x_rows, g[kept].cpu(), x_absmax, _column_absmax(g), len(g)))

        # An output of three dimensions is a view. If it is changed in place, its own gradient is never computed.
        whole = output._base if output._is_view() and output._base is not None else output
        (whole if whole.numel() == output.numel() else output).register_hook(backward)  # type: ignore[no-untyped-call]


def _column_absmax(x: Tensor) -> Tensor:
    return x.abs().amax(0, keepdim=True).to("cpu", torch.float32)


def _spaced(count: int, most: int, device: torch.device) -> Tensor:
    """At most so many indices, evenly spaced from the first to the last."""
    if count <= most:
        return torch.arange(count, device=device)
    # Rounded one by one: a whole stride could meet the same position of each sequence.
    return torch.linspace(0, count - 1, most, dtype=torch.float64, device=device).round().long()


class _Matrix(NamedTuple):
    """Some rows and columns of an operand, float32, with the absmax of the whole: of each column and in all."""

    values: Tensor
    columns: Tensor
    tensor: Tensor

    @classmethod
    def of(cls, values: Tensor, columns: Tensor, device: torch.device) -> _Matrix:
        columns = columns.to(device)
        return cls(values.to(device, torch.float32), columns, columns.amax(1, keepdim=True))

    def take(self, dim: int) -> _Matrix:
        """Evenly spaced rows (0) or columns (1)."""
        index = _spaced(self.values.shape[dim], _RESULTS, self.values.device)
        columns = self.columns if dim == 0 else self.columns[:, index]
        return self._replace(values=self.values.index_select(dim, index), columns=columns)

    def quantized(self, scaling: Scaling, format: Format) -> ScaledCodes:
        absmax = {"row": None, "column": self.columns, "tensor": self.tensor}[scaling]
        return quantize(self.values, scaling, format, absmax)


class _Error:
    """The sums, over records, from which the error of one way to do a multiply is computed."""

    def __init__(self) -> None:
        self.squares: list[Tensor] = []  # (2,): of the error, of the exact product
        self.rows: list[Tensor] = []  # of each row, the error over the product

    def add(self, found: Tensor, exact: Tensor, by_row: bool) -> None:
        error, size = (found.to(torch.float64) - exact).square().sum(1), exact.square().sum(1)
        self.squares.append(torch.stack([error.sum(), size.sum()]))
        if by_row:
            self.rows.append((error / size)[size > 0].sqrt())

    @property
    def value(self) -> float:
        """ρ; 0 of a product that is zero without an error, NaN of one that is not finite."""
        error, size = torch.stack(self.squares).sum(0)
        whole = torch.where(error == 0, 0.0, (error / size).sqrt())
        rows = torch.cat(self.rows) if self.rows else whole.new_zeros(0)
        return float(torch.maximum(whole, rows.median()) if len(rows) else whole)


@torch.no_grad()
def layer_errors(
    recorded: Recorded, ways: Mapping[Multiply, Sequence[EightBit]]
) -> dict[tuple[Multiply, EightBit], float]:
    """The error ρ of each multiply of a layer, done in each way, over all of its records.

    The weight is that of now; it should be near the one of the records.

    Args:
        recorded: the layer, with at least one record.
        ways: for each multiply the scalings and formats to try.
    """
    weight = recorded.layer.weight.t() if recorded.layer.transposed else recorded.layer.weight
    device = weight.device
    found: dict[tuple[Multiply, EightBit], _Error] = {}
    with torch.autocast(device.type, enabled=False):
        for record in recorded.records:
            w = weight.to(record.x.dtype).to(torch.float32)
            whole = _Matrix.of(w, w.abs().amax(0, keepdim=True), device)
            x = _Matrix.of(record.x, record.x_absmax, device)
            g = _Matrix.of(record.g, record.g_absmax, device)
            operands: dict[Multiply, tuple[_Matrix, _Matrix]] = {
                "output": (x, whole.take(0)),
                "grad_input": (g, whole.take(1)),
                "grad_weight": (g.take(1), x.take(1)),
            }
            for multiply, hows in ways.items():
                left, right = operands[multiply]
                turned = _TRANSPOSED[multiply]
                exact = _turn(left.values.double(), turned[0]) @ _turn(right.values.double(), turned[1])
                made_left, made_right = functools.cache(left.quantized), functools.cache(right.quantized)
                for how in hows:
                    codes = made_left(how.left, how.formats[0]), made_right(how.right, how.formats[1])
                    one, two = (each.t() if turn else each for each, turn in zip(codes, turned, strict=True))
                    product = scaled_matmul(one, two, None, torch.float32, "simulated")
                    found.setdefault((multiply, how), _Error()).add(product, exact, multiply == "output")
    return {key: error.value for key, error in found.items()}


def _turn(x: Tensor, transposed: bool) -> Tensor:
    return x.t() if transposed else x
