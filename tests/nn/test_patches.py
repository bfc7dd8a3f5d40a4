"""Patch dropout and norms on patches, in CLIP's and ViT's image towers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from narrowgauge.nn import PatchNorm, add_patch_dropout, add_patch_norm, drop_patches, patches_left
from narrowgauge.trainers._image_models import IMAGE_PRESETS, build_image_model


def model(name: str) -> Any:
    return build_image_model(IMAGE_PRESETS[name], 300, context=16, seed=0)


def embedded(of: Any, images: torch.Tensor) -> torch.Tensor:
    tower = of.vision_model if hasattr(of, "vision_model") else of.vit
    return tower.embeddings(images)


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_patches_are_dropped_and_the_class_token_stays() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(2 * 9 * 3).reshape(2, 9, 3).float()
    kept = drop_patches(tokens, 0.5)
    assert kept.shape == (2, 5, 3)
    assert torch.equal(kept[:, 0], tokens[:, 0])
    for of, whole in zip(kept, tokens, strict=True):
        places = [int((whole == token).all(1).nonzero()) for token in of]
        assert len(set(places)) == 5
        assert 0 not in places[1:]
    seen = {tuple(drop_patches(tokens, 0.5)[0, :, 0].tolist()) for _ in range(20)}
    assert len(seen) > 5  # others each time


def test_every_patch_is_as_likely_to_stay() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(9.0).repeat(4000, 1)[:, :, None]
    counts = drop_patches(tokens, 0.75)[:, 1:].flatten().long().bincount(minlength=9)[1:]
    assert counts.double().div(4000).tolist() == pytest.approx([0.25] * 8, abs=0.03)
    assert [patches_left(16, share) for share in (0.0, 0.5, 0.97, 0.999)] == [16, 8, 1, 1]  # one at least


@pytest.mark.parametrize("name", ["clip-micro", "vit-micro"])
def test_dropout_is_for_training_alone(name: str) -> None:
    of, plain = model(name), model(name)
    remove = add_patch_dropout(of, 0.5)
    assert embedded(of, images()).shape[1] == 9
    assert torch.equal(embedded(of.eval(), images()), embedded(plain, images()))
    assert of.state_dict().keys() == plain.state_dict().keys()
    remove()
    assert torch.equal(embedded(of.train(), images()), embedded(plain, images()))


@pytest.mark.parametrize("name", ["clip-micro", "vit-micro"])
@pytest.mark.parametrize("where", ["before", "after"])
def test_the_norm_by_hand(name: str, where: Any) -> None:
    """Against unfolded patches and a matrix product in float64."""
    of = model(name).double()
    path = add_patch_norm(of, where)
    assert path in {n for n, _ in of.named_modules()}
    norm = of.get_submodule(path)
    assert isinstance(norm, PatchNorm)
    layer = of.get_submodule(path.removesuffix(".patch_norm"))
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        norm.bias.normal_()
    found = layer(images().double())
    patches = F.unfold(images().double(), 8, stride=8).transpose(1, 2)
    if where == "before":
        patches = F.layer_norm(patches, patches.shape[-1:], norm.weight, norm.bias)
    wanted = patches @ layer.weight.flatten(1).T + (0 if layer.bias is None else layer.bias)
    if where == "after":
        wanted = F.layer_norm(wanted, wanted.shape[-1:], norm.weight, norm.bias)
    assert torch.allclose(found.flatten(2).transpose(1, 2), wanted, atol=1e-12)


def test_checkpoints_gain_the_norm_and_copies_have_their_own() -> None:
    of = model("vit-micro").to(torch.bfloat16)
    before = set(of.state_dict())
    path = add_patch_norm(of, "after")
    assert set(of.state_dict()) - before == {f"{path}.weight", f"{path}.bias"}
    assert before <= set(of.state_dict())
    assert of.get_submodule(path).weight.dtype == torch.bfloat16
    assert embedded(of, images().bfloat16()).dtype == torch.bfloat16
    other = copy.deepcopy(of)
    torch.nn.init.zeros_(other.get_submodule(path).weight)  # a copy has a norm of its own
    assert not torch.equal(embedded(of, images().bfloat16()), embedded(other, images().bfloat16()))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"share must be a number from 0 to below 1.*, got 1"):
        add_patch_dropout(model("clip-micro"), 1)
    with pytest.raises(ValueError, match=r"model must have one image tower.*, got Linear"):
        add_patch_dropout(nn.Linear(2, 2), 0.5)
    with pytest.raises(ValueError, match=r"where must be 'before' or 'after'.*, got 'behind'"):
        add_patch_norm(model("clip-micro"), "behind")  # type: ignore[arg-type]
    of = model("clip-micro")
    add_patch_norm(of, "after")
    with pytest.raises(ValueError, match=r"model must not have a patch_norm already"):
        add_patch_norm(of, "after")
