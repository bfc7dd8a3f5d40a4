"""Compare recipes on a model of your own: what each gives, what it costs, and how sure that is.

    python examples/compare_own_model.py            # prints a table, writes runs/own/report.html
    python examples/compare_own_model.py --smoke    # the same in a few seconds

Replace `make_model`, `loss` and the data with yours; the rest stays.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import narrowgauge as ng


def make_model() -> nn.Module:
    """A new model. torch is seeded before each call, so every recipe starts from the same weights."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1), nn.Linear(256, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a batch. The model is in the recipe's dtype, so float inputs are cast to it."""
    x, y = batch
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def data(examples: int) -> TensorDataset:
    """Points of ten classes around their centers, made here."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(10, 64, generator=generator)
    y = torch.randint(10, (examples,), generator=generator)
    return TensorDataset(classes[y] + 2 * torch.randn(examples, 64, generator=generator), y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    parser.add_argument("--out", default="runs/own", help="folder for results.json and report.html")
    args = parser.parse_args()
    train, held_out = torch.utils.data.random_split(data(5000), [4500, 500], torch.Generator().manual_seed(1))
    comparison = ng.compare(
        ["D", "A", "adamw8bit-split8", "lion8bit@lr=1e-4"],  # Lion has a learning rate of its own
        make_model,
        loss,
        lambda: DataLoader(train, batch_size=64, shuffle=True),
        validation=DataLoader(held_out, batch_size=500),
        steps=12 if args.smoke else 300,
        seeds=2 if args.smoke else 3,
        lr=1e-3,
        weight_decay=0.1,
    )
    print(comparison)
    print(comparison.save(args.out))


if __name__ == "__main__":
    main()
