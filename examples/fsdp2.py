"""FSDP2: a small GPT in shards, its 24-bit weights and 8-bit states sharded with it, one checkpoint of all ranks.

    torchrun --nproc-per-node 8 examples/fsdp2.py --text mine.txt
    python examples/fsdp2.py --smoke     # seconds on a CPU, in one process

Started again, it goes on from its last checkpoint, on any number of ranks. Guide: docs/guides/fsdp2.md
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng


class GPT(nn.Module):
    """Reads bytes: an embedding, causal blocks, an output layer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        block = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 8, **block) for _ in range(depth))
        self.output = nn.Linear(width, 256)

    def forward(self, ids):
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device, x.dtype)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.output(x).float()


parser = argparse.ArgumentParser()
parser.add_argument("--text", help="a text file", required="--smoke" not in sys.argv)
parser.add_argument("--out", default="fsdp2-run", help="a folder that all ranks see")
parser.add_argument("--smoke", action="store_true")
given = parser.parse_args()

device = "cuda" if torch.cuda.is_available() and not given.smoke else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if given.smoke:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
else:
    dist.init_process_group()  # as torchrun says: NCCL for GPUs, gloo for CPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
text = b"a made text. " * 200 if given.smoke else Path(given.text).read_bytes()
length, width, depth, steps = (32, 64, 2, 10) if given.smoke else (256, 512, 8, 2000)
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
rows = tokens[: len(tokens) // length * length].view(-1, length)

# Cast, shard, make the optimizer: in this order.
torch.manual_seed(0)
model = GPT(width, depth).to(device, torch.bfloat16)
mesh = init_device_mesh(device, (ranks,))
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
optimizer = ng.optim.AdamW8bit(ng.optim.split_decay(model, 0.1), lr=1e-3, max_grad_norm=1.0)

step = 0
path = ng.distributed.latest_checkpoint(given.out)
if path is not None:
    step, _ = ng.distributed.load_checkpoint(path, model=model, optimizer=optimizer)
while step < steps:
    step += 1
    torch.manual_seed(step * ranks + rank)  # each rank draws rows of its own
    batch = rows[torch.randint(len(rows), (8,))].to(device)
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % (steps // 5) == 0:
        ng.distributed.save_checkpoint(given.out, model=model, optimizer=optimizer, step=step)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradients' norm {optimizer.grad_norm.item():.3f}")
dist.destroy_process_group()
