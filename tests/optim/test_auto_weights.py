"""`weights="auto"`: the storage that loses nothing, by the parameter's dtype; and what `plain` is warned of."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from narrowgauge import optim, recipes

MEANS = {torch.float32: "plain", torch.bfloat16: "split8", torch.float16: "kahan"}


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "SGD", "Lion8bit", "Muon"])
def test_it_is_the_default_and_follows_the_dtype(name: str) -> None:
    ps = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in MEANS]
    optimizer = getattr(optim, name)(ps)
    assert [row.weights for row in optimizer.describe().rows] == list(MEANS.values())
    assert optimizer.param_groups[0]["weights"] == "auto"


def test_with_strict_arithmetic_it_is_of_floats() -> None:
    ps = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in MEANS]
    rows = optim.AdamW(ps, arithmetic="strict").describe().rows
    assert [row.weights for row in rows] == ["plain", "expansion", "kahan"]


def test_steps_that_bf16_alone_loses_arrive() -> None:
    """20 steps at lr 1e-5, as fine-tuning has them: weights have moved as far as in fp32."""
    start = torch.linspace(0.01, 0.1, 5000).bfloat16()
    moved = {}
    for dtype, weights in [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "plain")]:
        p = torch.nn.Parameter(start.to(dtype, copy=True))
        optimizer = optim.AdamW8bit([p], lr=1e-5, weight_decay=0.0, weights=weights)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved[dtype, weights] = optimizer.plan_of(p).exact(p.detach(), optimizer.state[p])[0] - start.double()
    assert float(moved[torch.float32, "auto"].mean()) == pytest.approx(-20e-5, rel=0.01)
    # A constant update is rounded alike at every step: by 7 % at worst (docs/decisions/split8-nearest.md).
    assert float(moved[torch.bfloat16, "auto"].mean()) == pytest.approx(-20e-5, rel=0.07)
    assert not moved[torch.bfloat16, "plain"].any()


@pytest.mark.parametrize("states", ["fp32", "log8"])
def test_a_model_that_is_cast_later_is_noticed_at_the_next_step(states: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(80, 80)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, states=states)

    def step() -> None:
        model.zero_grad()
        model(torch.ones(1, 80, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()

    step()
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    model.bfloat16()
    twin, other = copy.deepcopy((model, optimizer))
    step()
    assert [row.weights for row in optimizer.describe().rows] == ["split8"] * 2
    assert optimizer.state[model.weight]["step"] == before["step"] + 1
    # As an optimizer that was made for bf16 goes on from the same moments.
    made = optim.AdamW(twin.parameters(), lr=1e-3, states=states)
    made.load_state_dict(other.state_dict())
    twin.zero_grad()
    twin(torch.ones(1, 80, dtype=torch.bfloat16)).sum().backward()
    made.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(optimizer.state[p][key], made.state[q][key]) for key in made.state[q])


@pytest.mark.parametrize(
    ("dtype", "lr", "least"),
    [(torch.bfloat16, 1e-5, "0.0039"), (torch.bfloat16, 1e-3, "0.5"), (torch.float16, 1e-4, "0.25")],
)
def test_plain_beside_narrow_parameters_warns_once_with_what_it_loses(
    dtype: torch.dtype, lr: float, least: str
) -> None:
    ps = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2)]
    words = (
        rf"^weights='plain' drops what a {str(dtype)[6:]} parameter cannot hold .* above {least}\. weights='auto'"
    )
    with pytest.warns(UserWarning, match=words) as said:
        optimizer = optim.AdamW([{"params": ps[:1]}, {"params": ps[1:]}], lr=lr, weights="plain")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.param_groups[0]["block_size"] = 64  # planned anew
        optimizer.step()
    # What the warning says: an update of that size is lost from there on, and not below.
    for weight, stays in [(float(least) * 1.1, True), (float(least) * 0.9, False)]:
        p = torch.tensor(weight, dtype=dtype)
        assert bool((p.float() - lr).to(dtype) == p) == stays


def test_nothing_is_said_of_recipes_and_of_float32() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.AdamW([torch.nn.Parameter(torch.ones(4))], weights="plain")
        optimizer = recipes.get("A").apply(torch.nn.Linear(4, 4))
    assert optimizer.describe().rows[0].weights == "plain"
