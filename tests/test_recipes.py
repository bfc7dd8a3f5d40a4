"""Recipes: the papers' bytes, two lines to apply, and errors with a list."""

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.optim import AdamW, Lion, StableAdamW
from narrowgauge.trainers import Settings, make_optimizer

# Collage, Table 2, and the 8-bit paper's 2 bytes of state with a scale of 4 bytes for each 256 elements.
BYTES = {
    "fp32": 16, "bf16": 8, "collage-light": 10, "collage-plus": 12, "master": 16, "fp32-states": 12, "kahan": 10,
    "stochastic": 8, "split": 14, "split8": 13, "adamw8bit": 10 + 1 / 32, "adamw8bit-expansion": 8 + 1 / 32,
    "adamw8bit-split": 8 + 1 / 32, "adamw8bit-split8": 7 + 1 / 32, "adamw6bit-split8": 6.5 + 1 / 32,
    "adamw8bit-split4": 6.5 + 1 / 32, "adamw6bit-split4": 6 + 1 / 32, "adamw6bit-stochastic": 5.5 + 1 / 32,
    "adamw4bit-split8": 6 + 3 / 64, "adamw8bit-dynamic": 10 + 1 / 32, "adamw8bit-dynamic-split8": 7 + 1 / 32,
    "stable-adamw": 16, "lion8bit": 9 + 1 / 64,
}  # fmt: skip


def test_every_recipe_has_its_bytes() -> None:
    assert {name: recipes.get(name).bytes_per_parameter() for name in recipes.names()} == BYTES


def test_the_papers_letters_are_names_too() -> None:
    letters = {"A": "bf16", "B": "collage-light", "C": "collage-plus", "D": "master", "D-MW": "fp32-states"}
    assert {letter: recipes.get(letter).name for letter in letters} == letters


@pytest.mark.parametrize("name", recipes.names())
def test_applying_one_keeps_what_it_says_and_trains(name: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    model[0].bias.requires_grad_(False)
    recipe = recipes.get(name)
    optimizer = recipe.apply(model, lr=1e-2, weight_decay=0.0, min_quantized_size=0)
    assert {p.dtype for p in model.parameters()} == {recipe.dtype}
    x = torch.randn(32, 64, dtype=recipe.dtype)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(optimizer.describe().rows) == len(trained) == 3
    held = optimizer.state_bytes() - 12 * len(trained) + sum(2 * p.nbytes for p in trained)
    assert held / sum(p.numel() for p in trained) == pytest.approx(recipe.bytes_per_parameter(), rel=1e-3)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)


@pytest.mark.parametrize("name", ["fp32", "adamw8bit-split8", "lion8bit"])
def test_norms_and_biases_shrink_only_when_asked(name: str) -> None:
    kept, shrunk = Attention(), Attention()
    optimizers = [recipes.get(name).apply(kept, lr=0.1, weight_decay=0.5)]
    optimizers += [recipes.get(name).apply(shrunk, lr=0.1, weight_decay=0.5, decay_all=True)]
    assert [len(optimizer.param_groups) for optimizer in optimizers] == [2, 1]
    before = kept.linear.weight.detach().clone()
    for model, optimizer in zip((kept, shrunk), optimizers, strict=True):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert kept.norm.weight.eq(1).all()
    torch.testing.assert_close(shrunk.norm.weight.float(), torch.full((8,), 0.95), rtol=2**-8, atol=0)
    torch.testing.assert_close(kept.linear.weight, before * 0.95, rtol=2**-7, atol=0)


def test_a_recipe_may_name_its_optimizer_which_has_its_own_learning_rate() -> None:
    made = {name: recipes.get(name).apply(torch.nn.Linear(4, 4)) for name in recipes.names()}
    kinds = {name: type(optimizer) for name, optimizer in made.items()}
    assert {name: kind for name, kind in kinds.items() if kind is not AdamW} == {
        "stable-adamw": StableAdamW,
        "lion8bit": Lion,
    }
    assert made["stable-adamw"].describe().rows[0].rule == "adamw, clipped"
    assert (made["stable-adamw"].defaults["eps"], made["stable-adamw"].defaults["lr"]) == (1e-6, 1e-3)
    assert made["lion8bit"].defaults["lr"] == 1e-4
    with pytest.raises(TypeError, match=r"Lion\(\) got an unexpected keyword argument 'eps'"):
        recipes.get("lion8bit").apply(torch.nn.Linear(4, 4), eps=1e-8)


def test_a_comparison_gives_each_optimizer_what_it_takes() -> None:
    settings = Settings(steps=1, lr=1e-3, options={"betas": (0.9, 0.99), "eps": 1e-7})
    for name in recipes.names():
        optimizer = make_optimizer(recipes.get(name), torch.nn.Linear(4, 4), settings, 0)
        assert optimizer.defaults.get("eps") == (None if name == "lion8bit" else 1e-7)


def test_bad_names_and_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recipe must be one of fp32, bf16 \(A\), collage-light \(B\).*, got 'E'"):
        recipes.get("E")
    with pytest.raises(ValueError, match=r"states must be left out: recipe 'master' sets it"):
        recipes.get("D").apply(torch.nn.Linear(2, 2), states="8bit")


def test_buffers_keep_their_precision() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(3))
    model.register_buffer("frequencies", torch.rand(3), persistent=False)
    model.register_buffer("mean", torch.rand(3))
    model.register_buffer("phases", torch.rand(3, dtype=torch.complex64))
    model.register_buffer("count", torch.tensor(3))
    model.weight.grad = torch.ones(3)
    model.register_buffer("narrow", torch.rand(3, dtype=torch.float16))
    recipes.get("A").apply(model)
    kept = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert kept == {
        "frequencies": torch.float32,
        "mean": torch.float32,
        "phases": torch.complex64,
        "count": torch.int64,
        "narrow": torch.bfloat16,
    }
    assert model.weight.dtype == model.weight.grad.dtype == torch.bfloat16
