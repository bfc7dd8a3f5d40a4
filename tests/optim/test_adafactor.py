"""Second moments stored as factors, under any rule; Adafactor, and its states in torch's form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Adafactor as TransformersAdafactor

from narrowgauge import optim
from narrowgauge.gauges._watch._batched_rows import BlockSample
from narrowgauge.optim import Adafactor, AdamW, NarrowOptimizer
from narrowgauge.optim._engine import Engine
from narrowgauge.recipes import Recipe, plan_memory
from narrowgauge.storage._factored import factors, product

pytestmark = pytest.mark.usefixtures("eager")

SHAPES = ((12, 8), (9,), (3, 5, 4), (1, 7), ())


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def drive(optimizer: torch.optim.Optimizer, steps: range, scale: float = 1.0) -> Tensor:
    """Gradients that grow, so that updates are clipped at some steps; all parameters as one vector."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = scale * (1 + 0.2 * step) * torch.randn(p.shape, generator=generator)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in optimizer.param_groups[0]["params"]])


def same(one: NarrowOptimizer, two: NarrowOptimizer) -> bool:
    pairs = zip(one.state.values(), two.state.values(), strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def test_transformers_adafactor_without_scaled_steps_is_one_option() -> None:
    """Of weights whose root mean square is at most 1."""

    def moved(make: Any) -> Tensor:
        given = [torch.nn.Parameter(p.detach() / 10) for p in parameters()]
        start = torch.cat([p.detach().flatten() for p in given])
        return drive(make(given), range(20)) - start

    theirs = moved(lambda p: TransformersAdafactor(p, lr=1e-3, scale_parameter=False, relative_step=False))
    assert torch.allclose(moved(lambda p: Adafactor(p, lr=1e-3, eps=(None, 1.0))), theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize(
    "options", [{}, {"lr": 0.1, "weight_decay": 0.1, "d": 2.0}, {"beta2_decay": -0.5, "eps": (1e-4, 1e-2)}], ids=str
)
def test_adafactor_goes_where_torch_goes(options: dict[str, Any], scale: float) -> None:
    """Squares of 1e-10 are below eps1, which then bounds the mean and not only the root."""
    ours = drive(Adafactor(parameters(), **options), range(40), scale)
    theirs = drive(torch.optim.Adafactor(parameters(), **options), range(40), scale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


def test_torchs_states_come_and_go() -> None:
    theirs, ours = torch.optim.Adafactor(parameters()), Adafactor(parameters())
    drive(theirs, range(3))
    ours.load_state_dict(theirs.state_dict())
    for found, saved in zip(ours.state.values(), theirs.state.values(), strict=True):
        if "row_var" in saved:
            assert torch.equal(found["v.rows"], saved["row_var"].squeeze(-1))
            assert torch.equal(found["v.columns"], saved["col_var"].squeeze(-2))
        else:
            assert torch.equal(found["v"], saved["variance"])
    back = ours.torch_state_dict()
    for number, saved in enumerate(theirs.state.values()):
        assert {key: value.shape for key, value in back["state"][number].items()} == {
            key: value.shape for key, value in saved.items()
        }
        assert all(torch.equal(back["state"][number][key], value) for key, value in saved.items())
    # Without factors here, and factored on the way back.
    coded = Adafactor(parameters(), states="fp32")
    coded.load_state_dict(theirs.state_dict())
    assert [row.states for row in coded.describe().rows] == ["v:fp32"] * len(SHAPES)
    other = torch.optim.Adafactor(parameters())
    other.load_state_dict(coded.torch_state_dict())
    for found, saved in zip(other.state.values(), theirs.state.values(), strict=True):
        for key in saved:
            torch.testing.assert_close(found[key], saved[key], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"beta2_decay": 0.1}, "beta2_decay should be <= 0 but is: 0.1"),
        ({"eps": 1e-3}, "eps must be two numbers, the first of which may be None, got 0.001"),
        ({"eps": (None, None)}, "epsilon2 should be >= 0 but is: None"),
        ({"eps": (-1.0, 1e-3)}, "epsilon1 should be >= 0 but is: -1.0"),
        ({"d": 0.5}, "Clipping threshold d should be >= 1 but is: 0.5"),
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"clip_updates": True}, "clip_updates must be False for Adafactor, which clips updates by d, got True"),
    ],
    ids=str,
)
def test_what_adafactor_refuses(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Adafactor(parameters(), **option)


def test_a_large_parameter_is_stepped_as_a_whole() -> None:
    """Of matrices with as many elements as a block, the factors have an item a block, like scales."""
    shape, generator = (1040, 16, 16), torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.ones(shape))
    optimizer = AdamW([p], lr=0.1, betas=(0.0, 0.9), weight_decay=0.0, states="factored")
    w, v = torch.ones(shape).double(), torch.zeros(shape).double()
    for step in (1, 2):
        p.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        v = 0.9 * v + 0.1 * p.grad.double().square()
        w -= 0.1 * p.grad / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        v = product(*factors(v))
    torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=1e-5)


def test_describe_says_what_is_factored_and_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = AdamW(parameters(), states="factored")
    drive(optimizer, range(1))
    rows = optimizer.describe().rows
    assert rows[0].why.endswith("not fused: not asked for")
    monkeypatch.setattr(Engine, "backends", ("triton", "c"))
    rows = optimizer.describe().rows
    assert [row.states for row in rows[:3]] == ["m:fp32 v:factored", "m:fp32 v:fp32", "m:fp32 v:factored"]
    assert rows[0].path == "fused C, fp32"
    assert rows[0].why == "m in fp32: factored is for other moments"
    assert "v in fp32: 1 dimensions < 2 of factored" in rows[1].why
    assert rows[0].bytes == 4 * 12 * 8 + 4 * (12 + 8)
    assert rows[2].bytes == 4 * 60 + 4 * 3 * (5 + 4)
    assert optimizer.state_bytes() == optimizer.describe().bytes + 12 * len(rows)


TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "Adafactor": ("Adafactor", {"weights": "split8", "maximize": True, "weight_decay": 0.1}),
    "cautious": ("AdamW", {"states": "factored", "cautious": True}),
    "clipped updates": ("AdamW", {"states": {"m": "8bit", "v": "factored"}, "clip_updates": True}),
    "LAMB": ("LAMB", {"states": "factored"}),
    "in units of factors": ("AdamW", {"states": {"m": "log8", "v": "factored"}}),
}


@pytest.mark.parametrize("way", ["", "limited", "measured"])
@pytest.mark.parametrize(
    ("case", "kernels"),
    [*((case, "C") for case in TOGETHER), ("Adafactor", "Triton"), ("clipped updates", "Triton")],
)
def test_kernels_step_factored_moments_as_eager_torch_does(
    case: str, kernels: str, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, device: str
) -> None:
    """Channels-last and empty tensors, several dimensions; a gradient that comes late, one that is not finite."""
    (name, options), found, shapes = TOGETHER[case], [], ((70, 33), (6, 3, 5, 5), (2, 20, 30), (0, 4), (9,))
    home = "cpu"
    if kernels == "Triton":
        pytest.importorskip("triton")
        request.getfixturevalue("kernels")
        home, shapes = device, ((12, 33), (2, 3, 5, 5), (2, 6, 8), (0, 4), (9,))
    for backends in (("triton", "c"), ()):
        monkeypatch.setattr(Engine, "backends", backends)
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if "weights" in options else torch.float32

        def random(shape: Any, generator: torch.Generator = generator, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(home, dtype)

        params = [torch.nn.Parameter(random(shape)) for shape in shapes]
        params[1].data = params[1].data.to(memory_format=torch.channels_last)
        optimizer = getattr(optim, name)(
            params, lr=0.01, min_quantized_size=0, max_grad_norm=1.0 if way == "limited" else None, **options
        )
        optimizer.gauges = way == "measured"
        if backends and case != "in units of factors":
            assert not any("eager" in row.path for row in optimizer.describe().rows)
        for step in range(4):
            for number, p in enumerate(params):
                p.grad = random(p.shape)
                if (number, step) == (0, 0):
                    p.grad = None
            if step == 2:
                params[2].grad[0, 3, 4] = torch.inf  # type: ignore[index]
            optimizer.step()
        stats = [optimizer.last_stats[name].sums for name in ("0.0", "0.2")] if way == "measured" else []
        own = [{k: x for k, x in optimizer.state[p].items() if not k.startswith("weight.")} for p in params]
        found.append(([optimizer.full_weights()[p] for p in params], own, stats, params, optimizer))
    weights, own, stats, params, optimizers = zip(*found, strict=True)
    torch.testing.assert_close(*stats, rtol=1e-5, atol=1e-7)
    if home == "cuda":  # sums with a product are rounded once there: an element may take the next code
        from test_fused_steps import agree

        agree(list(zip(*params, strict=True)), *optimizers)
    else:
        # A unit in the last place of split8's 16 bits; of float32 otherwise a few roundings.
        torch.testing.assert_close(*weights, rtol=2.0**-15 if "weights" in options else 1e-5, atol=1e-7)
        torch.testing.assert_close(*own, rtol=1e-5, atol=1e-7)
    assert [state["skipped"] for state in own[0]] == [0, 0, 1, 0, 0]


def test_a_first_moment_in_units_of_factors_resumes() -> None:
    def made() -> AdamW:
        return AdamW(parameters(((40, 30), (5,))), states={"m": "log8", "v": "factored"}, min_quantized_size=0)

    whole, stopped, resumed = made(), made(), made()
    drive(whole, range(6))
    drive(stopped, range(3))
    resumed.load_state_dict(stopped.state_dict())
    for p, q in zip(resumed.param_groups[0]["params"], stopped.param_groups[0]["params"], strict=True):
        p.data.copy_(q.detach())
    drive(resumed, range(3, 6))
    assert same(resumed, whole)
    (moment,) = resumed.preview(resumed.param_groups[0]["params"][0], lambda x: x)
    assert (moment.slot, moment.format) == ("m", "log8")


def test_gauges_take_all_of_a_factored_parameter() -> None:
    p = torch.nn.Parameter(torch.randn(600, 500, generator=torch.Generator().manual_seed(0)))
    optimizer = Adafactor([p])
    drive(optimizer, range(2))
    view = optimizer.parameter_view(p)
    assert view is not None
    rows = BlockSample.of_view(view, 0)
    before = view.second_moment(rows.of)
    assert before is not None
    assert before.elements == p.numel()
    optimizer.gauges = True
    drive(optimizer, range(2, 3))
    after = optimizer.parameter_view(p)
    sums = before.ratio_sums(after, rows.of(p.grad), None)
    assert float((sums[0] / sums[1]).sqrt()) == pytest.approx(optimizer.last_stats["0.0"].rms, rel=1e-5)


def test_a_memory_plan_counts_factors() -> None:
    def loss(model: torch.nn.Module, batch: int, tokens: int) -> Tensor:
        found: Tensor = model(torch.empty(batch, 512, device="meta")).sum()
        return found

    def held(states: dict[str, str]) -> int:
        recipe = Recipe("some", "some", torch.float32, states=states)
        return plan_memory(torch.nn.Linear(512, 256, bias=False), recipe, loss=loss).held["states"]

    with_factors, without = held({"m": "bf16", "v": "factored"}), held({"m": "bf16", "v": "bf16"})
    assert without - with_factors == 2 * 512 * 256 - 4 * (512 + 256)
    recipe = Recipe("some", "some", torch.float32, states={"m": "bf16", "v": "factored"})
    assert recipe.byte_breakdown(256)["states"] == 2 + 2 * 4 / 256
