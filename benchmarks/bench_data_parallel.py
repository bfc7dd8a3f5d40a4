"""Training on several GPUs of one host: tokens a second, bytes held and sent, by how processes train together.

Every process has its share of each step's windows, of random tokens, and a whole model (DDP) or a shard of it
(FSDP2). `alone` is the same step without anybody: what the others are to come near. Rows of torch's AdamW, fused
and on bf16 weights, say what of the time is torch's engine. Times are the slowest process's. Beside each step: what
a process holds in weights, gradients and states, and its peak; what its collectives sent in one step; and a
checkpoint's bytes and seconds. `studies/scale.py` sets its calculation beside these. With `--compile` each block of
the model is compiled, in every row.

All rows are made first. Then they are timed in turns, since a host changes within minutes; `step_ms` is the median
round, `step_ms_range` the least and the greatest. What a step sends is counted last: once a compiled block has run
under a mode that counts, torch runs it eagerly ever after.

    torchrun --nproc-per-node 4 benchmarks/bench_data_parallel.py [--model gpt2-medium] [--compile] [--json FILE]
"""

from __future__ import annotations

import copy
import functools
import itertools
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from _script import MODES, median, parser_for, save, slowest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge import formats
from narrowgauge.distributed import compressed_allreduce_hook, save_checkpoint
from narrowgauge.recipes._parallel import units
from narrowgauge.trainers import TrainSettings, _build
from narrowgauge.trainers._build import Parts, build_parts
from narrowgauge.trainers._models import next_token_loss
from narrowgauge.trainers._parallel import ALONE, ProcessGroup, own_device

RECIPE = "adamw8bit-split8"
TORCHS = ", torch's AdamW"  # ends the names of rows whose optimizer is torch's
STEPS = 3  # timed together
BUCKET = 2**27  # elements of the all-reduce that says how fast the link is; on a CPU 2^20

# Name: settings that differ (how processes train together, or each alone), what gradients travel as.
SWITCHBACK = "SWITCHBACK:e4m3"
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "alone": ({}, None),
    "DDP": ({"parallel": "ddp"}, None),
    f"DDP{TORCHS}": ({"parallel": "ddp", "recipe": "bf16"}, None),
    "DDP, 8-bit codes": ({"parallel": "ddp"}, {}),
    "DDP, 4-bit codes": ({"parallel": "ddp"}, {"codebook": formats.codebook("dynamic", bits=4)}),
    "DDP, SwitchBack": ({"parallel": "ddp", "linear": SWITCHBACK}, None),
    "FSDP": ({"parallel": "fsdp"}, None),
    f"FSDP{TORCHS}": ({"parallel": "fsdp", "recipe": "bf16"}, None),
    "FSDP, option D": ({"parallel": "fsdp", "recipe": "master"}, None),
    "FSDP, SwitchBack": ({"parallel": "fsdp", "linear": SWITCHBACK}, None),
}


def local(tensor: Any) -> Tensor:
    """What lies here of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held_bytes(parts: Parts) -> int:
    """Weights, gradients and states of this process, as they lie between backward pass and step."""
    weights = [local(p.detach()) for p in parts.model.parameters()]
    gradients = [local(p.grad) for p in parts.model.parameters() if p.grad is not None]
    return sum(t.nbytes for t in (*weights, *gradients)) + state_bytes(parts.optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What an optimizer keeps of parameters; torch's counters of steps aside."""
    if hasattr(optimizer, "state_bytes"):
        return int(optimizer.state_bytes())
    tensors = (local(t) for state in optimizer.state.values() for name, t in state.items() if name != "step")
    return sum(t.nbytes for t in tensors)


class Sent(TorchDispatchMode):
    """Counts what collectives send, as rings do, or every rank to every other."""

    TIMES: ClassVar[dict[str, tuple[int, int]]] = {  # how often around, and which argument
        "allreduce_": (2, 0), "_allgather_base_": (1, 0), "_reduce_scatter_base_": (1, 1), "alltoall_base_": (1, 1),
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            ranks = dist.get_world_size()
            times, place = self.TIMES[func._schema.name.removeprefix("c10d::")]
            moved = args[place] if isinstance(args[place], list) else [args[place]]
            self.bytes += times * (ranks - 1) / ranks * sum(tensor.nbytes for tensor in moved)
        return func(*args, **(kwargs or {}))


def bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes a second that a process sends in a large all-reduce, as a ring counts them."""
    x = torch.ones(BUCKET if device.type == "cuda" else 2**20, device=device, dtype=torch.bfloat16)
    ranks, seconds = dist.get_world_size(), slowest(lambda: dist.all_reduce(x), device, repeats) / 1e3
    return 2 * (ranks - 1) / ranks * x.nbytes / seconds


def made(
    name: str, settings: TrainSettings, vocabulary: int, device: torch.device, mode: str | None
) -> tuple[Callable[[], None], dict[str, Any], Callable[[], dict[str, Any]]]:
    """A row's step, what it holds, and a function that counts what it sends and writes a checkpoint."""
    changes, options = ROWS[name]
    cuda = device.type == "cuda"
    others = torch.cuda.memory_allocated(device) if cuda else 0
    together = "parallel" in changes
    team = ProcessGroup.of(settings) if together else ALONE
    ranks = dist.get_world_size()
    parts = build_parts(settings, vocabulary, device, team)
    if name.endswith(TORCHS):
        fused: Any = torch.optim.AdamW(parts.model.parameters(), 1e-4, fused=True)
        parts = replace(parts, optimizer=fused)
    if mode is not None:
        for block in itertools.chain(*units(parts.model)):
            block.forward = torch.compile(block.forward, dynamic=False, **MODES[mode])  # FSDP2's hooks stay outside
    hook = None
    if options is not None:
        hook = compressed_allreduce_hook(**options)
        parts.runs.register_comm_hook(None, hook)
    share = settings.batch // ranks
    windows = torch.randint(0, vocabulary, (share, settings.sequence + 1), device=device)

    def step() -> None:
        parts.optimizer.zero_grad()
        torch.autograd.backward(next_token_loss(parts.runs, windows))
        parts.optimizer.step()

    for _ in range(2):  # compiles; DDP puts its buckets in order
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    step()
    row = {
        "held_bytes": held_bytes(parts),
        "peak_bytes": torch.cuda.max_memory_allocated(device) - others if cuda else None,
        "feedback_bytes": 0 if hook is None else hook.memory_bytes(),
    }

    def counted() -> dict[str, Any]:
        with Sent() as sent:
            step()
        return {"sent_bytes": int(sent.bytes)} | (checkpoint(parts) if together else {})

    return step, row, counted


def checkpoint(parts: Parts) -> dict[str, Any]:
    """Seconds and bytes of a checkpoint of all, in memory where there is a folder for that."""
    with shared_folder() as folder:
        dist.barrier()
        begin = time.perf_counter()
        path = save_checkpoint(folder, model=parts.model, optimizer=parts.optimizer, step=1)
        dist.barrier()
        seconds = time.perf_counter() - begin
        size = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    return {"checkpoint_bytes": size, "checkpoint_seconds": seconds}


@contextmanager
def shared_folder() -> Iterator[str]:
    """One folder for all processes of this host."""
    ram = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=ram if ram.is_dir() else None) as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names, src=0)
        yield names[0]
        dist.barrier()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="gpt2-medium", help="preset of a causal model")
    parser.add_argument("--batch", type=int, default=8, help="windows of each process")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304, help="GPT-2's 50,257, padded to a multiple of 64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--compile", nargs="?", const="default", choices=("default", "cpp-wrapper"),
        help="compile each block: launched from Python, or from C++",
    )  # fmt: skip
    parser.add_argument("--only", help="comma-separated parts of names of rows")
    args = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    device = own_device(torch.device("cuda" if cuda else "cpu"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    results: dict[str, Any] = {
        "command": f"torchrun --nproc-per-node {ranks} benchmarks/bench_data_parallel.py --model {args.model} "
        f"--vocabulary {args.vocabulary}" + f" --compile {args.compile}" * (args.compile is not None),
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor(), "torch": torch.__version__,
        "ranks": ranks, "model": args.model, "batch": args.batch * ranks, "sequence": args.sequence,
        "bus_bytes_per_second": bandwidth(device, args.rounds), "rows": {},
    }  # fmt: skip
    given = {
        "model": args.model, "recipe": RECIPE, "batch": args.batch * ranks, "sequence": args.sequence,
        "gauges_every": 0,
    }  # fmt: skip
    # All rows begin with the same weights, which take longer to draw than a row to measure.
    _build.build_model = functools.partial(_copied, functools.cache(_build.build_model))
    torch._dynamo.config.recompile_limit = 2 * len(ROWS)  # rows share the code of a block
    steps: dict[str, Callable[[], None]] = {}
    counts: dict[str, Callable[[], dict[str, Any]]] = {}
    for name, (changes, _) in ROWS.items():
        if args.only and not any(part in name for part in args.only.split(",")):
            continue
        settings = TrainSettings(**(given | changes))
        steps[name], row, counts[name] = made(name, settings, args.vocabulary, device, args.compile)
        results["rows"][name] = {"recipe": settings.recipe, **row}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(slowest(lambda step=step: [step() for _ in range(STEPS)], device, 1, 1) / STEPS)
            ms = median(times[name])
            results["rows"][name] |= {
                "step_ms": ms, "step_ms_range": [min(times[name]), max(times[name])],
                "tokens_per_second": 1e3 * results["batch"] * args.sequence / ms,
            }  # fmt: skip
        if first:
            save(args.json, results)  # round by round: a call that is cut off leaves what it has
    for name, counted in counts.items():
        row = counted()
        results["rows"][name] |= row
        if first:
            each, cells = times[name], ", ".join(_said(*cell) for cell in row.items())
            print(f"{name:26}{median(each):.1f} ms ({min(each):.1f} to {max(each):.1f}), {cells}", flush=True)
    if first:
        save(args.json, results)
        model = build_parts(TrainSettings(**given), args.vocabulary, torch.device("cpu")).model
        results["shapes"] = [list(p.shape) for p in model.parameters()]
        layers = sum(p.numel() for block in itertools.chain(*units(model)) for p in block.parameters())
        results["outside_layers"] = sum(p.numel() for p in model.parameters()) - layers
        save(args.json, results)
    dist.destroy_process_group()
    return results


def _copied(build: Any, *arguments: Any, **options: Any) -> Any:
    return copy.deepcopy(build(*arguments, **options))


def _said(name: str, value: float) -> str:
    return f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.4g}"


if __name__ == "__main__":
    main()
