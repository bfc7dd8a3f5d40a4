"""The benchmark of offloaded states, on a list that fits everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import bench_offload
import pytest
import torch
from torch import nn


@pytest.mark.slow
def test_rows_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "offload.json"
    found = bench_offload.main([
        "--device", "cpu", "--lists", "tiny", "--tokens", "16", "--repeats", "1", "--json", str(file),
    ])  # fmt: skip
    assert json.loads(file.read_text()) == found
    of = found["lists"]["tiny"]
    assert of["parameters"] == sum(torch.Size(s).numel() for s in bench_offload.shapes_of("tiny"))
    measured = {name: row for name, row in of["rows"].items() if "failed" not in row}
    assert of["rows"].keys() - measured.keys() == {"torchao CPUOffloadOptimizer"}
    offloaded = {name: row for name, row in measured.items() if "CPUOffload" in name}
    assert len(offloaded) == 2 * len(bench_offload.STORAGES) + 1
    for row in offloaded.values():
        assert row["late"] == 0
        assert all(path.startswith("fused C") for path in row["paths"])
        assert row["host_bytes"] > 4 * of["parameters"]
    assert all(row["ms"] > 0 for row in measured.values())
    assert "backward pass alone" in capsys.readouterr().out


def test_gradients_are_those_of_a_linear_layer_last_first() -> None:
    ps = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 3))]
    order: list[int] = []
    for number, p in enumerate(ps):
        p.register_post_accumulate_grad_hook(lambda _, n=number: order.append(n))
    tokens = torch.randn(7, 5)
    bench_offload.backward(ps, tokens)
    assert order == [2, 1, 0]
    assert ps[0].grad is not None
    assert torch.equal(ps[0].grad, tokens[:, :3].T @ tokens)
