"""Equations as lines of a kernel: what is fused is written down, and nothing is worked out that nobody asks for."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")

from narrowgauge.kernels._graph import Node
from narrowgauge.kernels._step._expressions import lines

A, B, C, D = (Node("input", (name,)) for name in "abcd")
KNOWN = {A: "a", B: "b", C: "c", D: "d"}
AB, CD = Node("mul", (A, B)), Node("mul", (C, D))


def test_a_sum_with_a_product_is_rounded_once() -> None:
    for op, args, wanted in (
        ("add", (AB, C), ["x0 = tl.fma((a), (b), (c))"]),
        ("add", (C, AB), ["x0 = tl.fma((a), (b), (c))"]),
        ("sub", (AB, C), ["x0 = tl.fma((a), (b), -(c))"]),
        ("sub", (C, AB), ["x0 = tl.fma(-(a), (b), (c))"]),
        ("add", (AB, CD), ["x0 = (c) * (d)", "x1 = tl.fma((a), (b), (x0))"]),  # of two products the first
    ):
        assert lines([Node(op, args)], KNOWN, "x")[0] == wanted


def test_a_product_that_is_needed_besides_is_there() -> None:
    total = Node("add", (AB, C))
    made, names = lines([total, Node("mul", (AB, total))], KNOWN, "x")
    assert made == ["x0 = (a) * (b)", "x1 = tl.fma((a), (b), (c))", "x2 = (x0) * (x1)"]
    assert names[total] == "x1"


def test_what_is_known_or_in_double_precision_is_not_fused() -> None:
    assert lines([Node("add", (AB, C))], KNOWN | {AB: "ab"}, "x")[0] == ["x0 = (ab) + (c)"]
    wide = [Node("wide", (node,), double=True) for node in (A, B)]
    product = Node("mul", tuple(wide), double=True)
    made, _ = lines([Node("add", (product, wide[0]), double=True)], KNOWN, "x")
    assert made[-2:] == ["x2 = (x0) * (x1)", "x3 = (x2) + (x0)"]
    with pytest.raises(KeyError, match="d is not among"):
        lines([CD], {C: "c"}, "x")
