"""What watching a training costs: steps of a GPT-2-like model with and without, in alternation.

Each round takes some steps without a watch and as many within one, in turns, on the same model, each after as
many steps as lie between two measured ones; the time of a round ends when the device is done. So it is what a watch
costs while it lasts, not what it takes to begin and to end one. The cost is the median over rounds of the ratio of
neighbors, so that a clock that drifts or a busy machine says nothing. `all` is the default watch (updates,
gradients, features at every tenth step, RMS_t of embeddings at every one), the other rows leave something out:
`losses, RMS_t` less `losses` is what RMS_t at every step costs. Comparing quantized moments with exact ones is done
seldom by default (every 500th step); what one such step costs, and that over 500 steps, has a row of its own.

    python benchmarks/bench_watch.py [--json FILE] [--optimizers torch adamw8bit ...] [--layers 12] [--width 768]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from _script import command, parser_for, save
from torch import Tensor, nn

from narrowgauge import gauges, optim
from narrowgauge.cli._bench._timing import timed

OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "torch": (torch.bfloat16, lambda net: torch.optim.AdamW(net.parameters(), 1e-5, fused=True)),
    "torch fp32": (torch.float32, lambda net: torch.optim.AdamW(net.parameters(), 1e-5, fused=True)),
    "adamw8bit": (torch.bfloat16, lambda net: optim.AdamW8bit(net.named_parameters(), 1e-5, weights="split8")),
    "adamw8bit plain": (torch.bfloat16, lambda net: optim.AdamW8bit(net.named_parameters(), 1e-5)),
    "collage": (torch.bfloat16, lambda net: optim.CollageAdamW(net.named_parameters(), 1e-5, variant="plus")),
}
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "all, not sampled": {"updates": True},
    "losses": {"updates": False, "gradients": False, "activations": False, "rms_every": 0},
    "losses, RMS_t": {"updates": False, "gradients": False, "activations": False},
    "updates": {"gradients": False, "activations": False, "rms_every": 0},
    "gradients": {"updates": False, "activations": False, "rms_every": 0},
    "features": {"updates": False, "gradients": False, "rms_every": 0},
}
STATES_EVERY = 100  # the default, with every=10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, -1, 64).transpose(1, 2)
            for part in self.attention(self.ln_1(x)).split(width, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2's list of tensors; returns the loss."""

    def __init__(self, layers: int, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        logits = nn.functional.linear(self.ln_f(x), self.wte.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Training:
    """One model and its optimizer."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        dtype, make = OPTIMIZERS[name]
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.net = Model(args.layers, args.width, args.vocabulary, args.length).to(self.device, dtype)
        self.optimizer = make(self.net)
        self.ids = torch.randint(args.vocabulary, (args.batch, args.length), device=self.device)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.net(self.ids).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def seconds(self, count: int, way: dict[str, Any] | None, every: int) -> float:
        """Of some steps, after some more, with a watch if there is a way of watching."""
        watched: Any = contextlib.nullcontext()
        if way is not None:
            watched = gauges.watch(self.net, self.optimizer, every, states_every=0, **way)
        with watched:
            self.steps(every)
            return timed(lambda: self.steps(count), self.device)

    def moments(self, every: int) -> float | None:
        """Seconds that a step takes longer if quantized moments are compared with exact ones."""
        if not isinstance(self.optimizer, optim.NarrowOptimizer):
            return None
        found = []
        for states in (0, 1, 0, 1):
            with gauges.watch(self.net, self.optimizer, every, updates=False, gradients=False, activations=False,
                              rms_every=0, states_every=states):  # fmt: skip
                found.append(timed(lambda: self.steps(1), self.device))
        return min(found[1::2]) - min(found[::2])


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step, and what each way of watching adds to it."""
    training = Training(name, args)
    count = args.every * args.dues
    training.seconds(args.every, {}, args.every)  # kernels of both are made here
    training.seconds(args.every, {"updates": True}, args.every)
    rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in args.ways}
    for number in range(args.rounds):
        for way in args.ways:
            order = (None, WAYS[way]) if number % 2 == 0 else (WAYS[way], None)
            found = [training.seconds(count, one, args.every) for one in order]
            without, within = found if number % 2 == 0 else found[::-1]
            rounds[way].append((without, within))
    base = statistics.median(without for pairs in rounds.values() for without, _ in pairs) / count
    result: dict[str, Any] = {
        "step ms": base * 1e3,
        "parameters": sum(p.numel() for p in training.net.parameters()),
    }
    for way, pairs in rounds.items():
        ratios = sorted(within / without - 1 for without, within in pairs)
        result[way] = {"cost": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    seconds = training.moments(args.every)
    if seconds is not None:
        result["moments"] = {"ms": seconds * 1e3, "cost": seconds / STATES_EVERY / base}
    return result


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--dues", type=int, default=3, help="measured steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    cuda = args.device.startswith("cuda")
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else f"{args.device}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "model": {key: getattr(args, key) for key in ("layers", "width", "vocabulary", "length", "batch")},
        "every": args.every,
        "optimizers": {},
        "command": command(),
    }
    for name in args.optimizers:
        results["optimizers"][name] = found = measured(name, args)
        print(f"{name}: {found['step ms']:.2f} ms a step, {found['parameters'] / 1e6:.0f}M parameters", flush=True)
        for way in args.ways:
            row = found[way]
            print(f"  {way:18} {row['cost']:+7.2%}   ({row['least']:+.2%} to {row['most']:+.2%})", flush=True)
        if "moments" in found:
            row = found["moments"]
            how = f"({row['ms']:.1f} ms every {STATES_EVERY} steps)"
            print(f"  moments            {row['cost']:+7.2%}   {how}", flush=True)
        save(args.json, results)
        if cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
