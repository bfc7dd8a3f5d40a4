"""One bucket's reduction, in three stages with a collective between each two.

    encode    every rank encodes its gradients, with what it remembers, and sends to each rank that rank's shard
    sum       every rank decodes the shards it got, adds them in float32, and sends the encoded sum to all
    finish    every rank decodes the same sums, so that all have the same bits, and remembers what it lost

With rows of a matrix for ranks, e_r for what rank r remembers and Q for quantizing, the result is

    mean = cast(Q(sum over r of Q(g_r + e_r)) / ranks),

and what a rank remembers next is g_r + e_r - Q(g_r + e_r): what its own codes lost. What the sum lost, sum minus
ranks times mean, is known to the rank that made the sum, which remembers it **in the same place**, for its own
shard: whose memory an error lies in makes no difference, since memories are added up. So one number an element
remembers the losses of both hops, of the cast to the gradients' dtype as well, and nothing that was taken out of
a gradient is ever gone:

    ranks * sum over steps of mean  +  sum over ranks of e  =  sum over steps and ranks of g.

Memories are written at the end, and not where a parameter's mean came out as not finite. Whoever skips it then,
skips all of it: the gradient is not applied, and nothing is remembered of it. A backward pass that dies leaves
them alone.

Sources: 1-bit SGD (Seide et al., 2014) and EF-SGD (Karimireddy et al., 2019) for remembering the error; the two
hops are those of 1-bit Adam (Tang et al., 2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed._compressed_layout import Layout
from narrowgauge.distributed._compressed_passes import Passes


def reduction(passes: Passes, layout: Layout, buffer: Tensor, group: Any) -> Iterator[None]:
    """The stages of a bucket: yields after the first and the second, with a collective under way.

    Args:
        passes: what is done between collectives with what is compressed.
        layout: of the bucket.
        buffer: the bucket's gradients, flat; the means in the end.
        group: the ranks; all run the stages of all buckets in one order.
    """
    spans, small, small_work = _start_exempt(layout, buffer, group)
    if layout.compressed:
        sent = passes.encode()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        yield

        work.wait()
        summed = passes.add(received)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
        # To where the messages were that have been summed.
        work = gather(received, summed, group=group, async_op=True)
        yield

        work.wait()
        passes.finish(received)
    else:
        yield
        yield
    if small_work is not None:
        small_work.wait()
        torch._foreach_copy_(spans, small.split_with_sizes([end - begin for begin, end in layout.spans]))


def _start_exempt(layout: Layout, buffer: Tensor, group: Any) -> tuple[list[Tensor], Tensor, Any]:
    """The gradients that travel as they are, their copy, and the work that sums it; None where there are none."""
    spans = [buffer[begin:end] for begin, end in layout.spans]
    if not spans:
        return spans, buffer, None
    # Divided before the sum, as torch does: in float16 the sum could overflow where the mean does not.
    small = (spans[0] if len(spans) == 1 else torch.cat(spans)).div(layout.ranks)
    return spans, small, dist.all_reduce(small, group=group, async_op=True)
