"""Gradients that travel as codes: a communication hook for DistributedDataParallel.

An all-reduce is a reduce-scatter (every rank sums one shard) and an all-gather (every rank gets the sums). In
bf16 each element travels twice in two bytes. Here it travels twice in one byte, or in half a byte, and a scale
a block: codes are sent to the rank that sums them, decoded and added in float32, and the sum is encoded again
for the way back, so that both hops are narrow whatever the number of ranks.

What codes lose is biased if it is rounded to nearest: an element far below its block's largest is rounded to
zero at every step, and what never arrives is never learned. Two remedies, each an argument: to round
stochastically, so that the expected gradient is the true one at the price of noise; or to remember what was
lost and to add it to the next gradient (error feedback), so that nothing is lost but time, at the price of
memory: a number an element.

See `_compressed_round` for the equation, `_compressed_layout` for who sums what, `_compressed_wire` for the
bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed._compressed_hook import CompressedAllReduce, Exempt, is_integer
from narrowgauge.distributed._compressed_memory import Memory
from narrowgauge.distributed._compressed_wire import Wire
from narrowgauge.formats import codebook as named_codebook
from narrowgauge.formats._codebooks import checked, known
from narrowgauge.formats._rounding import Rounding


def compressed_allreduce_hook(
    codebook: str | Tensor = "dynamic",
    error_feedback: bool = True,
    rounding: Rounding = "nearest",
    *,
    bits: int | None = None,
    block_size: int = 256,
    min_compressed_size: int = 4096,
    exempt: Exempt | None = None,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    memory_dtype: torch.dtype = torch.float32,
) -> CompressedAllReduce:
    """A communication hook that averages gradients over ranks by way of block-wise codes.

    Register it before the first backward pass, one hook for each DistributedDataParallel, with the same
    arguments on all ranks. Two ways to type the same thing::

        ddp.register_comm_hook(*compressed_allreduce_hook())
        ddp.register_comm_hook(state=None, hook=compressed_allreduce_hook())

    Args:
        codebook: what codes mean, by name (see `formats.codebook_names`; ``"linear"`` is int8), or ascending
            values such as ``formats.codebook("dynamic", bits=4)``. With at most 16 values a code takes half a byte
            on the wire, else one.
        error_feedback: whether each rank remembers what its messages lost, and adds it to its next gradients.
        rounding: ``"nearest"``, or ``"stochastic"``: unbiased with codebooks that have a -1 (``"linear"``). The
            dynamic map has none; what lies below its first value (mirrored where a block's extremum is negative)
            is rounded to that value.
        bits: width of the named codebook, 8 if None; it must be None beside values.
        block_size: elements a scale serves, along each parameter; a multiple of 4.
        min_compressed_size: parameters with fewer elements are exempt: all-reduced as they are, in their own dtype.
        exempt: a function that says of a parameter whether it is exempt as well; if None, those of one dimension
            or none are (norms and biases).
        process_group: must be that of the DistributedDataParallel; the default group if None.
        seed: of stochastic rounding.
        memory_dtype: of what is remembered: float32, or bfloat16 for half of the bytes (its rounding is lost).

    Returns:
        The hook.

    Raises:
        ValueError: for an argument outside of what is said here.

    Gradients are those of float32, bfloat16 and float16; of other dtypes they are exempt. All ranks get the
    same bits. With one rank nothing is compressed. A block that holds an infinity or NaN on any rank comes back
    as NaN on all, so that optimizers and scalers that skip such steps do so.

    Source: see `CompressedAllReduce`.
    """
    values = _values(codebook, bits)
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback: got {error_feedback!r}, takes True or False")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding: got {rounding!r}, takes 'nearest' or 'stochastic'")
    if not is_integer(block_size) or block_size < 4 or block_size % 4:
        raise ValueError(f"block_size: got {block_size!r}, takes a multiple of 4")
    for name, number in (("min_compressed_size", min_compressed_size), ("seed", seed)):
        if not is_integer(number) or number < 0:
            raise ValueError(f"{name}: got {number!r}, takes an integer of at least 0")
    if exempt is not None and not callable(exempt):
        raise ValueError(f"exempt: got {exempt!r}, takes a function of a parameter, or None")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group: got {process_group!r}, takes a process group that this rank is in, or None"
        )
    if memory_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"memory_dtype: got {memory_dtype!r}, takes torch.float32 or torch.bfloat16")
    wire = Wire(values, block_size, rounding, seed)
    memory = Memory(memory_dtype) if error_feedback else None
    name = codebook if isinstance(codebook, str) else f"{len(values)} values"
    return CompressedAllReduce(name, wire, memory, exempt or _is_vector, min_compressed_size, process_group)


def _values(codebook: str | Tensor, bits: int | None) -> Tensor:
    """The values of the argument `codebook`, checked, on the host."""
    if isinstance(codebook, str):
        return named_codebook(known(codebook), signed=True, bits=8 if bits is None else bits)
    if not isinstance(codebook, Tensor):
        raise ValueError(f"codebook: got {codebook!r}, takes a name such as 'dynamic' or a tensor of values")
    if bits is not None:
        raise ValueError(f"bits: got {bits!r} beside a codebook of values, takes None")
    values = checked(codebook.detach()).cpu()
    if values[0] >= 0:
        raise ValueError("codebook: got values without negative ones, takes those of a signed codebook")
    return values


def _is_vector(parameter: Tensor) -> bool:
    return parameter.dim() <= 1
