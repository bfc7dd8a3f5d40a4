"""Kernels of the linear layers: quantizers at the speed of a copy, and a matrix multiply that undoes the scales.

A layer in eight bits saves time in its multiplies, which are twice as fast as in bf16, and loses it wherever a
matrix is read once more than necessary. So each operand is read once where its scales are by row (`_rows`),
twice where they need an absmax over more (`_tiles`); codes go out in the order that the multiply reads, both
orders from one pass where two multiplies differ; and the bias gradient, the sums of the columns of G, is taken
from the pass that reads G anyway.

Both operands of a multiply (`_multiply`) lie with the summed side contiguous, as the tensor cores of Hopper X
"""
