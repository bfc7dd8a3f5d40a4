"""What image models are asked: the contrastive loss, accuracies, and captions as tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictured import class_folder, csv_pairs
from torch import nn

from narrowgauge.recipes._losses import contrast, normalized, unit_pairs
from narrowgauge.trainers import DataError, TrainSettings
from narrowgauge.trainers._captions import learned_captions, read_captions
from narrowgauge.trainers._data import open_task
from narrowgauge.trainers._flops import flops_per_image
from narrowgauge.trainers._image_models import IMAGE_PRESETS, ClipSizes, build_image_model, clip_model, vit_model
from narrowgauge.trainers._image_text import accuracy
from narrowgauge.trainers._tokens import END_OF_TEXT

pytestmark = pytest.mark.usefixtures("surroundings")


def silent(stage: str, fraction: float) -> None:
    pass


@pytest.fixture
def pairs(tmp_path: Path) -> TrainSettings:
    return TrainSettings(
        data=csv_pairs(tmp_path), model="clip-micro", batch=4, vocabulary=300, validation_windows=6, workers=2
    )


@given(st.integers(1, 9), st.integers(1, 7), st.floats(0.0, math.log(100)), st.integers(0, 2**31))
def test_the_loss_in_float64(n: int, width: int, scale: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    images, texts = (torch.randn(n, width, generator=draw) for _ in range(2))
    units = [x.double() / x.double().norm(dim=1, keepdim=True) for x in (images, texts)]
    cosines = math.exp(scale) * units[0] @ units[1].T
    own = cosines.diagonal()
    wanted = ((cosines.logsumexp(1) - own).mean() + (cosines.logsumexp(0) - own).mean()) / 2
    found = contrast(unit_pairs(images, texts), slice(None), torch.tensor(scale))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4, abs=1e-4)
    turned = contrast(unit_pairs(texts, images), slice(None), torch.tensor(scale))
    assert turned.item() == pytest.approx(found.item(), abs=1e-5)
    # Of features lengths do not matter, and pairs may stand in any order.
    order = torch.randperm(n, generator=draw)
    again = contrast(unit_pairs(8 * images[order], texts[order] / 4), slice(None), torch.tensor(scale))
    assert again.item() == pytest.approx(found.item(), abs=1e-4)


@given(st.integers(1, 4), st.integers(1, 4), st.floats(0.0, 3.0), st.integers(0, 2**31))
def test_equal_shares_have_the_loss_and_gradients_of_all(shares: int, each: int, scale: float, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    images, texts = (torch.randn(shares * each, 5, generator=draw).requires_grad_() for _ in range(2))
    logit_scale = torch.tensor(scale, requires_grad=True)
    leaves, pairs = [images, texts, logit_scale], unit_pairs(images, texts)
    assert pairs.detach().view(-1, 2, 5).norm(dim=2).sub(1).abs().max() < 1e-6
    rows = [slice(n * each, (n + 1) * each) for n in range(shares)]
    mean = torch.stack([contrast(pairs, some, logit_scale) for some in rows]).mean()
    whole = contrast(unit_pairs(images, texts), slice(None), logit_scale)
    torch.testing.assert_close(mean, whole, rtol=1e-5, atol=1e-5)
    for one, two in zip(torch.autograd.grad(mean, leaves), torch.autograd.grad(whole, leaves), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_the_loss_is_transformers_own(pairs: TrainSettings) -> None:
    opened = open_task(pairs, silent)
    model = build_image_model(IMAGE_PRESETS["clip-micro"], 300, context=16, seed=0)
    examples = opened.task.draw()
    assert examples["images"].dtype == torch.uint8
    said = model(
        input_ids=examples["tokens"], pixel_values=normalized(examples["images"]), return_loss=True
    )  # fmt: skip
    assert opened.task.loss(model, examples).item() == pytest.approx(said.loss.item(), rel=1e-5)
    assert said.loss.item() == pytest.approx(math.log(4), rel=0.3)


def test_accuracies_by_hand() -> None:
    scores = torch.tensor([[5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 0, 0]]).float()
    # First; fifth; last; and one that cannot tell.
    assert accuracy(scores, torch.tensor([0, 4, 5, 0])) == {1: 0.25, 5: 0.5}


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**31))
def test_accuracies_against_sorting(n: int, columns: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    scores, right = torch.randn(n, columns, generator=draw), torch.randint(columns, (n,), generator=draw)
    for top, share in accuracy(scores, right).items():
        best = scores.argsort(1, descending=True)[:, :top]
        assert share == pytest.approx((best == right[:, None]).any(1).double().mean().item())


class Oracle(nn.Module):
    """A CLIP whose features of a caption and of its image are what a table says."""

    def __init__(self, task: Any, wrong: int) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))
        examples = task.validation()
        self.by_image = {tuple(i.flatten().tolist()): n for n, i in enumerate(normalized(examples["images"]))}
        self.by_row = {tuple(row.tolist()): n for n, row in enumerate(examples["tokens"])}
        self.wrong, self.count = wrong, len(self.by_row)

    def features(self, numbers: list[int]) -> Any:
        return SimpleNamespace(pooler_output=torch.eye(self.count)[numbers])

    def get_text_features(self, rows: torch.Tensor) -> Any:
        return self.features([self.by_row[tuple(row.tolist())] for row in rows])

    def get_image_features(self, pixel_values: torch.Tensor) -> Any:
        found = [self.by_image[tuple(i.flatten().tolist())] for i in pixel_values]
        return self.features([(n + 1) % self.count if n < self.wrong else n for n in found])


def test_zero_shot_accuracy_is_of_all_held_out_captions(pairs: TrainSettings) -> None:
    """In parts of any size: a model that has three of eight wrong gets five eighths."""
    many = replace(pairs, validation_data=pairs.data, validation_windows=8)
    task = open_task(many, silent).task
    model = Oracle(task, wrong=3)
    examples = task.validation()
    assert model.count == 8
    for size in (1, 3, 8):
        parts = [{k: v[i : i + size] for k, v in examples.items()} for i in range(0, 8, size)]
        assert task.metrics(model, parts.copy)["zero_shot_top1"] == 5 / 8


def test_held_out_classes_are_asked_for_by_their_names(tmp_path: Path) -> None:
    settings = TrainSettings(
        data=class_folder(tmp_path, each=10), model="clip-micro", batch=4, vocabulary=300, validation_windows=2
    )
    task = open_task(settings, silent).task
    assert len(task.validation()["images"]) == 2
    assert task._prompts.shape == (3, 16)  # type: ignore[attr-defined]  # all classes, not those of two images
    assert task._prompts[:, 0].unique().numel() == 1  # type: ignore[attr-defined]


def test_a_caption_ends_in_the_byte_that_no_text_has() -> None:
    captions = learned_captions(["a red disc", "a red bar"] * 9, 270, silent)
    rows = captions.rows(["a red disc", "ä" * 40, ""], 12)
    assert rows.shape == (3, 12)
    assert rows[:, -1].tolist() == [END_OF_TEXT] * 3
    assert (rows[2] == END_OF_TEXT).all()
    assert (rows[1, :-1] != END_OF_TEXT).all()  # cut, and ended
    first = rows[0][rows[0] != END_OF_TEXT].tolist()
    assert captions.tokenizer.decode(first) == "a red disc"


def test_what_stands_behind_the_end_changes_nothing() -> None:
    model = build_image_model(IMAGE_PRESETS["clip-micro"], 300, context=16, seed=0).eval()
    rows = torch.full((2, 16), END_OF_TEXT)
    rows[:, :4] = torch.tensor([5, 6, 7, 8])
    rows[1, 5:] = 9
    said = model.get_text_features(rows).pooler_output
    assert torch.allclose(said[0], said[1], atol=1e-6)
    assert not torch.allclose(said[0], model.get_text_features(rows.flip(1)).pooler_output[0], atol=1e-2)


def test_the_datas_own_tokenizer_is_taken_and_exported(pairs: TrainSettings, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    assert pairs.data is not None
    first = learned_captions(["a red disc on black", "a green bar"] * 9, 280, silent)
    (tmp_path / "run").mkdir()
    first.export(tmp_path / "run", 16)
    (tmp_path / "run" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    opened = open_task(replace(pairs, vocabulary=None), silent)
    size = first.tokenizer.get_vocab_size()
    assert (opened.outputs, opened.end) == (size, END_OF_TEXT)
    again = read_captions(tmp_path / "tokenizer.json", size)
    texts = ["a red disc", "a green bar on Āri"]
    assert torch.equal(again.rows(texts, 16), first.rows(texts, 16))
    opened.export(SimpleNamespace(), tmp_path / "run")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run")
    filled = loaded(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    assert torch.equal(filled, first.rows(texts, 16))
    with pytest.raises(ValueError, match=rf"--vocabulary must be the {size} of .*, got 300"):
        open_task(pairs, silent)


def test_other_tokenizers_have_starts_and_ends_of_their_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    words = ["<|startoftext|>", "[UNK]", "red", "<|endoftext|>", "disc"]

    def written(names: list[str]) -> Path:
        tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(names)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens([w for w in names if w.startswith("<|")])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path / "tokenizer.json"

    captions = read_captions(written(words), None)
    assert captions.rows(["red disc", "red red disc disc disc"], 5).tolist() == [[0, 2, 4, 3, 3], [0, 2, 2, 4, 3]]
    captions.export(tmp_path, 5)
    assert AutoTokenizer.from_pretrained(tmp_path)("red disc").input_ids == [0, 2, 4, 3]
    with pytest.raises(DataError, match=r"must have a token that ends a text: one of <end>, <\|endoftext\|>"):
        read_captions(written(["[UNK]", "red"]), None)
    with pytest.raises(DataError, match=r"must not have <\|endoftext\|> as token 2, which ends no"):
        read_captions(written(["[UNK]", "red", "<|endoftext|>"]), None)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"--data: .*tokenizer.json cannot be read"):
        read_captions(tmp_path / "tokenizer.json", None)


def test_flops_of_clip_by_hand() -> None:
    sizes = IMAGE_PRESETS["clip-micro"]
    assert isinstance(sizes, ClipSizes)
    model = build_image_model(sizes, 300, context=16, seed=0)
    patches, width, text = 16, 64, 32
    tower = 2 * 12 * width * width  # 4 width^2 of attention and 8 of the MLP, in each of two layers
    seen = 1 + 8  # half of the patches
    wanted = 6 * (patches * 3 * 64 * width + width * 32 + text * 32)
    wanted += seen * (6 * tower + 12 * 2 * width * seen)
    wanted += 16 * (6 * 2 * 12 * text * text + 12 * 2 * text * 16)
    assert flops_per_image(model, 0.5, 16) == wanted


@pytest.mark.parametrize(
    ("name", "millions"),
    [("clip-b-16", 149.6), ("clip-l-14", 427.6), ("clip-h-14", 986.1), ("vit-s-16", 22.05), ("vit-b-16", 86.57),
     ("vit-l-16", 304.3), ("vit-h-14", 632.0)],
)  # fmt: skip
def test_presets_have_the_parameters_that_open_clip_and_timm_count(name: str, millions: float) -> None:
    sizes = IMAGE_PRESETS[name]
    with torch.device("meta"):
        model = clip_model(sizes, end=1) if isinstance(sizes, ClipSizes) else vit_model(sizes, 1000)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_weights_are_the_seeds_and_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    for name in ("clip-micro", "vit-micro"):
        first, again, other = (
            [*build_image_model(IMAGE_PRESETS[name], 300, context=9, seed=seed).parameters()] for seed in (0, 0, 1)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(state, torch.random.get_rng_state())
