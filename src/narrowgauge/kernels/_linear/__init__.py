"""Kernels of the linear layers: quantizers at the speed of a copy, and a matrix multiply that undoes the scales.

A layer in eight bits wins time in its multiplies, which are twice as fast as in bf16, and loses it wherever a
matrix is read once more than it must be. So each operand is read once where its scales are by row (`_rows`),
twice where they need an absmax over more (`_tiles`); codes go out in the order that the multiply reads, both
orders from one pass where two multiplies differ; and the bias gradient, the sums of the columns of G, is taken
from the pass that reads G anyway.

Both operands of a multiply (`_multiply`) lie with the summed side contiguous, as the tensor cores of Hopper want
them in eight bits. Which kernel, with which tile, or whether cuBLAS, is a `Way`: a table has the defaults
(`_ways`), and measuring on one's own GPU (`_tuning`) overrides it.
"""
