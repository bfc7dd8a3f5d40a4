"""Time and error of `estimate_quantiles`, beside exact quantiles of the same data, in one run.

Errors are in probability, |F(estimate) - p| with F the data's own distribution function, and in value, as a
fraction of the data's interquartile range; each as the mean and the largest over the 256 quantiles, which lie
1/256 = 0.0039 apart. They are measured on the CPU, and are the GPU's too: the results are the same bit for bit.

    python benchmarks/bench_quantiles.py [--device cuda] [--json benchmarks/results/quantiles_cpu.json]
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch
from _script import command, median, parser_for, save
from torch import Tensor

from narrowgauge.cli._bench._timing import timed, timed_run
from narrowgauge.storage import estimate_quantiles
from narrowgauge.trainers._environment import describe_environment

COUNT, SUBSET = 256, 4096
PROBABILITIES = (np.arange(COUNT) + 0.5) / COUNT


def data(name: str, size: int) -> Tensor:
    """Float32 values of a named distribution or arrangement."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(size, generator=generator)
    columns = min(1024, size)
    scales = 10 ** (6 * torch.rand(max(size // columns, columns), generator=generator) - 3)
    match name:
        case "normal":
            return normal
        case "uniform":
            return torch.rand(size, generator=generator)
        case "Student t, 3 degrees":
            chi = sum(torch.randn(size, generator=generator).square() for _ in range(3))
            return normal / (chi / 3).sqrt()
        case "squares of normals":
            return normal.square()
        case "rows of scales 10^-3 to 10^3":
            return (normal.view(-1, columns) * scales[: size // columns, None]).reshape(-1)
        case "columns of scales 10^-3 to 10^3":
            return (normal.view(-1, columns) * scales[:columns]).reshape(-1)
        case "sorted normal":
            return normal.sort().values
    raise ValueError(name)


DISTRIBUTIONS = ("normal", "uniform", "Student t, 3 degrees", "squares of normals")
ARRANGEMENTS = ("normal", "rows of scales 10^-3 to 10^3", "columns of scales 10^-3 to 10^3", "sorted normal")
# Place of a quantile among m sorted values, counted from 1, and between which neighbors.
RULES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "m p + 1/2 (Hazen; ours)": lambda p, m: m * p + 0.5,
    "m p (the paper)": lambda p, m: np.floor(m * p) + 1,
    "(m + 1) p (Weibull)": lambda p, m: (m + 1) * p,
    "(m - 1) p + 1 (linear)": lambda p, m: (m - 1) * p + 1,
}


def neighbors(x: Tensor, rule: str, size: int = SUBSET) -> Tensor:
    """The paper's subsets, runs of `size` neighbors, read by a rule and averaged."""
    ordered = torch.from_numpy(np.sort(x.view(-1, size).numpy(), axis=1))
    place = torch.from_numpy(RULES[rule](PROBABILITIES, size))
    below = place.floor().long().clamp(1, size)
    above = (below + 1).clamp(max=size)
    weight = place - below
    return (ordered[:, below - 1] * (1 - weight) + ordered[:, above - 1] * weight).mean(0).float()


def errors(estimate: Tensor, ordered: np.ndarray) -> dict[str, float]:
    """How far off an estimate is, from the data in order."""
    exact = np.quantile(ordered, PROBABILITIES, method="hazen")
    found = estimate.double().numpy()
    sides = [np.searchsorted(ordered, found.astype(np.float32), side) for side in ("left", "right")]
    probability = np.abs((sides[0] + sides[1]) / (2 * len(ordered)) - PROBABILITIES)
    value = np.abs(found - exact) / (exact[191:193].mean() - exact[63:65].mean())
    pairs = (("probability", probability), ("value", value))
    return {f"{what} {name}": float(f(e)) for what, e in pairs for name, f in (("mean", np.mean), ("max", np.max))}


def error_tables(largest: int) -> dict[str, Any]:
    tables: dict[str, Any] = {"distributions": {}, "subsets": {}, "reading": {}}
    for name in DISTRIBUTIONS:
        for exponent in range(12, largest + 1, 4):
            x = data(name, 2**exponent)
            tables["distributions"][f"{name}, 2^{exponent}"] = errors(estimate_quantiles(x), np.sort(x.numpy()))
    for name in ARRANGEMENTS:
        x = data(name, 2**22)
        ordered = np.sort(x.numpy())
        tables["subsets"][f"{name}: ours"] = errors(estimate_quantiles(x), ordered)
        tables["subsets"][f"{name}: neighbors"] = errors(neighbors(x, next(iter(RULES))), ordered)
    for name in ("normal", "Student t, 3 degrees", "squares of normals"):
        x = data(name, 2**22)
        ordered = np.sort(x.numpy())
        for rule in RULES:
            tables["reading"][f"{name}: {rule}"] = errors(neighbors(x, rule), ordered)
        for size in (1024, 2048, 8192):
            found = neighbors(x, next(iter(RULES)), size)
            tables["reading"][f"{name}: Hazen, subsets of {size}"] = errors(found, ordered)
    return tables


def nanoseconds(function: Callable[[], object], size: int, device: torch.device, repeats: int) -> float:
    """Median nanoseconds an element after two calls that are not counted; a GPU's by its own clock."""
    on_gpu = device.type == "cuda"
    times = [timed_run(function, 1, device)[0] if on_gpu else timed(function, device) for _ in range(repeats + 2)]
    return 1e9 * median(times[2:]) / size


def speed_table(device: torch.device, repeats: int) -> dict[str, float]:
    """Nanoseconds an element of ours and of what else there is."""
    rows = {}
    on_cpu = device.type == "cpu"
    p = torch.from_numpy(PROBABILITIES).float().to(device)
    for exponent in (16, 20, 24) if on_cpu else (20, 24, 28):
        x = torch.randn(2**exponent, device=device)
        ways: dict[str, tuple[Callable[[], object], int]] = {
            "estimate_quantiles": (lambda x=x: estimate_quantiles(x), repeats),
            "torch.sort": (lambda x=x: torch.sort(x), 3),
        }
        if exponent <= 24:
            ways["torch.quantile"] = (lambda x=x: torch.quantile(x[:-1], p), 3)
        if on_cpu:
            ways["numpy.quantile"] = (lambda x=x: np.quantile(x.numpy(), PROBABILITIES), 3)
        else:
            ways["torch.sum"] = (lambda x=x: x.sum(), repeats)
        for name, (way, times) in ways.items():
            rows[f"{name}, 2^{exponent} float32"] = nanoseconds(way, x.numel(), device, times)
    variants = {
        "bfloat16": (x.bfloat16(), 256),
        "float32, count 16": (x, 16),
        "float32, count 100": (x, 100),
        "float32, sorted": (x.sort().values, 256),
        "float32, one element less": (x[:-1], 256),
    }
    for name, (values, count) in variants.items():
        way = lambda v=values, c=count: estimate_quantiles(v, c)  # noqa: E731
        rows[f"estimate_quantiles, 2^{exponent} {name}"] = nanoseconds(way, x.numel(), device, repeats)
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    environment = describe_environment(device)
    if device.type == "cuda":
        environment["triton"] = metadata.version("triton")
    results: dict[str, Any] = {
        "command": command(),
        "environment": environment,
        "nanoseconds an element, median": speed_table(device, arguments.repeats),
    }
    for name, value in results["nanoseconds an element, median"].items():
        print(f"  {name:<56} {value:10.5f} ns")
    if device.type == "cpu":
        results["errors"] = error_tables(24)
        for title, table in results["errors"].items():
            print(title)
            for name, row in table.items():
                print(f"  {name:<58}", "  ".join(f"{key} {value:.1e}" for key, value in row.items()))
    save(arguments.json, results)


if __name__ == "__main__":
    main()
