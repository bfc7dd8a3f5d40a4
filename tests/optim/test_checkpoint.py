"""States that save: any storage loads into any other, what cannot be is refused, and nothing is lost in silence."""

import copy
import itertools
import warnings

import pytest
import torch
from checkpoint_runs import drive, everything, model, same

from narrowgauge.optim import LARS, SGD, Adagrad, Adam, AdamW, Lion, NarrowOptimizer
from narrowgauge.storage import mark_states, state_storages

pytestmark = pytest.mark.usefixtures("eager")

# The error of each storage at worst (signed, unsigned), over a block's largest magnitude.
COARSE = {
    "fp32": (0, 0), "bf16": (2**-8, 2**-8), "expansion": (2**-16, 2**-16),
    "8bit": (0.0071, 0.0036), "fp8": (0.036, 0.036), "4bit": (0.1126, 0.0626),
    # Of these moments; the range of a block decides.
    "log8": (0.016, 0.0625), "log4": (0.2, 0.3), "factored": (0, 1.0),
}  # fmt: skip


def moments(optimizer: NarrowOptimizer) -> dict[str, torch.Tensor]:
    return {
        f"{plan.name}.{slot.slot.name}": slot.decode(optimizer.state[p], p.shape)
        for p, plan in optimizer.plans()
        for slot in plan.slots
    }


def weights(optimizer: NarrowOptimizer) -> dict[str, torch.Tensor]:
    return {plan.name: plan.exact(p.detach(), optimizer.state[p])[0] for p, plan in optimizer.plans()}


def test_a_state_is_refused_by_parameters_of_its_names_in_another_order() -> None:
    net = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8, bias=False) for name in "abc"}).bfloat16()
    named = list(net.named_parameters())
    for _, p in named:
        p.grad = torch.ones_like(p)
    saved = AdamW(named, 0.1)
    saved.step()
    swapped = AdamW([named[0], named[2], named[1]], 0.1)
    with pytest.raises(ValueError, match=r"in the order of the state, got 'c\.weight' for 'b\.weight'$"):
        swapped.load_state_dict(saved.state_dict())
    assert not swapped.state
    for others in (named, [(f"module.{name}", p) for name, p in reversed(named)], [p for _, p in named]):
        AdamW(others, 0.1).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("old", "new"), list(itertools.product(state_storages(), repeat=2)), ids=str)
def test_every_state_storage_becomes_every_other(old: str, new: str) -> None:
    """Also with other blocks, and where small tensors were kept in fp32 by one side only."""
    saved = AdamW(model(), states={"m": old, "v": old}, block_size=64, min_quantized_size=50)
    drive(saved, range(3))
    for block, least in ((64, 50), (100, 0)):
        loaded = AdamW(model(), states={"m": new, "v": new}, block_size=block, min_quantized_size=least)
        plain = AdamW(model(), states="fp32")
        loaded.load_state_dict(saved.state_dict())
        plain.load_state_dict(saved.state_dict())
        wanted = moments(saved)
        assert same(moments(plain), wanted)
        for (p, plan), q in zip(loaded.plans(), saved.state, strict=True):
            assert loaded.state[p]["step"] == 3
            for slot in plan.slots:
                words, origin = slot.tensors(loaded.state[p]), slot.tensors(saved.state[q])
                key = f"{plan.name}.{slot.slot.name}"
                if old == new and block == 64:
                    assert same(words, origin)
                exact = wanted[key].double()
                miss = (slot.decode(loaded.state[p], p.shape).double() - exact).abs()
                bound = COARSE[slot.storage.name][not slot.slot.signed]
                assert (miss <= bound * blockwise_largest(exact, block)).all(), key
        drive(loaded, range(3, 4))


def blockwise_largest(x: torch.Tensor, block: int) -> torch.Tensor:
    flat = torch.nn.functional.pad(x.reshape(-1).abs(), (0, -x.numel() % block)).view(-1, block)
    return flat.amax(dim=1, keepdim=True).expand_as(flat).reshape(-1)[: x.numel()].view(x.shape)


@pytest.mark.parametrize("narrow", ["8bit", "fp8", "4bit"])
def test_what_was_quantized_comes_back_from_wider_states_as_it_was(narrow: str) -> None:
    first, wide, back = (AdamW(model(), states=states, min_quantized_size=0) for states in (narrow, "fp32", narrow))
    drive(first, range(3))
    wide.load_state_dict(first.state_dict())
    back.load_state_dict(wide.state_dict())
    assert same(moments(back), moments(first))


def test_marked_and_renamed_parameters_resume() -> None:
    def marked() -> AdamW:
        parameters = model()
        mark_states(parameters[0][1], "fp32")
        return AdamW(parameters, states="4bit", min_quantized_size=50)

    saved, same_marks, no_marks = marked(), marked(), AdamW(model(), states="4bit", min_quantized_size=50)
    drive(saved, range(3))
    for optimizer in (same_marks, no_marks):
        optimizer.load_state_dict(saved.state_dict())
    assert same(everything(saved), everything(same_marks))
    assert [row.states for row in no_marks.describe().rows] == ["m:4bit v:4bit", "m:4bit v:4bit", "m:fp32 v:fp32"]
    assert same(moments(no_marks)["odd.v"], moments(saved)["odd.v"])


@pytest.mark.parametrize(
    ("cls", "mark", "states"),
    [
        (AdamW, "8bit", "log8"), (AdamW, "log8", "8bit"), (AdamW, "log4", "4bit"),
        (Lion, "4bit", "log4"), (Lion, "log4", "4bit"),
    ],
)  # fmt: skip
def test_marks_tell_storages_whose_words_look_alike(cls: type, mark: str, states: str) -> None:
    """A first moment of one may be one of the other. A second moment tells the two apart without a mark."""

    def made(with_mark: bool) -> NarrowOptimizer:
        parameters = model()
        for _, p in parameters if with_mark else ():
            mark_states(p, mark)
        return cls(parameters, states=states, block_size=64, min_quantized_size=0)

    saved, plain = made(True), made(False)
    drive(saved, range(2))
    drive(plain, range(2))
    resumed = made(True)
    resumed.load_state_dict(saved.state_dict())
    assert same(everything(resumed), everything(saved))
    if cls is AdamW:
        for written, reader in ((plain, made(True)), (saved, made(False))):
            reader.load_state_dict(written.state_dict())
            wide = AdamW(model(), states="fp32")
            wide.load_state_dict(written.state_dict())
            assert same(moments(wide), moments(written))
            for name, wanted in moments(written).items():
                assert (moments(reader)[name] - wanted).abs().max() <= 0.3 * wanted.abs().max(), name


def test_hyperparameters_come_from_the_checkpoint_and_storages_stay() -> None:
    saved = AdamW(model(), lr=3e-4, betas=(0.8, 0.95), clip_updates=True, seed=7, states="8bit", nonfinite="raise")
    torch.optim.lr_scheduler.ConstantLR(saved)
    drive(saved, range(1))
    loaded = AdamW(model(), states="bf16", weights="split", block_size=32, fused=True)
    with pytest.warns(UserWarning, match=r"took clip_updates=True from the checkpoint, for False \(group 0\)"):
        loaded.load_state_dict(saved.state_dict())
    (found,) = loaded.param_groups
    assert (found["betas"], found["clip_updates"], found["seed"], found["nonfinite"]) == (
        (0.8, 0.95),
        True,
        7,
        "raise",
    )
    assert found["lr"] == saved.param_groups[0]["lr"]
    assert found["initial_lr"] == 3e-4
    assert (found["states"], found["weights"], found["block_size"], found["fused"]) == ("bf16", "split", 32, True)
    assert [row.rule for row in loaded.describe().rows] == ["adamw, clipped"] * 3
    drive(loaded, range(1, 2))


def test_only_plain_values_are_saved_and_none_is_shared() -> None:
    saved = AdamW(model(), states={"m": "8bit", "v": "fp32"}, weights="split8")
    drive(saved, range(2))

    def walk(value) -> None:
        if isinstance(value, dict):
            assert type(value) is dict
            for key, inner in value.items():
                assert isinstance(key, str | int)
                walk(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner)
        else:
            assert value is None or type(value) in (torch.Tensor, int, float, bool, str)

    walk(saved.state_dict())
    assert saved.state_dict()["param_groups"][0]["state_version"] == 1
    loaded = AdamW(model(), states={"m": "8bit", "v": "fp32"}, weights="split8")
    loaded.load_state_dict(saved.state_dict())
    before = everything(loaded)
    drive(saved, range(2, 3))
    assert same(everything(loaded), before)


def test_norms_of_percentile_clipping_are_dropped() -> None:
    """Earlier versions had that option: its norms are in their states, and its percentile in every group."""
    for percentile, dropped in ((90, True), (100, False)):
        saved, loaded = AdamW(model(), states="8bit"), AdamW(model(), states="8bit")
        drive(saved, range(3))
        former = copy.deepcopy(saved.state_dict())
        former["param_groups"][0]["percentile_clipping"] = percentile
        for state in former["state"].values() if dropped else ():
            state["grad_norms"] = torch.full((100,), torch.inf)
            state["grad_norms"][-3:] = torch.tensor([1.0, 2.0, 3.0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded.load_state_dict(former)
        assert [str(one.message) for one in caught] == [
            "state_dict: dropped percentile_clipping, which AdamW does not have (group 0); "
            "dropped 'grad_norms', which AdamW does not keep (weight, odd, bias)"
        ] * dropped
        assert ("grad_norms" in former["state"][0]) == dropped  # which stays as its owner has it
        assert "percentile_clipping" not in loaded.param_groups[0]
        assert same(everything(saved), everything(loaded))
    with pytest.raises(TypeError, match="unexpected keyword argument 'percentile_clipping'"):
        AdamW(model(), percentile_clipping=5)


def broken(change) -> dict:
    saved = AdamW(model(), states="8bit", min_quantized_size=50, weights="split")
    drive(saved, range(1))
    state_dict = copy.deepcopy(saved.state_dict())
    change(state_dict)
    return state_dict


def group(state_dict: dict) -> dict:
    return state_dict["param_groups"][0]


def odd(state_dict: dict) -> dict:
    return state_dict["state"][1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: group(s).update(state_version=2), "state_version of group 0 must be 1, got 2"),
        (lambda s: group(s).pop("block_size"), "group 0 must have 'block_size'"),
        (lambda s: group(s).update(states="7bit"), "group 0: states.*'7bit'"),
        (lambda s: s.pop("state"), r"must be a dict with 'state' .*, got \['param_groups'\]"),
        (
            lambda s: s["param_groups"].append(group(s)),
            "groups have 3 parameters, those that were saved 3 and 3: make",
        ),
        (lambda s: odd(s).pop("step"), "odd must have 'step', got"),
        (lambda s: odd(s).pop("m.scales"), "'m' of odd must be a moment of .* got {'codes': "),
        (
            lambda s: [odd(s).pop(f"v.{word}") for word in ("codes", "scales")],
            "odd must have 'v' for AdamW, got",
        ),
        (
            lambda s: odd(s).update({"v.scales": torch.ones(9)}),
            r"'v' of odd must be a moment of .*'scales': .*\(9,\)",
        ),
        (
            lambda s: s["state"].update({0: odd(s)}),
            r"'m' of weight is of shape \(7, 13\) in the checkpoint, and the parameter has \(33, 40\)$",
        ),
        (
            lambda s: odd(s).update({"weight.lo": torch.ones(11, dtype=torch.int16)}),
            r"'weight.lo' of odd must have shape",
        ),
        (
            lambda s: odd(s).update({"m.codes": {}}),
            r"'m\.codes' of odd must be a tensor or a number, got dict",
        ),
        (lambda s: odd(s).update({"step": torch.ones(3)}), r"'step' of odd must have shape \(\), got \(3,\)"),
    ],
    ids=range(13),
)
def test_what_cannot_be_loaded_is_refused_and_changes_nothing(change, words: str) -> None:
    optimizer = AdamW(model(), lr=0.1, states="bf16", weights="split")
    drive(optimizer, range(2))
    before = everything(optimizer)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(broken(change))
    assert same(everything(optimizer), before)


@pytest.mark.parametrize("states", ["fp32", "bf16", "expansion", "8bit", "log8"])
def test_a_state_of_another_shape_is_refused_with_both_shapes(states: str) -> None:
    def head(classes: int) -> AdamW:
        p = torch.nn.Linear(64, classes, bias=False, dtype=torch.bfloat16).weight
        p.grad = torch.ones_like(p)
        return AdamW([("head.weight", p)], states=states, min_quantized_size=0)

    saved = head(4)
    saved.step()
    words = r"'[mv]' of head.weight is of shape \(4, 64\) in the checkpoint, and the parameter has \(7, 64\)$"
    with pytest.raises(ValueError, match=words):
        head(7).load_state_dict(saved.state_dict())


def test_states_of_other_rules_are_taken_as_far_as_they_go() -> None:
    adam, lion, adagrad, sgd = Adam(model()), Lion(model()), Adagrad(model()), SGD(model(), momentum=0.9)
    for optimizer in (adam, lion, adagrad, sgd):
        drive(optimizer, range(2))
    AdamW(model()).load_state_dict(adam.state_dict())
    words = (
        r"took moments of 'adam' for those of 'lion', which may be other averages \(group 0\); "
        r"dropped 'v', which Lion does not keep \(weight, odd, bias\)$"
    )
    with pytest.warns(UserWarning, match=words):
        Lion(model()).load_state_dict(adam.state_dict())
    with pytest.warns(UserWarning, match=r"took moments of 'sgd' for those of 'lars', which may be other averages"):
        LARS(model()).load_state_dict(sgd.state_dict())
    with pytest.raises(ValueError, match="weight must have 'v' for AdamW, got"):
        AdamW(model()).load_state_dict(lion.state_dict())
    with pytest.raises(ValueError, match="weight must have 'm'"):
        AdamW(model()).load_state_dict(adagrad.state_dict())
    # Momentum is the checkpoint's to say, and so is whether there is a state for it.
    bare = SGD(model())
    bare.load_state_dict(sgd.state_dict())
    assert same(moments(bare), moments(sgd))


@pytest.mark.gpu
@pytest.mark.parametrize("states", state_storages())
def test_devices_may_change_between_saving_and_loading(states: str) -> None:
    def on(device: str, states: str) -> AdamW:
        parameters = [(name, p.detach().to(device).requires_grad_()) for name, p in model()]
        return AdamW(parameters, states={"m": states, "v": states}, weights="split", min_quantized_size=50)

    cpu, gpu, back, wide = on("cpu", states), on("cuda", states), on("cpu", states), on("cuda", "fp32")
    drive(cpu, range(3))
    gpu.load_state_dict(cpu.state_dict())
    assert all(value.device.type == "cuda" for state in gpu.state.values() for value in state.values())
    back.load_state_dict(gpu.state_dict())
    assert same(everything(cpu)[0], everything(back)[0])
    wide.load_state_dict(cpu.state_dict())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(moments(wide).values(), moments(cpu).values(), strict=True))


def test_first_moments_survive_second_ones_that_were_kept_as_zero() -> None:
    """An embedding's rows have scales of their own: the paper's codes forget some v, and `log8` drops their m."""
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.zeros(64, 96))
    saved, loaded, wide = (
        AdamW([("embedding", table)], states=states, min_quantized_size=0) for states in ("8bit", "log8", "fp32")
    )
    scale = 10 ** (6 * torch.rand(64, 1, generator=generator) - 6)
    for _ in range(20):
        table.grad = scale * torch.randn(table.shape, generator=generator)
        saved.step()
    with pytest.warns(UserWarning, match=r"dropped 'm' where 'v' is 0 \(embedding\)"):
        loaded.load_state_dict(saved.state_dict())
    wide.load_state_dict(saved.state_dict())
    wanted, found = moments(wide), moments(loaded)
    there = wanted["embedding.v"] > 0
    assert 0.05 < 1 - float(there.float().mean()) < 0.7
    for rows in (scale.flatten() > 1e-2, scale.flatten() <= 1e-2):
        m, n = (x["embedding.m"] * there for x in (wanted, found))
        assert float((m - n)[rows].norm() / m[rows].norm()) < 0.02
    assert not found["embedding.m"][~there].any()
    # From then on every step is an ordinary one.
    before = table.detach().clone()
    table.grad = scale * torch.randn(table.shape, generator=generator)
    loaded.step()
    assert float((table.detach() - before).abs().max()) < 10e-3
