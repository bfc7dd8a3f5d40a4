"""Bad input: one error that names the argument, what it must be and what it is; and nothing half done."""

import re
import warnings

import pytest
import torch

from narrowgauge.optim import Adafactor, AdamW, AdamW8bit


def parameter(dtype: torch.dtype = torch.float32, size: int = 8) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(size, dtype=dtype))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"amsgrad": True}, "amsgrad must be False for AdamW, got True"),
        ({"weights": "fp32"}, "weights.*'fp32'"),
        ({"states": "fp16"}, "states.*'fp16'"),
        ({"states": {"m": "8bit"}}, r"states must name a storage for each of \['m', 'v'\] \(adamw\), got \['m'\]"),
        ({"states": {"m": "8bit", "v": "fp3"}}, "states.*'fp3'"),
        ({"arithmetic": "exact"}, "arithmetic must be 'fp32' or 'strict', got 'exact'"),
        ({"nonfinite": "ignore"}, "nonfinite must be .*, got 'ignore'"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"seed": -3}, "seed must be .*, got -3"),
        ({"capturable": True, "nonfinite": "raise"}, "capturable must be False with .*nonfinite='raise'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_options_are_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdamW([parameter()], **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_dtypes_are_refused_by_parameter(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"params must be float32, .*, got {dtype} \(head\.weight\)"):
        AdamW([("head.weight", torch.nn.Parameter(torch.ones(3).to(dtype)))])


@pytest.mark.parametrize("model", [torch.nn.Linear(3, 3), torch.nn.Sequential(torch.nn.Linear(3, 3))])
def test_a_model_in_place_of_its_parameters_is_refused(model: torch.nn.Module) -> None:
    message = r"params must be parameters, got a model: pass AdamW8bit\(model\.named_parameters\(\)\)"
    with pytest.raises(TypeError, match=message):
        AdamW8bit(model)


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ("is_paged", "narrowgauge.distributed.CPUOffload"),
        ("percentile_clipping", "clip_updates=True .* max_grad_norm"),
        ("block_wise", "block_size elements a block"),
        ("optim_bits", "states='8bit' or states='fp32'"),
        ("args", "give each option as a keyword"),
        ("min_8bit_size", "min_quantized_size"),
    ],
)
def test_an_argument_of_bitsandbytes_is_refused_with_what_to_use(argument: str, instead: str) -> None:
    message = rf"AdamW8bit\(\) got an unexpected keyword argument '{argument}': .*{instead}"
    with pytest.raises(TypeError, match=message):
        AdamW8bit([parameter()], **{argument: None})


def test_a_misspelled_argument_is_refused_with_the_nearest() -> None:
    for given, near in (("weightdecay", "weight_decay"), ("state", "states"), ("beta2_schedul", "beta2_schedule")):
        message = rf"^AdamW8bit\(\) got an unexpected keyword argument '{given}'; the nearest is '{near}'$"
        with pytest.raises(TypeError, match=message):
            AdamW8bit([parameter()], **{given: 0.1})
    with pytest.raises(TypeError, match=r"argument 'x'$"):
        AdamW8bit([parameter()], x=1)


def test_a_refused_group_leaves_the_optimizer_as_it_was() -> None:
    p = parameter()
    optimizer = AdamW([p])
    with pytest.raises(
        ValueError, match=r"params must be bfloat16 for weights='split', got torch\.float32 \(1\.0\)"
    ):
        optimizer.add_param_group({"params": [parameter()], "weights": "split"})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(optimizer.describe().rows) == 1


def test_describe_shows_every_decision() -> None:
    big = torch.nn.Parameter(torch.ones(64, 100, dtype=torch.bfloat16))
    small = torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = AdamW8bit([("block.weight", big), ("block.bias", small)], weights="split8")
    text = str(optimizer.describe())
    rows = {row.parameter: row for row in optimizer.describe().rows}
    assert rows["block.weight"].states == "m:log8 v:log8"
    assert rows["block.weight"].bytes == 6400 * 3 + 2 * 4 * 25
    assert rows["block.bias"].states == "m:fp32 v:fp32"
    assert rows["block.bias"].why == "m, v in fp32: fewer than min_quantized_size=4096 elements"
    for word in ("block.weight", "6,400", "bfloat16", "adamw", "split8", "19.5 kB", "fused C, fp32"):
        assert word in text
    assert AdamW([big], states="8bit").describe().rows[0].parameter == "0.0"


def test_groups_that_share_names_are_told_apart() -> None:
    layers = [torch.nn.Linear(3, 3) for _ in range(2)]
    optimizer = AdamW([{"params": list(layer.named_parameters())} for layer in layers])
    optimizer.gauges = True
    for layer in layers:
        layer(torch.ones(1, 3)).sum().backward()
    layers[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert set(optimizer.last_stats) == {"weight", "bias", "1.weight", "1.bias"}
    assert optimizer.skipped == {"weight": 1}


def test_load_hooks_have_their_say() -> None:
    """A pre-hook that puts the parameters into another order, and a post-hook that changes what was loaded."""
    a, b = parameter(torch.bfloat16), parameter(torch.bfloat16)
    optimizer = AdamW([("a", a), ("b", b)])
    a.grad, b.grad = torch.ones_like(a), 100 * torch.ones_like(b)
    optimizer.step()
    saved = optimizer.state_dict()
    other = AdamW([("b", b), ("a", a)])
    other.gauges = True

    def reorder(loading, state_dict):
        state = {0: state_dict["state"][1], 1: state_dict["state"][0]}
        return state_dict | {"state": state, "param_groups": loading.state_dict()["param_groups"]}

    def halve(loaded) -> None:
        loaded.state[a]["v"] *= 0.5

    other.register_load_state_dict_pre_hook(reorder)
    other.register_load_state_dict_post_hook(halve)
    other.load_state_dict(saved)
    assert other.state[a]["m"][0].item() == pytest.approx(0.1)
    assert other.state[b]["m"][0].item() == pytest.approx(10.0)
    assert other.state[a]["m"].dtype == torch.float32
    assert other.state[a]["v"][0].item() == pytest.approx(0.0005)
    assert other.gauges is True


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_of_one_element_serves_as_torchs_do(shape: tuple[int, ...]) -> None:
    """torch's GradScaler leaves a `grad_scale` in either shape."""
    p, twin = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, torchs = AdamW([p]), torch.optim.AdamW([twin], fused=True)
    for found in (1.0, 0.0):
        for some, param in ((optimizer, p), (torchs, twin)):
            param.grad = torch.tensor([8.0, -16.0, 24.0])
            some.grad_scale, some.found_inf = torch.full(shape, 8.0), torch.tensor(found)
            some.step()
        assert torch.equal(p, torch.ones(3)) == bool(found)
    torch.testing.assert_close(p, twin)


class Unwrapping(torch.Tensor):
    """A tensor whose operations are those of the tensor inside, but for some that it does not know."""

    unknown: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Unwrapping":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in cls.unknown:
            raise NotImplementedError(f"{name} is not known")
        inner = [x.inner if isinstance(x, Unwrapping) else x for x in args]
        out = func(*inner, **(kwargs or {}))
        return cls(out) if name in ("detach", "clone", "alias", "view") else out


def test_a_tensor_with_operations_of_its_own_takes_a_step() -> None:
    p, plain = (torch.nn.Parameter(x) for x in (Unwrapping(torch.ones(3)), torch.ones(3)))
    for param in (p, plain):
        param.grad = torch.tensor([1.0, -2.0, 3.0])
        AdamW([param], lr=0.1).step()
    assert torch.equal(p.inner, plain)


class Halfway(Unwrapping):
    unknown = ("_to_copy", "addcmul", "mul")


class Fixed(Unwrapping):
    unknown = ("copy_",)


@pytest.mark.parametrize(("kind", "unknown"), [(Halfway, "mul is not known"), (Fixed, "copy_ is not known")])
def test_a_tensor_that_cannot_take_a_step_is_refused_before_anything_moves(kind: type, unknown: str) -> None:
    first, last = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(kind(torch.ones(3)))
    optimizer = AdamW([("first", first), ("last", last)])
    for p in (first, last):
        p.grad = torch.ones(3)
    with pytest.raises(TypeError, match=f"class of last, {kind.__name__}, must know all .*{unknown}"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))
    assert optimizer.state[first]["step"] == 0


def test_a_key_of_a_group_that_is_nearly_an_options_name_is_warned_of() -> None:
    """torch ignores it; other keys are those of schedulers and frameworks."""
    p = torch.nn.Parameter(torch.ones(4))
    for key, name in (("weigth_decay", "weight_decay"), ("beta1", "betas"), ("state", "states")):
        with pytest.warns(
            UserWarning, match=rf"^param_groups: '{key}' does nothing; is '{name}' meant\?$"
        ) as caught:
            AdamW([{"params": [p], key: 0.5}])
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = {
            "lr_scale": 1.0,
            "initial_lr": 1e-3,
            "max_lr": 1.0,
            "weight_decay_mult": 0.0,
            "param_names": ["p"],
        }
        AdamW([{"params": [p], "name": "all", "wd": 0.1, **others}])


def test_a_parameter_that_is_given_twice_is_stepped_once() -> None:
    """As tied weights are by `named_parameters(remove_duplicate=False)`; torch warns."""
    ends = []
    for names in (("a",), ("a", "a")):
        p = torch.nn.Parameter(torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = AdamW([(name, p) for name in names], lr=0.1)
        p.grad = torch.ones(3)
        optimizer.step()
        ends.append((p.tolist(), optimizer.param_groups[0]["param_names"], float(optimizer.state[p]["step"])))
    assert ends[0] == ends[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = torch.optim.AdamW([p, p]), AdamW([p, p])
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert float(ours.state[p]["step"]) == 2


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (
            "scale_parameter",
            "'scale_parameter': eps=(None, 1.0) is scale_parameter=False for weights of a root mean square up to 1",
        ),
        ("is_paged", "'is_paged': narrowgauge.distributed.CPUOffload keeps states on the host"),
        ("set_grad_none", "'set_grad_none'"),
        ("weight_deacy", "'weight_deacy'; the nearest is 'weight_decay'"),
    ],
)
def test_other_libraries_arguments_have_a_hint(option: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words) + "$"):
        Adafactor([torch.nn.Parameter(torch.ones(3))], **{option: True})
