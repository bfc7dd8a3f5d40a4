"""What models are asked: which tokens are covered, and that a step may be divided."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from narrowgauge.trainers._language import LanguageTask, cover
from narrowgauge.trainers._models import MASK, SPECIAL, masked_token_loss
from narrowgauge.trainers._tokens import TokenizedCorpus


def source(count: int = 5000) -> TokenizedCorpus:
    tokens = torch.randint(256, (count,), generator=torch.Generator().manual_seed(0)).int()
    return TokenizedCorpus(tokens, tokens[:1000], 256, 1.0, None)  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(3, 64), st.integers(0, 2**31))
def test_the_same_number_of_tokens_is_covered_in_each_window(n: int, sequence: int, seed: int) -> None:
    tokens = torch.randint(SPECIAL, 258, (n, sequence), generator=torch.Generator().manual_seed(seed))
    examples = cover(tokens, 256, torch.Generator().manual_seed(seed))
    said = examples["labels"] != -100
    assert said.sum(1).tolist() == [max(1, round(0.15 * sequence))] * n
    assert torch.equal(examples["labels"][said], tokens[said])
    assert torch.equal(examples["inputs"][~said], tokens[~said])
    shown = examples["inputs"][said]
    assert bool(((shown == MASK) | (shown >= SPECIAL)).all())
    assert int(examples["inputs"].max()) < 258


def test_of_covered_tokens_eight_in_ten_are_masked_and_one_is_another() -> None:
    tokens = torch.full((4000, 100), 77)
    examples = cover(tokens, 256, torch.Generator().manual_seed(0))
    shown = examples["inputs"][examples["labels"] != -100]
    assert (shown == MASK).double().mean().item() == pytest.approx(0.8, abs=0.01)
    kept = (shown == 77).double().mean().item()
    assert kept == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    places = (examples["labels"] != -100).double().mean(0)
    assert places.min() > 0.12  # every place of a window is covered as often
    assert places.max() < 0.18


class Table(nn.Module):
    """A model that knows the odds of each token by the token shown."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(258, 258, generator=torch.Generator().manual_seed(1)))

    def forward(self, input_ids: torch.Tensor) -> object:
        return type("Output", (), {"logits": self.table[input_ids]})()


def test_the_loss_of_a_step_is_the_mean_of_its_parts() -> None:
    model = Table()
    for objective in ("causal", "masked"):
        task = LanguageTask(source(), objective, batch=8, sequence=20, windows=4, seed=0)  # type: ignore[arg-type]
        examples = task.draw()
        whole = task.loss(model, examples)
        parts = [task.loss(model, {k: v[i : i + 2] for k, v in examples.items()}) for i in range(0, 8, 2)]
        assert torch.stack(parts).mean().item() == pytest.approx(whole.item(), rel=1e-6)


def test_the_masked_loss_in_float64() -> None:
    model = Table()
    tokens = torch.randint(SPECIAL, 258, (3, 40), generator=torch.Generator().manual_seed(2))
    examples = cover(tokens, 256, torch.Generator().manual_seed(2))
    odds = F.log_softmax(model.table.double(), 1)
    pairs = [
        (shown, label)
        for shown, label in zip(
            examples["inputs"].flatten().tolist(), examples["labels"].flatten().tolist(), strict=True
        )
        if label != -100
    ]
    expected = -sum(odds[shown, label].item() for shown, label in pairs) / len(pairs)
    assert masked_token_loss(model, examples["inputs"], examples["labels"]).item() == pytest.approx(
        expected, rel=1e-6
    )


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_a_task_goes_on_where_another_was(objective: str) -> None:
    first, second = (
        LanguageTask(source(), objective, batch=4, sequence=12, windows=4, seed=seed)  # type: ignore[arg-type]
        for seed in (0, 1)
    )
    for _ in range(3):
        first.draw()
    second.load_state_dict(first.state_dict())
    for a, b in zip(first.draw().values(), second.draw().values(), strict=True):
        assert torch.equal(a, b)
    # What is validated on does not move with the seed or the draw.
    for a, b in zip(first.validation().values(), second.validation().values(), strict=True):
        assert torch.equal(a, b)
