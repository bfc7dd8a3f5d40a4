"""The largest count whose peak fits, found with few looks.

A peak grows with the batch nearly along a line, and with the sequence along a line as well where attention is
fused; the cosines of a contrastive loss bend it, as they grow with the batch's square. So the next count to look
at is where the line through the last two crosses the memory; between what fits and what does not there is always
one more look, so a wrong guess costs a look and no correctness.
"""

from __future__ import annotations

from collections.abc import Callable


def largest(peak: Callable[[int], float], memory: float, limit: int, start: int = 1) -> int:
    """The largest count from `start` to limit with `peak(count) <= memory`, for a peak that does not fall.

    One less than `start` if that does not fit.
    """
    low, low_peak = start, peak(start)
    if low_peak > memory:
        return start - 1
    high, high_peak = 2 * start, 0.0
    while True:
        if low == limit:
            return limit
        high = min(high, limit)
        high_peak = peak(high)
        if high_peak > memory:
            break
        slope = (high_peak - low_peak) / (high - low)
        low, low_peak = high, high_peak
        # A little beyond the crossing, so that the next look is on the other side of it.
        guess = low + 1 + int(1.02 * (memory - low_peak) / slope) if slope > 0 else limit
        high = max(low + 1, min(guess, 64 * low))
    # How far each end is from the memory. The end that stays is taken for half as far each time, so that a curve
    # cannot keep the looks on one side: the Illinois rule.
    below, above, last = memory - low_peak, high_peak - memory, 0
    while high - low > 1:
        share = below / (below + above)
        middle = min(max(low + int(share * (high - low)), low + 1), high - 1)
        there = peak(middle)
        if there <= memory:
            low, below = middle, memory - there
            above = above / 2 if last == 1 else above
            last = 1
        else:
            high, above = middle, there - memory
            below = below / 2 if last == -1 else below
            last = -1
    return low
