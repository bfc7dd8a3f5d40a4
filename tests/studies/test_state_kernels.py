"""The kernels whose instructions are counted do what the library does: a step of AdamW, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

STUDIES = Path(__file__).resolve().parents[2] / "studies"
# A process of its own: Triton decides between compiler and interpreter when a function is defined.
STEPS = """
import itertools
import sys

import torch

sys.path.append(sys.argv[1])
from studies.state_codecs import kernels

from narrowgauge.storage import StateContext, state_storage



class Codes:
    # A storage's codes one a byte, and the numbers of its blocks.

    def __init__(self, bits, signed):
        self.bits, self.signed = bits, signed
        self.storage = state_storage(f"log{bits}").for_slot(signed, True)

    def encode(self, x, v, width, random=None):
        tensors = self.storage.encode(x, StateContext(x.shape, self.signed, width, v), random)
        self.tensors = tensors
        return self.storage.codes(tensors, x.shape), tensors["scales" if self.signed else "ranges"]

    def decoded(self, shape, v, width):
        return self.storage.decode(self.tensors, StateContext(shape, self.signed, width, v))


BITS = {"log8": 8, "log4": 4, "relative": 8, "e2m1": 4}


def check(m_kernel, v_kernel, random, decades):
    m_codes, v_codes = Codes(BITS[m_kernel], True), Codes(BITS[v_kernel], False)
    blocks, width = 8, 256
    generator = torch.Generator().manual_seed(0)
    scale = 10 ** (-decades * torch.rand(blocks, width, generator=generator)) / 100
    m, g = (scale * torch.randn(blocks, width, generator=generator) for _ in range(2))
    v = (scale * torch.randn(blocks, width, generator=generator)).square()
    for x in (m, v, g):
        x[0], x[1, 1:], x[2, ::3] = 0, 0, 0
    g[3] = 0
    bits = torch.randint(0, 1 << 16, (blocks, width), generator=generator, dtype=torch.int32)
    weight = torch.randn(blocks, width, generator=generator)
    v_code, words = v_codes.encode(v, None, width)
    v = v_codes.decoded(v.shape, None, width)
    m_code, scales = m_codes.encode(m, v, width)
    m = m_codes.decoded(m.shape, v, width)

    def step(weight, m, v, numbers, how):
        kernels._step[(blocks,)](
            weight, g, m, v, numbers, bits.to(torch.uint16), numbers, 1e-3, 0.9, 0.999, 1e-8, 9.0, N=width,
            **kernels.constants_of(how),
        )

    # What the library does, but for the averages, which any order of rounding may make.
    first, second = m.clone(), v.clone()
    step(weight.clone(), first, second, torch.zeros(blocks, 4), (None, None, "", False, False))
    torch.testing.assert_close(first, 0.9 * m + 0.1 * g)
    torch.testing.assert_close(second, 0.999 * v + 0.001 * g * g)
    v_new, words_new = v_codes.encode(second, None, width, bits if random else None)
    kept = v_codes.decoded(v.shape, None, width)
    m_new, scales_new = m_codes.encode(first, kept, width)
    handed = first - m_codes.decoded(m.shape, kept, width)
    expected = weight - 1e-3 * (first + 9 * handed) / (second.sqrt() + 1e-8)

    numbers = torch.zeros(blocks, 4)
    numbers[:, 0], ranges = scales, numbers[:, 2 : 2 + words[0].numel()].view(torch.int32)
    ranges.copy_(words.view(blocks, -1))
    step(weight, m_code, v_code, numbers, (m_kernel, v_kernel, "shift", True, random))
    assert torch.equal(ranges, words_new.view(blocks, -1))
    assert torch.equal(v_code, v_new)
    assert torch.equal(numbers[:, 0], scales_new)
    assert torch.equal(m_code, m_new)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


for how in itertools.product(("relative", "e2m1"), ("log8", "log4"), (False, True), (0.0, 6.0)):
    print(*how, flush=True)
    check(*how)
"""


@pytest.mark.slow
def test_a_step_is_the_librarys() -> None:
    """Codes and their blocks' numbers to the bit, in 8 and 4 bits, to nearest and by chance, narrow and wide."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", STEPS, str(STUDIES)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
