"""The few lines of assembly say what the integers beside them do: run here by hand, instruction by instruction."""

from __future__ import annotations

import random
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from narrowgauge.kernels._step._float8_weights import APART, BESIDE, UP
from narrowgauge.kernels._step._floats import UPPER
from narrowgauge.kernels._step._packing import BYTES, CUT, NUMBERS, OFFSETS, PACK, PACK_UPPER

MASK = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """PTX's permute in its default mode: each nibble picks a byte of b and a, or, at 8 and above, its sign."""
    pool, out = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")], 0
    for place in range(4):
        nibble = selector >> 4 * place & 0xF
        byte = pool[nibble & 7]
        out |= (byte if nibble < 8 else 0xFF * (byte >> 7)) << 8 * place
    return out


def run(assembly: str, inputs: list[int], outputs: int) -> list[int]:
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in re.sub(r"\{ \.reg [^;]*;|\}", "", assembly).split(";"):
        if not line.strip():
            continue
        op, target, *operands = line.replace(",", " ").split()
        x = [value(operand) for operand in operands]
        match op.split(".")[0]:
            case "shl":
                registers[target] = x[0] << x[1] & MASK
            case "and":
                registers[target] = x[0] & x[1]
            case "xor":
                registers[target] = x[0] ^ x[1]
            case "add":
                registers[target] = x[0] + x[1] & MASK
            case "prmt":
                registers[target] = prmt(*x)
            case _:
                raise NotImplementedError(op)
    return [registers[f"${i}"] for i in range(outputs)]


def signed(byte: int) -> int:
    return byte - 256 if byte >= 128 else byte


def test_assembly_is_what_the_integers_say() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        word = [generator.randrange(256) for _ in range(4)]
        packed = int.from_bytes(bytes(word), "little")
        assert run(UPPER.value, [packed], 2) == [(packed & 0xFFFF) << 16, packed & 0xFFFF0000]
        assert run(BYTES.value, [packed], 4) == word
        assert run(NUMBERS.value, [packed], 4) == [(b ^ 0x80) | 0x4B000000 for b in word]
        assert run(OFFSETS.value, [packed], 4) == [signed(b) << 8 & MASK for b in word]
        bits = [generator.randrange(1 << 32) for _ in range(4)]
        assert run(PACK.value, bits, 1) == [int.from_bytes(bytes(b & 0xFF for b in bits), "little")]
        assert run(PACK_UPPER.value, bits, 1) == [int.from_bytes(bytes(b >> 16 & 0xFF for b in bits), "little")]
        both = [b + 0x8080 & MASK for b in bits]
        first, second, low = run(CUT.value, bits, 3)
        assert [first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16] == [b >> 16 for b in both]
        assert list(low.to_bytes(4, "little")) == [(b >> 8 & 0xFF) ^ 0x80 for b in both]
        beside = run(BESIDE.value, [packed, bits[0]], 4)
        lows = bits[0].to_bytes(4, "little")
        assert [b >> 16 for b in beside] == [code << 8 | byte ^ 0x80 for code, byte in zip(word, lows, strict=True)]
        assert run(UP.value, [bits[0]], 1) == [bits[0] >> 8 & 0xFF00 | 0x800080]
        codes, low = (number.to_bytes(4, "little") for number in run(APART.value, bits, 2))
        assert list(codes) == [b >> 24 for b in bits]
        assert list(low) == [b >> 16 & 0xFF ^ 0x80 for b in bits]
