"""What is added around a model is folded into its weights: transformers loads a plain model that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.nn import LayerScale, StableEmbedding, add_layer_scale
from narrowgauge.trainers._export import MASK_TOKEN, PAD_TOKEN, export_model, export_tokenizer
from narrowgauge.trainers._extras import add_stable_embedding
from narrowgauge.trainers._models import MASK, PAD, SPECIAL, build_model, preset
from narrowgauge.trainers._text import Corpus, Document
from narrowgauge.trainers._tokens import tokenize

MODELS = ["micro", "llama-micro", "bert-micro", "roberta-micro"]


def added(name: str, stable: bool, scaled: bool) -> Any:
    """A model whose additions have learned something."""
    model = build_model(name, vocabulary=256, sequence=24, seed=0)
    if stable:
        add_stable_embedding(model, 0)
    if scaled:
        add_layer_scale(model, 0.5)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, StableEmbedding):
                module.norm.weight.copy_(torch.rand(module.norm.weight.shape, generator=draw) + 0.5)
                module.norm.bias.copy_(torch.randn(module.norm.bias.shape, generator=draw) * 0.1)
            if isinstance(module, LayerScale):
                module.gamma.copy_(torch.randn(module.gamma.shape, generator=draw))
    return model.eval()


def loaded(name: str, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    kind: Any = AutoModelForCausalLM if preset(name).objective == "causal" else AutoModelForMaskedLM
    model, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


@pytest.mark.parametrize(("stable", "scaled"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", MODELS)
def test_the_folded_model_says_the_same(name: str, stable: bool, scaled: bool, tmp_path: Path) -> None:
    model = added(name, stable, scaled)
    assert any(isinstance(m, StableEmbedding) for m in model.modules()) == stable
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export_model(model, tmp_path)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.config.use_cache is False  # as it was
    plain = loaded(name, tmp_path)
    assert type(plain) is type(model)
    assert plain.config.use_cache is True
    if plain.can_generate():  # else each token costs a pass over the whole text
        assert plain.generation_config.use_cache is True
    # Else a release of transformers that ties by the configuration would throw one of two tables away.
    assert plain.config.tie_word_embeddings == (model.config.tie_word_embeddings and not stable)
    assert not any(isinstance(m, StableEmbedding | LayerScale) for m in plain.modules())
    tokens = torch.randint(SPECIAL, 256, (3, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        said, expected = plain(input_ids=tokens).logits, model(input_ids=tokens).logits
    if not (stable or scaled):
        assert torch.equal(said, expected)
    assert (said - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert expected.std() > 1e-3


def test_the_stable_table_is_the_seeds_and_the_global_generator_is_left_alone() -> None:
    state = torch.random.get_rng_state()
    tables: list[Tensor] = []
    for seed in (0, 0, 1):
        model = build_model("micro", vocabulary=256, sequence=8, seed=0)
        add_stable_embedding(model, seed)
        tables.append(model.get_input_embeddings().weight)
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    assert torch.equal(state, torch.random.get_rng_state())
    bound = (6 / (256 + 96)) ** 0.5  # Xavier's
    assert tables[0].abs().max() <= bound
    assert tables[0].abs().max() > 0.99 * bound


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_the_tokenizer_comes_along(objective: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "the quick brown fox, " * 50
    corpus = Corpus("x", (Document("a", text),), (Document("b", text),), {})
    tokenizer = tokenize(corpus, 280, cache=tmp_path / "cache").tokenizer
    export_tokenizer(tokenizer, tmp_path, objective=objective, sequence=24)
    again = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("the brown fox").ids
    shift = SPECIAL if objective == "masked" else 0
    assert again("the brown fox").input_ids == [i + shift for i in ids]
    assert again.decode(again("the brown fox").input_ids) == "the brown fox"
    assert again.model_max_length == 24
    if objective == "masked":
        assert (again.pad_token_id, again.mask_token_id) == (PAD, MASK)
        assert again(f"the {MASK_TOKEN}{PAD_TOKEN}").input_ids[-2:] == [MASK, PAD]


def test_a_conv1d_and_a_linear_are_scaled_along_their_outputs() -> None:
    """GPT-2's layers have their weights the other way round: told apart by the class, not by a square's shape."""
    from narrowgauge.trainers._extras import folded_state

    model = added("micro", stable=False, scaled=True)
    layer = model.transformer.h[0].attn.c_proj
    assert not isinstance(layer, nn.Linear)
    assert layer.weight.shape[0] == layer.weight.shape[1]
    folded = folded_state(model)["transformer.h.0.attn.c_proj.weight"]
    assert torch.allclose(folded, layer.weight * layer.layer_scale.gamma[None, :])
