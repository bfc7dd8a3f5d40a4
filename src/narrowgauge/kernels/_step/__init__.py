"""The optimizer's step as one Triton launch over a whole list of tensors, written from a rule's graph.

A step is bound by memory only if it is one pass over it and its arithmetic fits in the time that the bytes take: on
an H200 some 69 instructions an element where 10 bytes move. So there is one kernel an equation and a choice of
storages, and it is *written*: the equation as straight-line code from its recorded graph (`_expressions`), around
calls (`_codecs`) of the functions that read and write weights (`_weights`) and moments (`_log_states`,
`_codebooks`), which exist once for all rules. A storage's own text may bring more of them.

How a launch is laid out (`_source`): a table in device memory has one row a tensor, with addresses, length and the
number of its first program; a program looks up which tensor it belongs to and works on one *tile* of it, some whole
blocks. Scalars are not the host's: how many steps a parameter has taken is known to the device only, where a step
may have been skipped. A small kernel before it counts, works out the rule's scalars in double precision and leaves
a row of float32 numbers a tensor.
"""
