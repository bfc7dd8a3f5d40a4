"""Random bits without a state: Philox 4x32-10.

Stochastic rounding needs fresh random bits for every parameter at every step, the same on the CPU and in a
GPU kernel, whole or sharded, in a run that never stopped and in one that resumed. A counter-based generator
gives that: the bits are a pure function of a key (seed, stream) and a counter (element, step), so there is
nothing to save and nothing to keep in step.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and the ten rounds
are those of the paper, and `philox` is tested against its published known answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox 4x32-10 on tensors.

    Args:
        counter: four int64 tensors that broadcast together, each holding 32-bit unsigned values.
        key: two 32-bit unsigned values.

    Returns:
        Four int64 tensors of uniform 32-bit unsigned values.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64; shifting right and masking still reads their upper half exactly.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_bits(
    count: int,
    *,
    seed: int,
    stream: int,
    step: int | Tensor,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniform 32-bit words, one an element, a pure function of the arguments.

    Element i takes word ``i % 4`` of the Philox block with counter ``(i // 4, step)``: one block serves four
    neighbors, so a kernel pays the ten rounds once for four elements.

    Args:
        count: how many words.
        seed, stream: the key; the optimizer's seed and the parameter's index.
        step: the optimizer step, an int or a 0-d tensor on `device` (then nothing is synchronized).
        offset: the index of the first element, for shards of a longer tensor.
        device: where the words are made.

    Returns:
        An int64 tensor of shape (count,) with values in [0, 2^32).

    Raises:
        ValueError: for a negative count or offset, or a step of more than one number.
    """
    if count < 0 or offset < 0:
        raise ValueError(f"count and offset must be at least 0, got {count} and {offset}")
    if isinstance(step, Tensor) and (step.numel() != 1 or step.is_complex()):
        raise ValueError(f"step must be one number, got {step.dtype} of shape {tuple(step.shape)}")
    first = offset // 4
    blocks = torch.arange(first, (offset + count + 3) // 4, dtype=torch.int64, device=device)
    step = torch.as_tensor(step, device=device).to(torch.int64)
    counter = (blocks & _MASK, blocks >> 32, step & _MASK, step >> 32)
    words = torch.stack(philox(counter, (seed & _MASK, stream & _MASK)), dim=-1)
    return words.reshape(-1)[offset - 4 * first :][:count]


def random_halves(
    count: int,
    *,
    seed: int,
    stream: int,
    step: int | Tensor,
    purpose: int,
    device: torch.device,
    offset: int = 0,
) -> Tensor:
    """Uniform 16-bit numbers, one an element: element i takes half ``i % 2``, the lower first, of word ``i // 2``.

    Args:
        count: how many.
        seed, stream, step, device: as for `random_bits`.
        purpose: what they are for: sequences of different purposes are independent of each other. Purpose 0 has
            the bits of `random_bits`. It is the upper half of the step's counter.
        offset: the index of the first element, an even number.

    Returns:
        An int32 tensor of shape (count,) with values in [0, 2^16).
    """
    if isinstance(step, Tensor):
        step = step.to(torch.int64)  # a float32 or int32 would lose the purpose
    later = step + (purpose << 32)
    words = random_bits((count + 1) // 2, seed=seed, stream=stream, step=later, offset=offset // 2, device=device)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).reshape(-1)[:count].to(torch.int32)
