"""What blocks of a transformer hold between forward and backward, and how long both passes take, as autograd saves
and with `hold_activations`.

The blocks are transformers' LLaMA, in bf16, with random weights and fused attention. Each side runs forward and
backward over some of them: what the forward pass leaves (`saved`) and the most at any moment (`peak`), above
weights, gradients and the input, and the median time of both passes. Sides take turns, round by round. Compiled,
each block is compiled by itself.

    python benchmarks/bench_hold.py [--models llama-8b] [--plans none,SWITCHBACK:e4m3] [--modes eager,compiled]
        [--json FILE]
    python benchmarks/bench_hold.py --check        # a tiny model, in seconds, on a CPU too
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import torch
from _script import command, median, parser_for, save, wait
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from narrowgauge.cli._bench._timing import timed
from narrowgauge.cli._environment import find_device
from narrowgauge.cli._options import parts
from narrowgauge.linear import hold_activations, named_plan, swap_linears
from narrowgauge.trainers._environment import describe_environment

# Width, hidden width of the MLP, heads, heads of keys and values, tokens of a window.
MODELS = {
    "llama-8b": (4096, 14336, 32, 8, 2048),
    "llama-1b": (2048, 8192, 32, 8, 2048),
    "tiny": (256, 512, 4, 2, 64),
}
Side = Callable[[], Tensor]


class Blocks(nn.Module):
    """Blocks of a LLaMA, one after the other."""

    def __init__(self, model: str, blocks: int, device: torch.device) -> None:
        super().__init__()
        width, hidden, heads, kv_heads, sequence = MODELS[model]
        config = LlamaConfig(
            hidden_size=width, intermediate_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads,
            num_hidden_layers=blocks, max_position_embeddings=sequence, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self.blocks = nn.ModuleList(LlamaDecoderLayer(config, i).bfloat16() for i in range(blocks))
            positions = torch.arange(sequence)[None]
            self.embedded = LlamaRotaryEmbedding(config)(torch.empty(1, dtype=torch.bfloat16), positions)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, attention_mask=None, position_embeddings=self.embedded)
            x = x[0] if isinstance(x, tuple) else x
        return x


def side(model: str, blocks: int, plan: str, hold: str, compiled: bool, tokens: int, device: torch.device) -> Side:
    """A forward pass, whose backward pass is called on its result; gradients are there from the start."""
    made = Blocks(model, blocks, device)
    if plan != "none":
        swap_linears(made, named_plan(plan))
    if hold != "none":
        hold_activations(made, hold)  # type: ignore[arg-type]
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    if compiled:
        for block in made.blocks:
            block.compile()
    sequence = MODELS[model][-1]
    x = torch.randn(tokens // sequence, sequence, MODELS[model][0], device=device, dtype=torch.bfloat16)
    return lambda: made(x.requires_grad_())


def memory(run: Side, device: torch.device) -> dict[str, int]:
    """Bytes that the forward pass leaves, and the most at a moment, above what was there; nothing of a CPU."""
    if device.type != "cuda":
        run().sum().backward()
        return {}
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y = run()
    saved = torch.cuda.memory_allocated(device) - before - y.nbytes
    y.backward(torch.ones_like(y))
    return {"saved_bytes": saved, "peak_bytes": torch.cuda.max_memory_allocated(device) - before}


def measure(args: Any, model: str, device: torch.device) -> dict[str, Any]:
    """All sides of a model: memory of each, and medians of times in turns."""
    rows: dict[str, dict[str, Any]] = {}
    tokens = 2 * MODELS[model][-1] if args.check else args.tokens
    for mode in parts(args.modes):
        sides: dict[str, Side] = {}
        for plan in parts(args.plans):
            for hold in ("none", args.format):
                name = f"{mode}, {plan}, {'held ' + hold if hold != 'none' else 'as saved'}"
                try:
                    run = side(model, args.blocks, plan, hold, mode == "compiled", tokens, device)
                    for _ in range(3):  # the host finds kernels
                        run().sum().backward()
                    rows[name] = memory(run, device)
                    rows[name]["times"] = []
                    sides[name] = run
                except Exception as error:
                    rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        for _ in range(args.rounds):
            for name, run in sides.items():
                rows[name]["times"].append(1e3 * timed(lambda run=run: _both(run), device))  # type: ignore[misc]
        for name in sides:
            rows[name]["ms"] = median(rows[name].pop("times"))
        first = next(iter(sides), None)
        for name in sides:
            for key in ("saved_bytes", "peak_bytes", "ms"):
                if key in rows[name]:
                    rows[name][f"{key.removesuffix('_bytes')}_share"] = rows[name][key] / rows[first][key]
        sides.clear()
        wait(device)
    return {"tokens": tokens, "blocks": args.blocks, "rows": rows}


def _both(run: Side) -> None:
    y = run()
    y.backward(torch.ones_like(y))


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--models", default="llama-8b")
    parser.add_argument("--plans", default="none,SWITCHBACK:e4m3")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--format", default="e4m3", help="of held activations")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument(
        "--blocks", type=int, default=8, help="more than a few: the peak has one block's own as well"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true", help="keep the file's rows of other modes and plans")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        args.models, args.rounds, args.blocks = "tiny", 1, 2
    device = find_device(args.device)
    torch._dynamo.config.recompile_limit = 64  # all sides are one function's
    known: dict[str, Any] = json.loads(args.json.read_text()) if args.resume else {"models": {}}
    results: dict[str, Any] = {"command": command(), "environment": describe_environment(device), "models": {}}
    if args.resume:
        if known["environment"] != results["environment"]:
            parser.error(f"--resume: {args.json} must be of this environment, got {known['environment']}")
        results["resumed"] = [*known.get("resumed", ()), results["command"]]
        results["command"] = known["command"]
    for model in parts(args.models):
        results["models"][model] = found = measure(args, model, device)
        rows = known["models"].get(model, {}).get("rows", {}) | found["rows"]
        found["rows"] = dict(sorted(rows.items(), key=lambda row: not row[0].startswith("eager")))
        print(f"{model}: {found['blocks']} blocks, {found['tokens']} tokens")
        for name, row in found["rows"].items():
            print(f"  {name}:", ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                                            for key, value in row.items()), flush=True)  # fmt: skip
        save(args.json, results)


if __name__ == "__main__":
    main()
