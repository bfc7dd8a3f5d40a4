"""A state storage of your own in eager torch: a second moment in 16 bits, as the fp16 numbers of its root.

    python examples/own_storage.py             # 1000 steps
    python examples/own_storage.py --smoke     # 100

fp16 reaches down to 2^-24, and the square of that is 2^-48. Guide: docs/add_a_storage.md, with kernels too.
"""

import sys

import torch

import narrowgauge as ng


class Root16(ng.storage.StateStorage):
    """One float16 word an element; `init` and `nbytes` follow from the dtype."""

    def codec(self, signed):
        return None  # no kernels: eager torch takes the step

    def encode(self, moment, context, random=None):
        return {"": moment.clamp_min(0).sqrt().clamp_max(65504).half()}

    def decode(self, tensors, context):
        return tensors[""].float().square()


ng.storage.register_state("root16", Root16("root16", torch.float16, rounded=False))


def train(states, steps):
    """Train a small model on made data; the model, its optimizer and the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
    optimizer = ng.optim.AdamW(model.named_parameters(), lr=1e-3, states=states)
    for _ in range(steps):
        x = torch.randn(64, 32)
        loss = (model(x) - x.roll(1, 1).relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, loss.item()


steps = 100 if "--smoke" in sys.argv else 1000
wide, wide_loss = train("fp32", steps)
mine, loss = train({"m": "log8", "v": "root16"}, steps)
print(mine.describe())
print(f"loss {loss:.4f}, with fp32 states {wide_loss:.4f}")
print(f"{mine.state_bytes():,} bytes of states, with fp32 {wide.state_bytes():,}")
