"""Steps by kernels on a GPU: checked against the eager path, then timed beside a device copy in the same run.

Lists: BIG is 16 tensors of 2^26, GPT2M the 292 tensors of GPT-2 medium (355M parameters). Times are of the GPU
(events around many steps in a row) and of the host that launches them, in ms for 10^9 parameters; the limit is the
bytes that a step must move at the speed of the copy. Every variant is checked first: three steps of a list of odd
sizes, eager and fused; reported are the share of codes that differ and the largest difference of weights, in units
of 2^-23 of the largest weight.

With --gauges each variant is timed with gauges off, on and off again, in one run; their cost is the ratio.

    python benchmarks/bench_fused_step.py [--gauges] [--json benchmarks/results/fused_step_h200.json]
        [--only split8:log8 ...] [--lists GPT2M] [--check]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from narrowgauge import optim
from narrowgauge.optim._plan import ParamStep
from narrowgauge.optim._triton_backend import TritonSteps

VARIANTS = [(w, s) for w in ("plain", "split8") for s in ("fp32", "bf16", "8bit", "log8", "fp8")]
VARIANTS += [
    ("split", "log8"),
    ("expansion", "expansion"),
    ("kahan", "bf16"),
    ("stochastic", "log8"),
    ("plain", "log4"),
]
ODD = ((1,), (0,), (300,), (64, 1024), (513,), (4096 * 3 + 5,), (2048, 512))
LAYER = ((1024,), (1024,), (1024, 3072), (3072,), (1024, 1024), (1024,), (1024,), (1024,), (1024, 4096), (4096,))
GPT2M = ((50257, 1024), (1024, 1024), *24 * (*LAYER, (4096, 1024), (1024,)), (1024,), (1024,))
LISTS = {"BIG": 16 * ((2**26,),), "GPT2M": GPT2M}


def made(name: str, shapes: Sequence[tuple[int, ...]], options: dict[str, Any], seed: int = 0) -> Any:
    """An optimizer of fresh parameters with gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)
    ps = []
    for shape in shapes:
        p = torch.randn(shape, device="cuda", generator=generator).mul_(0.02).to(torch.bfloat16)
        ps.append(torch.nn.Parameter(p))
        ps[-1].grad = torch.randn(shape, device="cuda", generator=generator).mul_(0.01).to(torch.bfloat16)
    return getattr(optim, name)(ps, **options)


def entries(optimizer: Any) -> list[ParamStep]:
    optimizer._replan()
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            plan, state = optimizer.plan_of(p), optimizer.state[p]
            if not state:
                state.update(plan.init(p, group))
            found.append(ParamStep(plan.index, plan, group, p, p.grad, state))
    return found


@torch.no_grad()
def check(name: str, options: dict[str, Any]) -> dict[str, float]:
    """How far three steps by kernels are from three eager ones."""
    options = {**options, "min_quantized_size": 0}
    eager, fused = made(name, ODD, options), made(name, ODD, options)
    eager._engine.backends = ()
    for step in range(3):
        generator = torch.Generator("cuda").manual_seed(100 + step)
        for group, other in zip(eager.param_groups, fused.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                scale = 10 ** (2 * torch.rand(p.shape, device="cuda", generator=generator) - 1)
                p.grad = (torch.randn(p.shape, device="cuda", generator=generator) * scale).to(p.dtype)
                q.grad = p.grad.clone()
        eager.step()
        run = TritonSteps(entries(fused))
        run.upload()
        run.run(None)
    torch.cuda.synchronize()
    different, codes, worst = 0, 0, 0.0
    for p, q in zip(eager.param_groups[0]["params"], fused.param_groups[0]["params"], strict=True):
        for key, value in eager.state[p].items():
            if value.dtype in (torch.uint8, torch.float8_e4m3fn):
                codes += value.numel()
                different += int((value.view(torch.uint8) != fused.state[q][key].view(torch.uint8)).sum())
        assert torch.equal(eager.state[p]["step"], fused.state[q]["step"])
        if p.numel():
            a, b = (o.plan_of(x).exact(x, o.state[x])[0] for o, x in ((eager, p), (fused, q)))
            worst = max(worst, float((a - b).abs().max() / a.abs().max() * 2**23))
    return {"codes that differ": different / max(codes, 1), "weights, units of 2^-23": worst}


def gpu_ms(call: Any, repeats: int) -> tuple[float, float]:
    """Median milliseconds of the GPU over runs of several calls, and of the host for a call."""
    calls, times, host = 5, [], []
    for _ in range(3):
        call()
    for _ in range(repeats):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before = time.perf_counter()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        host.append((time.perf_counter() - before) * 1e3 / calls)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times), statistics.median(host)


def copy_speed(repeats: int) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (gpu_ms(lambda: target.copy_(source), repeats)[0] * 1e-3)


def bytes_moved(what: Sequence[ParamStep]) -> int:
    """What a step must read and write: gradients once, all else twice."""
    total = 0
    for entry in what:
        tensors: list[Tensor] = [entry.param, *(v for k, v in entry.state.items() if k not in ("step", "skipped"))]
        total += entry.grad.nbytes + 2 * sum(tensor.nbytes for tensor in tensors)
    return total


def timed(
    name: str, shapes: Any, options: dict[str, Any], repeats: int, speed: float, gauges: Any = False
) -> dict[str, Any]:
    optimizer = made(name, shapes, options)
    what = entries(optimizer)
    run = TritonSteps(what, measured=gauges)
    run.upload()
    count = sum(entry.param.numel() for entry in what)
    ms, host = gpu_ms(lambda: run.refresh() and run.run(None), repeats)
    limit = bytes_moved(what) / speed * 1e3
    compiled = [k for tables in run._tables for launch in tables.launches for k in cache(launch.step.step)]
    return {
        "ms for 1e9": ms / count * 1e9,
        "host ms": host,
        "limit ms for 1e9": limit / count * 1e9,
        "of the limit": limit / ms,
        "registers": [k.n_regs for k in compiled],
        "spills": [k.n_spills for k in compiled],
    }


def gauged(name: str, shapes: Any, options: dict[str, Any], repeats: int, speed: float) -> dict[str, Any]:
    """A row with gauges on, and how much longer than without it takes: all in the same run."""
    rows = []
    for gauges in (False, True, False):
        rows.append(timed(name, shapes, options, repeats, speed, gauges))
        torch.cuda.empty_cache()
    without = [row["ms for 1e9"] for row in (rows[0], rows[2])]
    hosts = [row["host ms"] for row in (rows[0], rows[2])]
    return {
        **rows[1],
        "ms without": without,
        "host ms without": hosts,
        "ratio": rows[1]["ms for 1e9"] / statistics.mean(without),
    }


def cache(kernel: Any) -> list[Any]:
    """Compiled forms of a kernel."""
    found = kernel.device_caches.get(torch.cuda.current_device())
    return list(found[0].values()) if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="variants, as weights:states")
    parser.add_argument("--lists", nargs="*", default=list(LISTS))
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="check only")
    parser.add_argument("--gauges", action="store_true", help="with gauges on, beside the same without")
    args = parser.parse_args()
    speed = math.nan if args.check else copy_speed(args.repeats)
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "device": torch.cuda.get_device_name(),
        "copy, TB/s": speed / 1e12,
        "checks": {},
        "times": {},
    }
    print(f"copy {speed / 1e12:.2f} TB/s")
    for weights, states in [tuple(v.split(":")) for v in args.only] if args.only else VARIANTS:
        options = {"weights": weights, "states": states, "nonfinite": "propagate"}
        label = f"{weights} {states}"
        try:
            found = check(args.optimizer, options)
        except Exception as error:  # one variant that fails must not hide the others
            found = {"error": repr(error)[:500]}
        results["checks"][label] = found
        print(label, found, flush=True)
        for name in () if args.check or "error" in found else args.lists:
            row = (gauged if args.gauges else timed)(args.optimizer, LISTS[name], options, args.repeats, speed)
            results["times"][f"{label}, {name}"] = row
            shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            print("  ", name, shown, flush=True)
            torch.cuda.empty_cache()
    for name in () if args.check or args.gauges else args.lists:
        ps = made("AdamW", LISTS[name], {}).param_groups[0]["params"]
        peer = torch.optim.AdamW(ps, fused=True)
        count = sum(p.numel() for p in ps)
        results["times"][f"torch fused bf16, {name}"] = {
            "ms for 1e9": gpu_ms(peer.step, args.repeats)[0] / count * 1e9
        }
        print(f"torch fused bf16, {name}", results["times"][f"torch fused bf16, {name}"])
        del ps, peer
        torch.cuda.empty_cache()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
