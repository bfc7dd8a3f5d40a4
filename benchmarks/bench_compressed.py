"""Compressed gradients beside torch's all-reduce: time and bytes of a bucket, and from what bandwidth on they pay.

A bucket of gradients is reduced in several ways by 2 or more processes, on GPUs with NCCL, and on the CPU with gloo
where there are fewer GPUs than ranks. Times are taken of the compressed ways: the reduction; its local part, with
copies in the place of the collectives; on a GPU what the host needs to launch it; and each of its three passes
alone (the device's time), beside the bytes that it has to move, as a share of what a copy moves. A step of
DistributedDataParallel, forward and backward of some linear layers, shows what of it hides behind that.

The model: a rank that sends s bytes over a link of b bytes a second needs s / b. With the local part c of a
compressed reduction it pays where c + s8 / b < s16 / b, that is below b = (s16 - s8) / c. That is the bandwidth a
rank has for itself while all of them send, what NCCL's tests call the bus bandwidth; the figure of bf16's
all-reduce is what there is. For other numbers of ranks c is that of the passes.

    python benchmarks/bench_compressed.py [--ranks 2 4] [--json FILE] [--repeats 20] [--elements 1048576 ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _compressed_codec import codec_row, task_of
from _script import median, parser_for, save, wait
from torch import Tensor, nn

from narrowgauge import formats
from narrowgauge.cli._bench._timing import copy_speed
from narrowgauge.distributed import compressed_allreduce_hook

HOOKS: dict[str, dict[str, Any]] = {
    "8 bits": {"error_feedback": False},
    "8 bits, feedback": {},
    "8 bits, feedback in bf16": {"memory_dtype": torch.bfloat16},
    "8 bits linear, feedback": {"codebook": "linear"},
    "8 bits, stochastic": {"error_feedback": False, "rounding": "stochastic"},
    "4 bits, feedback": {"codebook": formats.codebook("dynamic", bits=4)},
}
PLAIN = {"all-reduce fp32": torch.float32, "all-reduce bf16": torch.bfloat16}
GPU = (1 << 20, 1 << 22, 12_500_000, 1 << 26)  # 12.5 million bf16 gradients are DDP's default bucket of 25 MB
CPU = (1 << 16, 1 << 18, 1 << 20)


class Bucket:
    """What DistributedDataParallel hands to a hook, alone in its step: matrices with 1024 columns."""

    def __init__(self, elements: int, device: torch.device) -> None:
        rows = max(1, elements // 1024)
        shares = [rows] if rows < 8 else [rows // 2, rows // 4, rows - rows // 2 - rows // 4]
        self._parameters = [torch.empty(share, 1024, device="meta", dtype=torch.bfloat16) for share in shares]
        self._buffer = torch.randn(rows * 1024, device=device).to(torch.bfloat16)

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@contextmanager
def copies() -> Iterator[None]:
    """Copies of this rank's own messages in the place of collectives."""
    work = SimpleNamespace(wait=lambda: None)

    def exchange(received: Tensor, sent: Tensor, **_: Any) -> Any:
        received.view(-1, sent.numel()).copy_(sent)
        return work

    names = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single")
    with ExitStack() as patches:
        for name in names:
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, exchange))
        yield


def timed(call: Callable[[], Any], repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds a call, the median, of the slowest rank; on a GPU those of the host too."""
    for _ in range(3):
        call()
    found, host = [], []
    for _ in range(repeats):
        wait(device)
        dist.barrier()
        wait(device)
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        wait(device)
        found.append(time.perf_counter() - start)
    both = torch.tensor([median(found), median(host)], device=device) * 1e3
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    ms, host_ms = both.tolist()
    return {"ms": ms, "host_ms": host_ms} if device.type == "cuda" else {"ms": ms}


def bucket_rows(elements: int, repeats: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """All ways of reducing a bucket."""
    ranks = dist.get_world_size()
    rows: dict[str, dict[str, Any]] = {}
    for name, dtype in PLAIN.items():
        x = torch.randn(elements // 1024 * 1024, device=device).to(dtype)
        row: dict[str, Any] = timed(lambda x=x: dist.all_reduce(x.mul_(1 / ranks)), repeats, device)
        row["bytes"] = 2 * (ranks - 1) * x.nbytes // ranks
        row["GB/s"] = row["bytes"] / row["ms"] / 1e6
        rows[name] = row
    sent, copied = rows["all-reduce bf16"]["bytes"], copy_speed(device)
    rows["copy"] = {"GB/s": copied / 1e9}
    for name, options in HOOKS.items():
        bucket: Any = Bucket(elements, device)
        hook = compressed_allreduce_hook(**options)

        def reduce(hook: Any = hook, bucket: Any = bucket) -> None:
            hook(None, bucket).wait()

        row = timed(reduce, repeats, device)
        with copies():
            local = timed(reduce, repeats, device)
        row |= {"local_ms": local["ms"], "bytes": hook.bytes_sent, "memory_bytes": hook.memory_bytes()}
        row["share of bf16"] = hook.bytes_sent / sent
        row["pays below GB/s"] = (sent - hook.bytes_sent) / local["ms"] / 1e6
        row["times bf16's"] = row["ms"] / rows["all-reduce bf16"]["ms"]
        row["codec"] = codec_row(task_of(hook, bucket, ranks), copied, repeats, device)
        rows[name] = row
    return rows


def step_rows(
    width: int, layers: int, batch: int, repeats: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Forward and backward passes of DistributedDataParallel, gradients in bf16."""
    rows = {}
    for name, options in {"alone": None, "DDP": {}, **HOOKS}.items():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device, torch.bfloat16)
        model: nn.Module = net
        if options is not None:
            model = nn.parallel.DistributedDataParallel(net)
            if name in HOOKS:
                model.register_comm_hook(*compressed_allreduce_hook(**options))
        x = torch.randn(batch, width, device=device).to(torch.bfloat16)

        def step(model: nn.Module = model, x: Tensor = x) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        rows[name] = timed(step, repeats, device)
    return rows


def on_a_rank(rank: int, folder: str, ranks: int, args: argparse.Namespace) -> None:
    device = torch.device("cuda", rank) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if args.cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if args.cuda else "CPU, a thread a rank",
        "torch": torch.__version__, "ranks": ranks, "backend": dist.get_backend(), "buckets": {},
    }  # fmt: skip
    for elements in args.elements:
        rows = results["buckets"][str(elements)] = bucket_rows(elements, args.repeats, device)
        show(f"a bucket of {elements:,} gradients, {ranks} ranks", rows, rank)
    layers, width, batch = (24, 4096, 2048) if args.cuda else (4, 256, 64)
    rows = step_rows(width, layers, batch, args.repeats, device)
    results["step"] = {"layers": layers, "width": width, "batch": batch, "rows": rows}
    show(f"forward and backward, {layers} layers of {width} x {width}, batch {batch}", rows, rank)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def show(title: str, rows: dict[str, dict[str, Any]], rank: int) -> None:
    if rank:
        return
    print(f"\n{title}", flush=True)
    for name, row in rows.items():
        for part, shown in ((name, row), ("  of that the passes", row.get("codec", {}))):
            cells = (
                f"{key} {value:,.0f}" if key.endswith("bytes") else f"{key} {value:.4g}"
                for key, value in shown.items()
                if key != "codec"
            )
            if shown:
                print(f"  {part:26}" + ", ".join(cells), flush=True)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--elements", type=int, nargs="*", help="of a bucket")
    args = parser.parse_args()
    args.cuda = torch.cuda.device_count() >= max(args.ranks)
    args.elements = args.elements or (GPU if args.cuda else CPU)
    found = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(on_a_rank, (folder, ranks, args), nprocs=ranks)
            found.append(json.loads((Path(folder) / "results.json").read_text()))
    command = f"python benchmarks/bench_compressed.py --ranks {' '.join(map(str, args.ranks))}"
    device = found[0]["device"]
    save(args.json, {"command": command, "device": device, "torch": torch.__version__, "runs": found})


if __name__ == "__main__":
    sys.exit(main())
