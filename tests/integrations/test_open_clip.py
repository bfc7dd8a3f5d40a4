"""open_clip finds our layers where it looks for bitsandbytes', and its own training script trains with them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from libraries import library, open_clip_cleaned_up
from narrowgauge.linear import SWITCHBACK, SWITCHBACK_M, SWITCHBACK_Q, LinearPlan, LowPrecisionLinear, quantize

open_clip = library("open_clip")
ours = library("narrowgauge.integrations.open_clip")

PLANS = {
    "SwitchBackLinear": SWITCHBACK,
    "SwitchBackLinearGlobal": SWITCHBACK,
    "SwitchBackLinearVectorwise": SWITCHBACK_Q,
    "SwitchBackLinearGlobalMemEfficient": SWITCHBACK_M,
}
every_layer = pytest.mark.parametrize(("name", "plan"), PLANS.items())


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with open_clip_cleaned_up():
        yield


def made(name: str, bias: bool = True) -> Any:
    """A layer as open_clip's `replace_linear` makes it."""
    torch.manual_seed(0)
    return getattr(ours, name)(32, 48, bias)


X = torch.linspace(-2, 3, 2 * 5 * 32).sin().view(2, 5, 32)


# The layers


@every_layer
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_that_of_its_plan(name: str, plan: LinearPlan, bias: bool) -> None:
    assert list(inspect.signature(getattr(ours, name)).parameters)[:5] == [
        "in_features", "out_features", "bias", "device", "dtype",
    ]  # fmt: skip
    layer = made(name, bias)
    twin = LowPrecisionLinear(32, 48, bias, plan)
    twin.load_state_dict(layer.state_dict())
    results = []
    for one in (layer, twin):
        x = X.clone().requires_grad_()
        y = one(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in one.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@every_layer
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_prepared_for_evaluation_gives_the_same_numbers(name: str, plan: LinearPlan, bias: bool) -> None:
    layer = made(name, bias).eval()
    before, path = layer(X), layer.path
    layer.prepare_for_eval()
    with torch.no_grad():
        assert torch.equal(layer(X), before)
    assert layer.path == path
    assert layer.state_dict().keys() == {"weight_codes", "weight_scale"} | ({"bias"} if bias else set())
    assert layer.weight_codes.dtype == torch.int8
    with pytest.raises(RuntimeError, match="no backward pass: evaluate under"):
        layer(X.clone().requires_grad_())


def test_under_autocast_the_codes_are_those_of_the_weight_itself() -> None:
    layer = made("SwitchBackLinearGlobal").eval()
    weight = quantize(layer.weight.detach(), "tensor").dequantize(torch.float64)
    layer.prepare_for_eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = layer(X)
    x = X.bfloat16().view(-1, 32)
    exact = quantize(x, "row").dequantize(torch.float64) @ weight.t() + layer.bias.detach().bfloat16().double()
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.double().view(-1, 48), exact, rtol=2**-8, atol=1e-6)


# Where open_clip looks


def replaced(name: str) -> Any:
    """The class that `--use-bnb-linear NAME` finds, by the lines of open_clip's main."""
    bnb = importlib.import_module("bitsandbytes")
    return getattr(bnb.nn.triton_based_modules, name)


@every_layer
def test_without_bitsandbytes_its_place_is_ours(name: str, plan: LinearPlan) -> None:
    for _ in range(2):
        ours.install()
        assert replaced(name) is getattr(ours, name)
    assert "narrowgauge.integrations.open_clip" in repr(sys.modules["bitsandbytes"])
    with pytest.raises(AttributeError, match=r"has no 'StandardLinear': it is a stand-in by narrowgauge"):
        replaced("StandardLinear")
    with pytest.raises(ImportError):
        importlib.import_module("bitsandbytes.optim")


def test_a_stand_in_is_no_bitsandbytes_to_those_who_ask() -> None:
    """transformers, accelerate and timm say as before that there is none, and peft adapts layers as before."""
    transformers, accelerate = library("transformers.utils"), library("accelerate.utils")
    peft, timm = library("peft"), library("timm.optim")
    ours.install()
    for asked in (transformers.is_bitsandbytes_available, accelerate.is_bnb_available):
        fresh = getattr(asked, "__wrapped__", asked)
        assert fresh() is False
    assert importlib.util.find_spec("bitsandbytes").loader is None
    assert peft.import_utils.is_bnb_4bit_available.__wrapped__() is False
    peft.import_utils.is_bnb_available.cache_clear()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"]))
    assert adapted(torch.zeros(1, 8)).shape == (1, 8)
    peft.import_utils.is_bnb_available.cache_clear()
    assert "bnbadamw8bit" in timm.list_optimizers()


@pytest.mark.parametrize("triton", [False, True], ids=["0.50", "0.41"])
def test_an_installed_bitsandbytes_keeps_all_but_the_four_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, triton: bool
) -> None:
    nn = tmp_path / "bitsandbytes" / "nn"
    nn.mkdir(parents=True)
    (nn.parent / "__init__.py").write_text("from . import nn\n__version__ = '0.5'")
    (nn / "__init__.py").write_text("class Linear8bitLt: ...\n" + triton * "from . import triton_based_modules\n")
    if triton:
        (nn / "triton_based_modules.py").write_text("class SwitchBackLinear: ...\nclass StandardLinear: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    ours.install()
    assert all(replaced(name) is getattr(ours, name) for name in PLANS)
    bnb = sys.modules["bitsandbytes"]
    assert bnb.__version__ == "0.5"
    assert bnb.nn.Linear8bitLt.__module__ == "bitsandbytes.nn"
    assert hasattr(bnb.nn.triton_based_modules, "StandardLinear") == triton


# open_clip's own script


SIZES = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "layers": 2, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


@pytest.mark.filterwarnings("ignore")  # open_clip's own
def test_open_clips_script_trains_by_switchback_and_stable_adamw(tmp_path: Path) -> None:
    image = library("PIL.Image")
    library("open_clip_train.data")
    noise = torch.randint(256, (16, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rows = ["filepath\ttitle"]
    for i, pixels in enumerate(noise):
        image.fromarray(pixels.numpy()).save(tmp_path / f"{i}.png")
        rows.append(f"{tmp_path}/{i}.png\tpicture {i}")
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    (tmp_path / "tiny.json").write_text(json.dumps(SIZES))
    open_clip.add_model_config(tmp_path / "tiny.json")
    command = f"""--model tiny --train-data {tmp_path}/pairs.csv --logs {tmp_path} --name run --device cpu
        --workers 0 --precision amp_bf16 --batch-size 4 --epochs 1 --warmup 1 --lr 1e-3 --opt timm/ngstableadamw
        --use-bnb-linear SwitchBackLinearGlobal --log-every-n-steps 1"""
    arguments = list(sys.argv)
    ours.main(command.split())
    assert sys.argv == arguments
    log = (tmp_path / "run" / "out.log").read_text()
    assert "(c_fc): SwitchBackLinear(in_features=32, out_features=128, bias=True, plan='SWITCHBACK: int8')" in log
    assert "Created StableAdamW (timm/ngstableadamw) optimizer: lr: 0.001" in log
    assert log.count("Contrastive_loss") == 4

    # What it saved loads, into a model and an optimizer made as it makes them.
    saved = library("open_clip_train.file_utils").pt_load(str(tmp_path / "run" / "checkpoints" / "epoch_1.pt"))
    torch.manual_seed(0)
    model = open_clip.create_model("tiny")
    start = model.visual.transformer.resblocks[0].mlp.c_fc.weight.detach().clone()
    open_clip.utils.replace_linear(model, ours.SwitchBackLinearGlobal)
    model.load_state_dict(saved["state_dict"])
    optimizer = library("timm.optim").create_optimizer_v2(
        model, "ngstableadamw", lr=1e-3, weight_decay=0.2, eps=None
    )
    optimizer.load_state_dict(saved["optimizer"])
    assert isinstance(optimizer, ng.optim.StableAdamW)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    layer = model.visual.transformer.resblocks[0].mlp.c_fc
    # Four steps at most as long as the learning rates, and the decay, from the weights of the same seed.
    assert 1e-4 < float((layer.weight - start).abs().max()) < 5e-3

    # And it evaluates with weights in eight bits.
    pixels, tokens = torch.randn(2, 3, 16, 16), torch.arange(16).view(2, 8)
    model.eval()
    with torch.no_grad():
        before = model(pixels, tokens)
        open_clip.utils.convert_int8_model_to_inference_mode(model)
        after = model(pixels, tokens)
    assert layer.int8_original_dtype == torch.float32
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
