"""The benchmarks are scripts beside one another. Their folder is searched for these modules only: it has a module
`render`, and so have the studies.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)
MODULES = (
    "_steps",
    "_layers",
    "_layers_pictures",
    "_clip",
    "_language",
    "_whole_steps",
    "_small_tables",
    "_resume",
    "_layer_memory",
    "_layer_noise",
    "_layer_operations",
    "bench_clip",
    "bench_language",
    "bench_layers",
    "bench_memory",
    "bench_offload",
)
for module in MODULES:
    importlib.import_module(module)
sys.path.remove(BENCHMARKS)
