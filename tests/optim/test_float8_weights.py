"""Training float8 weights: recipes, steps, checkpoints, conversions, and the loss beside fp32 masters."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import CPUOffload, load_checkpoint, save_checkpoint
from narrowgauge.distributed._checkpoint._load import export_checkpoint
from narrowgauge.linear import TENSORWISE_FP8, swap_linears, to_float8_weights
from narrowgauge.optim import AdamW, NarrowOptimizer, ScheduleFreeAdamW, step_in_backward
from narrowgauge.optim._eager import EagerSteps
from narrowgauge.recipes import Recipe
from narrowgauge.storage import Float8Weight

BF16 = torch.bfloat16
RECIPE = Recipe("fp8-8bit", "", BF16, "fp8split8", "log8", linear="TENSORWISE_FP8")
NARROWER = Recipe("fp8-6bit", "", BF16, "fp8split8", {"m": "log4", "v": "log8"}, linear="SWITCHBACK:e4m3")
BLOCKS = Recipe("blocks-8bit", "", BF16, "fp8split8", "log8", linear="BLOCKWISE_FP8")
WIDE = Recipe("wide", "", BF16, "master", "log8", linear="TENSORWISE_FP8")


def net(seed: int = 0, width: int = 64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(50, width), nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU(),
        nn.Linear(2 * width, width), nn.LayerNorm(width), nn.Linear(width, 50),
    )  # fmt: skip


def made(recipe: Recipe = RECIPE, seed: int = 0, **options) -> tuple[nn.Module, NarrowOptimizer]:
    model = net(seed)
    return model, recipe.apply(model, lr=3e-3, min_quantized_size=0, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Predict a fixed successor of each of fifty tokens, with noise."""
    successor = torch.randperm(50, generator=torch.Generator().manual_seed(9))
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randint(50, (64,), generator=generator)
        y = torch.where(torch.rand(64, generator=generator) < 0.2, torch.randint(50, (64,), generator=generator),
                        successor[x])  # fmt: skip
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def words(model: nn.Module, optimizer: NarrowOptimizer) -> list[Tensor]:
    parts = [
        (p.codes, p.low, p.scale, p.largest) if isinstance(p, Float8Weight) else (p,) for p in model.parameters()
    ]
    found = [x for some in parts for x in some]
    found += [x for p in model.parameters() for x in optimizer.state[p].values()]
    return [x.detach().view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x.detach() for x in found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_a_parameter_takes_six_bytes_and_five_and_a_half() -> None:
    assert RECIPE.bytes_per_parameter() == 6 + 1 / 32
    assert NARROWER.bytes_per_parameter() == 5.5 + 1 / 32
    for recipe, most in ((RECIPE, 6.05), (NARROWER, 5.55)):
        model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
        optimizer = recipe.apply(model)
        model(torch.randn(4, 256, dtype=BF16)).sum().backward()
        optimizer.step()
        ps = list(model.parameters())
        held = sum(p.nbytes + p.grad.nbytes for p in ps) + optimizer.state_bytes()
        assert held / sum(p.numel() for p in ps) <= most
        assert optimizer.state_bytes() == optimizer.describe().bytes + 12 * len(ps)


@pytest.mark.parametrize("recipe", [RECIPE, BLOCKS], ids=lambda recipe: recipe.name)
def test_a_recipe_keeps_linear_weights_as_codes_and_all_else_in_split8(recipe: Recipe) -> None:
    model, optimizer = made(recipe)
    assert [type(p) is Float8Weight for p in model.parameters()] == [
        name in ("1.weight", "4.weight", "6.weight") for name, _ in model.named_parameters()
    ]
    rows = {row.parameter: row for row in optimizer.describe().rows}
    assert {name: row.weights for name, row in rows.items() if row.weights != "split8"} == dict.fromkeys(
        ("1.weight", "4.weight", "6.weight"), "fp8split8"
    )
    assert rows["1.weight"].path == "fused C, fp32"
    losses = train(model, optimizer, range(60))
    assert losses[-1] < 0.6 * losses[0]


def test_fine_tuning_begins_with_the_weights_that_the_model_had() -> None:
    model = net()
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = RECIPE.apply(model, lr=0.0, weight_decay=0.0)
    for step in range(2):
        for name, now in model.named_parameters():
            p, full = wanted[name], optimizer.full_weights()[now]
            assert ((full - p).abs() <= 2.0**-8 * p.abs() + 2.0**-12 * step * p.abs().max()).all()
        train(model, optimizer, range(1))


@pytest.mark.parametrize("recipe", [RECIPE, NARROWER], ids=lambda recipe: recipe.name)
def test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped(recipe: Recipe, tmp_path: Path) -> None:
    whole = made(recipe)
    train(*whole, range(12))
    for before in (0, 5):
        first = made(recipe)
        train(*first, range(before))
        file = io.BytesIO()
        torch.save((first[0].state_dict(), first[1].state_dict()), file)
        file.seek(0)
        states = torch.load(file, weights_only=True)
        path = save_checkpoint(tmp_path, model=first[0], optimizer=first[1], step=before)
        exported = torch.load(export_checkpoint(path, tmp_path / f"{before}.pt"))
        for how in ("states", "checkpoint", "export", "copy"):
            resumed = made(recipe, seed=1)
            train(*resumed, range(3 if before else 0))
            if how == "copy":
                resumed = copy.deepcopy(first)
            elif how == "checkpoint":
                load_checkpoint(path, model=resumed[0], optimizer=resumed[1])
            else:
                model, state = states if how == "states" else (exported["model"], exported["optimizer"])
                resumed[0].load_state_dict(model)
                resumed[1].load_state_dict(state)
            train(*resumed, range(before, 12))
            assert same(words(*resumed), words(*whole)), (before, how)


def test_the_loss_is_that_of_the_same_plan_over_fp32_masters() -> None:
    """A float8 plan rounds W in any case, so nothing that it keeps is lost."""
    wide, *narrow = ([train(*made(r, seed), range(80))[-30:] for seed in (0, 1)] for r in (WIDE, NARROWER))
    wanted = torch.tensor(wide).mean()
    assert wanted < 2.0
    assert abs(torch.tensor(narrow).mean() - wanted) < 0.02


@pytest.mark.parametrize("weights", ["split8", "split4", "master", "kahan", "plain"])
def test_a_running_optimizer_converts_to_codes_and_back(weights: str) -> None:
    model = net().to(BF16)
    swap_linears(model, TENSORWISE_FP8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = AdamW(model.named_parameters(), 3e-3, weights=weights, states="log8", min_quantized_size=0)
    train(model, optimizer, range(5))
    p = model[1].weight
    before, moment = optimizer.full_weights()[p], optimizer.state[p]["m.codes"].clone()
    optimizer.convert(p, weights="fp8split8")
    assert p is model[1].weight
    assert isinstance(p, Float8Weight)
    after = optimizer.full_weights()[p]
    assert ((after - before).abs() <= 2.0**-12 * before.abs() + p.scale * 2.0**-18).all()
    assert torch.equal(optimizer.state[p]["m.codes"], moment)
    train(model, optimizer, range(5, 8))
    full, held = optimizer.full_weights()[p], words(model, optimizer)
    with pytest.raises(ValueError, match="states must be"):
        optimizer.convert(p, weights=weights, m="nothing")
    assert same(words(model, optimizer), held)
    optimizer.convert(p, weights=weights)
    assert type(p) is nn.Parameter
    # Twelve significant bits: kept by every storage with a low word.
    assert torch.equal(optimizer.full_weights()[p], full if weights != "plain" else full.to(BF16).float())
    train(model, optimizer, range(8, 10))


def test_weights_that_become_codes_under_an_optimizer_are_planned_again() -> None:
    model = net().to(BF16)
    swap_linears(model, TENSORWISE_FP8)
    optimizer = AdamW(model.named_parameters(), 3e-3)
    train(model, optimizer, range(2))
    to_float8_weights(model)
    with pytest.warns(UserWarning, match=r"param_groups: dropped 'weight.lo' in int8, .*beside a Float8Weight"):
        train(model, optimizer, range(2, 3))
    assert {row.weights for row in optimizer.describe().rows} == {"split8", "fp8split8"}


def test_torchs_optimizer_goes_on_with_both_words() -> None:
    model, optimizer = made()
    train(model, optimizer, range(5))
    wide, torchs = ng.to_torch(model, optimizer)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    full = optimizer.full_weights()
    assert all(torch.equal(p, full[q]) for p, q in zip(wide.parameters(), model.parameters(), strict=True))
    assert type(wide[1]) is nn.Linear
    train(wide, torchs, range(5, 7))


@pytest.mark.parametrize("cls", [AdamW, ng.optim.SGD, ng.optim.Lion, ng.optim.LAMB])
@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 1.0}, {"nonfinite": "propagate", "maximize": True}], ids=str
)
def test_the_compiled_step_gives_the_eager_words(cls: type[NarrowOptimizer], options: dict) -> None:
    """Floats of the two differ in the last place now and then; a low word may be rounded to the other side then."""
    compiled, eager = net().to(BF16), net().to(BF16)
    optimizers = []
    for model in (compiled, eager):
        swap_linears(model, TENSORWISE_FP8)
        to_float8_weights(model)
        states = "bf16" if cls is ng.optim.SGD else "log8"
        optimizers.append(cls(model.named_parameters(), 1e-2, states=states, min_quantized_size=0, **options))
    optimizers[1]._engine.backends = ()
    for step in range(6):
        for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
            q.grad = p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(BF16)
        if step == 2:  # the largest grows beyond 448 codes, and low words come from outside
            for model in (compiled, eager):
                with torch.no_grad():
                    model[1].weight[0].fill_(1e-3)
                    model[4].weight.mul_(0.1234)
        for optimizer in optimizers:
            optimizer.step()
        assert {row.path for row in optimizers[0].describe().rows} == {"fused C, fp32"}
        for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
            if isinstance(p, Float8Weight):
                assert float(p.largest) == float((p.codes.view(torch.uint8) & 0x7F).max())
                assert float(p.scale) == float(q.scale)
                assert (p.codes.view(torch.uint8) != q.codes.view(torch.uint8)).double().mean() < 1e-3
                assert (p.low != q.low).double().mean() < 2e-3
                with torch.no_grad():
                    q.copy_(p)
                for key, value in optimizers[0].state[p].items():
                    optimizers[1].state[q][key].copy_(value)


def test_a_step_that_waits_for_no_device_writes_the_same_words(monkeypatch) -> None:
    """On a GPU whether a step is taken is a tensor, which the host never reads."""
    runs = [made() for _ in range(3)]
    for _, optimizer in runs:
        optimizer._engine.backends = ()
    train(*runs[0], range(4))
    admitted = EagerSteps._admitted
    monkeypatch.setattr(EagerSteps, "_admitted", lambda *given: torch.tensor(admitted(*given)))
    train(*runs[1], range(4))
    assert same(words(*runs[0]), words(*runs[1]))
    model, optimizer = runs[2]
    full = optimizer.full_weights()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert len(optimizer.skipped) == len(full)
    assert all(torch.equal(optimizer.full_weights()[p], full[p]) for p in full)


def test_a_plan_of_memory_counts_codes_once() -> None:
    def loss(model: nn.Module, batch: int, sequence: int) -> Tensor:
        return model(torch.zeros(batch * sequence, 512, dtype=BF16, device="meta")).sum()

    def planned(recipe: Recipe) -> ng.recipes.MemoryPlan:
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        return ng.recipes.plan_memory(model, recipe, batch=1, sequence=16, loss=loss)

    wide, narrow = planned(Recipe("", "", BF16, "split8", "log8", linear="TENSORWISE_FP8")), planned(RECIPE)
    count = 2 * 512**2
    assert wide.held["weights"] == 2 * count
    assert narrow.held == wide.held | {"weights": 2 * count + 2 * 512, "low words": 0}  # with scales
    # The second layer's input gets a gradient, by W; without codes of its own it would be saved.
    assert wide.saved - narrow.saved == count // 2 + 512


def test_a_skipped_step_changes_no_word_and_a_measured_one_tells_what_moved() -> None:
    model, optimizer = made()
    train(model, optimizer, range(3))
    p, before = model[1].weight, [x.clone() for x in words(model, optimizer)]
    for q in model.parameters():
        q.grad = torch.full_like(q, torch.inf) if q is p else None
    optimizer.step()
    assert optimizer.skipped == {"1.weight": 1}
    optimizer.state[p]["skipped"].zero_()
    assert same(words(model, optimizer), before)
    found = []
    for backends in (("c",), ()):
        twin, taking = copy.deepcopy((model, optimizer))
        taking._engine.backends, taking.gauges = backends, True
        train(twin, taking, range(4, 5))
        found.append(taking.last_stats["1.weight"].sums)
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


def test_words_that_another_weight_replaces_are_noticed() -> None:
    runs = [made() for _ in range(2)]
    runs[1][1]._engine.backends = ()
    ends = []
    for model, optimizer in runs:
        train(model, optimizer, range(2))
        left = model[1].weight.detach()
        codes = left.codes.clone()
        model[1].weight.data = left.clone()
        train(model, optimizer, range(2, 3))
        assert torch.equal(left.codes.view(torch.uint8), codes.view(torch.uint8))
        ends.append(optimizer.full_weights()[model[1].weight])
    assert (ends[0] != ends[1]).double().mean() < 1e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AdamW(net().to(BF16).parameters(), weights="fp8split8"),
            r"params must be a Float8Weight for weights='fp8split8', as .*to_float8_weights makes them, got "
            r"torch.bfloat16 \(0.0\)",
        ),
        (
            lambda: AdamW([made()[0][1].weight], weights="split8"),
            r"weights must be 'fp8split8' for a Float8Weight, got 'split8' \(0.0\)",
        ),
        (lambda: AdamW([made()[0][1].weight], arithmetic="strict"), "must be stored in floats for arithmetic"),
        (lambda: ScheduleFreeAdamW([made()[0][1].weight]), "weights must not be 'fp8split8' for ScheduleFreeAdamW"),
        (lambda: made(around=CPUOffload), "params: 1.weight must be a plain tensor, got a Float8Weight"),
        (lambda: Recipe("", "", BF16, "fp8split8"), "linear must be a plan that multiplies weights in e4m3 .*None"),
        (
            lambda: Recipe("", "", BF16, "fp8split8", linear="SWITCHBACK"),
            "linear must be a plan that multiplies weights in e4m3 .*'SWITCHBACK: int8'",
        ),
        (
            lambda: Recipe("", "", torch.float32, "fp8split8", linear="TENSORWISE_FP8"),
            "dtype must be torch.bfloat16 for weights='fp8split8', got torch.float32",
        ),
        (lambda: Recipe("", "", torch.float32, "split"), "dtype must be torch.bfloat16 for weights='split', got"),
        (lambda: RECIPE.apply(nn.Embedding(4, 4)), "model must have linear layers for the plan .*, got none"),
    ],
    ids=range(10),
)
@pytest.mark.filterwarnings("ignore:swap_linears. no linear layer:UserWarning")
def test_what_cannot_be_is_refused_by_name(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_checkpoint_of_codes_does_not_load_into_plain_weights(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, range(2))
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=2)
    with pytest.raises(ValueError, match=r"model: the checkpoint has more: '1.weight.scale'"):
        load_checkpoint(path, model=net().to(BF16), optimizer=None)


def test_steps_in_backward_are_those_of_a_step() -> None:
    runs = []
    for backward in (False, True):
        model, options = net(), {"lr": 1e-2, "states": "log8", "min_quantized_size": 0}
        RECIPE.swap_layers(model.to(BF16))
        if backward:
            optimizer = step_in_backward(model, AdamW, **options)
        else:
            optimizer = AdamW(model.named_parameters(), **options)
        train(model, optimizer, range(4))
        runs.append((model, optimizer))
    assert same(words(*runs[0]), words(*runs[1]))
