"""A training step with optimizer states on the CPU: milliseconds, and memory of the GPU and of the host.

The parameters are those of a model, in bf16. The backward pass makes each gradient by the two matrix products that
a linear layer takes, for so many tokens, last layer first, so that what can run beside it does. Measured are the
backward pass alone; backward pass and step; and the step after a backward pass whose transfers have ended. Beside
it are the same optimizer on the GPU, torch's fused AdamW, and torchao's CPUOffloadOptimizer where it is installed,
whose AdamW keeps weights and moments in bf16.

    python benchmarks/bench_offload.py --lists 1b 7b --json benchmarks/results/offload_h200.json
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _script import command, parser_for, save
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.cli._bench._rows import installed_version
from narrowgauge.cli._bench._timing import timed
from narrowgauge.trainers._environment import describe_environment, usable_cores

Make = Callable[[list[nn.Parameter]], Any]

# Layers, width, width of the feed-forward part, heads, heads of keys and values, vocabulary: LLaMA's.
LISTS: dict[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (2, 64, 128, 4, 4, 256),
    "1b": (22, 2048, 5632, 32, 4, 32000),
    "7b": (32, 4096, 11008, 32, 32, 32000),
}
STORAGES = [("plain", "bf16"), ("plain", "8bit"), ("split8", "8bit"), ("split", "fp32")]


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """The shapes of a model's parameters, in its order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, inner, heads, kv_heads, vocabulary = LISTS[name]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary,
    )  # fmt: skip
    with torch.device("meta"):
        return [tuple(p.shape) for p in LlamaForCausalLM(config).parameters()]


class Layer(torch.autograd.Function):
    """Passes a number on; its backward pass costs what a linear layer's does, and makes such a gradient."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, p: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(p, tokens)
        return before.clone()

    @staticmethod
    def backward(ctx: Any, after: Tensor) -> tuple[Tensor, Tensor, None]:
        p, tokens = ctx.saved_tensors
        if p.dim() < 2:
            return after, torch.full_like(p, 1e-3), None
        rows, columns = p.shape
        out, into = tokens[:, :rows], tokens[:, :columns]
        _ = out @ p
        return after, out.T @ into, None


def backward(ps: Sequence[nn.Parameter], tokens: Tensor) -> None:
    """A backward pass over parameters, the last first."""
    x = torch.zeros((), device=tokens.device, requires_grad=True)
    for p in ps:
        x = Layer.apply(x, p, tokens)
    x.backward()


def contenders(device: torch.device) -> dict[str, Make | str]:
    """How to make each optimizer, or why it is not measured."""
    found: dict[str, Make | str] = {}
    for weights, states in STORAGES:
        options = {"lr": 1e-5, "weights": weights, "states": states}
        name = f"AdamW, {weights}, {states}"
        found[name] = lambda ps, o=options: ng.optim.AdamW(ps, **o)
        for gradients in ("kept", "freed"):
            found[f"{name}, CPUOffload, gradients {gradients}"] = lambda ps, o=options, g=gradients: (
                ng.distributed.CPUOffload(ng.optim.AdamW, ps, gradients=g, **o)
            )
    found["AdamW, split8, 8bit, CPUOffload, max_grad_norm"] = lambda ps: ng.distributed.CPUOffload(
        ng.optim.AdamW, ps, lr=1e-5, weights="split8", states="8bit", max_grad_norm=1.0
    )
    found["torch AdamW, fused"] = lambda ps: torch.optim.AdamW(ps, lr=1e-5, fused=True)
    if device.type != "cuda":
        why = "takes a GPU"
    else:
        try:
            from torchao.optim import CPUOffloadOptimizer
        except ImportError as error:
            why = f"not installed: {error}"
        else:
            for gradients in ("kept", "freed"):
                options = {"offload_gradients": gradients == "freed", "lr": 1e-5, "fused": True}
                found[f"torchao CPUOffloadOptimizer, torch AdamW, gradients {gradients}"] = lambda ps, o=options: (
                    CPUOffloadOptimizer(ps, torch.optim.AdamW, **o)
                )
            return found
    found["torchao CPUOffloadOptimizer"] = why
    return found


def measured(shapes: Sequence[tuple[int, ...]], make: Make, device: torch.device, count: int, repeats: int) -> Any:
    """One contender's row: times in milliseconds, memory in bytes."""
    cuda = device.type == "cuda"
    ps = [nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device=device).normal_(0, 0.02)) for s in shapes]
    width = max(max(s) for s in shapes)
    tokens = torch.empty(count, width, dtype=torch.bfloat16, device=device).normal_(0, 1e-3)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    optimizer = make(ps)

    def whole() -> None:
        backward(ps, tokens)
        optimizer.step()

    first = timed(whole, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    both, alone = [], []
    for _ in range(repeats):
        optimizer.zero_grad()
        both.append(timed(whole, device))
    peak = torch.cuda.max_memory_allocated(device) if cuda else None
    for _ in range(repeats):
        optimizer.zero_grad()
        timed(lambda: backward(ps, tokens), device)
        alone.append(timed(optimizer.step, device))
    optimizer.zero_grad()
    for p in ps:
        p.grad = None
    row = {
        "ms": 1e3 * statistics.median(both),
        "step_ms": 1e3 * statistics.median(alone),
        "first_seconds": first,
        "gpu_peak_bytes": peak,
        "gpu_state_bytes": torch.cuda.memory_allocated(device) - before if cuda else None,
    }
    if isinstance(optimizer, ng.distributed.CPUOffload):
        row["host_bytes"] = optimizer.host_bytes() + optimizer.state_bytes()
        row["late"] = optimizer.late
        row["paths"] = sorted({line.path for line in optimizer.describe().rows})
    return row


def backward_ms(shapes: Sequence[tuple[int, ...]], device: torch.device, count: int, repeats: int) -> float:
    """The backward pass without an optimizer."""

    class Nothing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None: ...

    return float(measured(shapes, lambda ps: Nothing(ps, lr=0.0), device, count, repeats)["ms"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lists", nargs="+", choices=LISTS, default=["1b", "7b"])
    parser.add_argument("--rows", default="", help="measure rows only whose names have this in them")
    parser.add_argument("--tokens", type=int, default=4096, help="of the backward pass")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    versions = {package: installed_version(package) or "not installed" for package in ("torchao", "triton")}
    results: dict[str, Any] = {
        "command": command(),
        "environment": describe_environment(device) | versions,
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "tokens": arguments.tokens,
        "lists": {},
    }
    for name in arguments.lists:
        shapes = shapes_of(name)
        elements = sum(torch.Size(s).numel() for s in shapes)
        alone = backward_ms(shapes, device, arguments.tokens, arguments.repeats)
        rows: dict[str, Any] = {}
        results["lists"][name] = {"parameters": elements, "backward_ms": alone, "rows": rows}
        print(f"{name}: {elements:,} parameters, backward pass alone {alone:,.1f} ms")
        for label, make in contenders(device).items():
            if arguments.rows not in label:
                continue
            if isinstance(make, str):
                rows[label] = {"failed": make}
            else:
                try:
                    rows[label] = measured(shapes, make, device, arguments.tokens, arguments.repeats)
                except (RuntimeError, MemoryError) as error:  # memory, or a peer that refuses
                    rows[label] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"  {label:<58} {said(rows[label])}", flush=True)
            save(arguments.json, results)
    return results


def said(row: dict[str, Any]) -> str:
    """A row as a line."""
    if "failed" in row:
        return str(row["failed"])
    text = f"{row['ms']:9.1f} ms, step alone {row['step_ms']:9.1f} ms"
    if row["gpu_peak_bytes"] is not None:
        text += f", GPU {row['gpu_peak_bytes'] / 2**30:6.2f} GiB at most"
    return text + (f", host {row['host_bytes'] / 2**30:6.2f} GiB" if "host_bytes" in row else "")


if __name__ == "__main__":
    main()
