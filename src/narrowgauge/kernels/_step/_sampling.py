# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
"""Which programs of a step measure what they do, when not all of them do.

A kernel that measures has a quarter more instructions and twice the registers. So two kernels share a step: of the
programs of long tensors one in sixteen measures, another one at every step, and of short tensors all do. A tensor's
sums are then scaled up by its elements over those measured.

Programs of short tensors come first. `turns` holds, in int32, how many these are, and how many there are in all.
Whose turn it is follows from the first tensor's count of steps, which a captured graph finds on the device, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SAMPLE = 16
SAMPLE = tl.constexpr(_SAMPLE)


def long(elements: int, each: int) -> bool:
    """Whether some of a tensor's programs measure for all of them.

    Args:
        elements: of the tensor.
        each: of a program.
    """
    return elements > (_SAMPLE - 1) * each


def grids(short: int, programs: int) -> tuple[int, int]:
    """How many programs may measure, and how many may be left to the other kernel: some find nothing to do.

    Args:
        short: programs of short tensors.
        programs: all programs.
    """
    rest = programs - short
    return short - (-rest // _SAMPLE), rest - rest // _SAMPLE


@triton.jit
def _turn(steps):
    return tl.maximum(tl.load(steps), 0) % SAMPLE


@triton.jit
def sampled_program(turns, steps):
    """The program that this one is, of those that measure."""
    number, short = tl.program_id(0), tl.load(turns)
    return tl.where(number < short, number, short + (number - short) * SAMPLE + _turn(steps))


@triton.jit
def other_program(turns, steps):
    """The program that this one is, of those that do not."""
    number, others = tl.program_id(0), SAMPLE - 1
    return tl.load(turns) + number + number // others + (number % others >= _turn(steps)).to(tl.int32)


@triton.jit
def is_sampled(program, turns, steps):
    short = tl.load(turns)
    return (program < short) | ((program - short) % SAMPLE == _turn(steps))


@triton.jit
def scale(first, elements, turns, steps, EACH: tl.constexpr):
    """A tensor's elements over those measured, in float64.

    Args:
        first: its first program.
        elements: how many it has.
        turns, steps: see above.
        EACH: elements a program.
    """
    short = tl.load(turns)
    programs = ((elements + EACH - 1) // EACH).to(tl.int32)
    last = first + programs - 1
    measured = (_before(last + 1, short, steps) - _before(first, short, steps)).to(tl.int64) * EACH
    measured -= tl.where(is_sampled(last, turns, steps), programs.to(tl.int64) * EACH - elements, 0)
    some = (first >= short) & (measured > 0)
    return tl.where(some, elements.to(tl.float64) / tl.maximum(measured, 1).to(tl.float64), 1.0)


@triton.jit
def _before(program, short, steps):
    """How many programs of long tensors before one measure."""
    return tl.maximum(program - short - _turn(steps) + SAMPLE - 1, 0) // SAMPLE
