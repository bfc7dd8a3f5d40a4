"""The text of `describe()`: totals, then like parameters in one row."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge.optim import SGD, AdamW, AdamW8bit


def deep(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(12))
    return nn.Sequential(nn.Embedding(100, 64), *blocks).to(dtype)


def test_totals_first_then_like_parameters_in_one_row() -> None:
    description = AdamW8bit(deep().named_parameters(), weights="split8").describe()
    assert [row.parameter for row in description.rows] == [name for name, _ in deep().named_parameters()]
    quantized, small = 100 * 64 + 12 * 64 * 64, 12 * 3 * 64
    kept = quantized * 3 + 2 * 4 * (quantized // 256) + small * 9
    assert description.bytes == kept == 189_128
    each = f"{kept / (quantized + small):.2f}"
    top, table = str(description).split("\n\n")
    assert top.split("\n") == [
        f"{quantized + small:,} parameters in 49 tensors",
        f"the optimizer keeps 189 kB, {each} bytes a parameter, beside weight and gradient",
        "AdamW in fp32 with fp32 master weights keeps 694 kB, 12.00 bytes a parameter",
        f"stepped by {description.rows[0].path}: 49 tensors",
    ]
    head, _, *lines = (" ".join(line.split()) for line in table.split("\n"))
    assert head == "tensors elements bytes each dtype rule weights states path"
    path = description.rows[0].path
    assert lines == [
        f"13 55,552 3.03 bfloat16 adamw split8 m:log8 v:log8 {path}",
        "0.weight and *.0.weight",
        f"36 2,304 9.00 bfloat16 adamw split8 m:fp32 v:fp32 {path}",
        "*.*.bias and *.1.weight",
        "m, v in fp32: fewer than min_quantized_size=4096 elements",
    ]


def test_it_is_at_most_110_columns_wide() -> None:
    names = [f"model.decoder.layers.{i}.feed_forward.projection_{'abcdefgh'[i % 8]}.weight" for i in range(96)]
    optimizer = AdamW8bit(
        [(name, nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))) for name in names], weights="split8"
    )
    lines = str(optimizer.describe()).split("\n")
    assert max(map(len, lines)) <= 110
    assert "model.decoder.layers.*.feed_forward.projection_a.weight" in " ".join(lines)


def test_parameters_in_fp32_are_beside_adamw_without_master_weights() -> None:
    text = str(AdamW([nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(3))]).describe())
    assert "the optimizer keeps 8.02 kB, 8.00 bytes a parameter, beside weight and gradient\n" in text
    assert "\nAdamW in fp32 keeps 8.02 kB, 8.00 bytes a parameter\n" in text
    assert "\n    0.*" in text


def test_skipped_steps_are_counted() -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.named_parameters())
    for _ in range(2):
        model.weight.grad = torch.full((4, 4), torch.inf)
        optimizer.step()
    assert "\nskipped for a gradient that was not finite: 2 steps; see `skipped`\n" in str(optimizer.describe())


def test_frozen_parameters_without_a_state_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    optimizer = AdamW(model.named_parameters())
    text = str(optimizer.describe())
    assert text.startswith("4,160 parameters in 2 tensors\n")
    assert "\nfrozen: 2 tensors\n" in text
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    model[1].requires_grad_(False)  # it keeps its state
    assert str(optimizer.describe()) == text
    assert optimizer.state_bytes() == optimizer.describe().bytes + 2 * 12


def test_without_parameters() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(2))])
    optimizer.param_groups.clear()
    assert str(optimizer.describe()) == "no parameters"
