"""The run behind the studies: its moments are the optimizer's, its matrices those of the layer."""

from typing import Any

import pytest
import torch
import typer
from torch import nn

from narrowgauge.trainers import Batches, next_token_loss
from studies.shared import gather, options


def test_moments_are_of_the_steps_asked_for_and_of_large_parameters_only(trained: Any) -> None:
    sizes = {name: p.numel() for name, p in trained.model.named_parameters()}
    assert {t.step for t in trained.moments} == {2, 8}
    assert {t.parameter for t in trained.moments} == {name for name, size in sizes.items() if size >= 4096}
    assert all((t.v >= 0).all() and t.m.dtype == torch.float32 for t in trained.moments)


def test_moments_are_corrected_for_their_start(training: Any) -> None:
    """After one step m is the gradient and v its square."""
    first = gather.run(training, (0.01,))
    t = first.moments[0]
    assert {t.step for t in first.moments} == {1}
    torch.testing.assert_close(t.v, t.m.square(), rtol=1e-4, atol=0)


def test_states_in_8_bits_are_read_back(training: Any) -> None:
    exact = {t.parameter: t for t in gather.run(training, (0.01,)).moments}
    for t in gather.run(training, (0.01,), recipe="adamw8bit-dynamic").moments:
        error = (t.m - exact[t.parameter].m).norm() / exact[t.parameter].m.norm()
        assert 0 < error < 0.05


def test_the_weight_gradient_is_the_product_of_the_gathered_matrices(trained: Any) -> None:
    layers = {layer.name: layer for layer in gather.gather_linears(trained, 200)}
    model, training = trained.model, trained.training
    windows = next(Batches(trained.tokens, 7, training.sequence, training.seed + 1))
    torch.autograd.backward(next_token_loss(model, windows))
    modules = dict(model.named_modules())
    assert layers.keys() == {name for name in modules if name.endswith(("c_attn", "c_proj", "c_fc"))}
    for name, layer in layers.items():
        assert layer.x.shape[0] == layer.g.shape[0] == 7 * training.sequence
        assert layer.w.shape == (layer.g.shape[1], layer.x.shape[1])
        gradient = modules[name].weight.grad  # GPT-2's layers keep the weight transposed
        torch.testing.assert_close((layer.g.T @ layer.x).T, gradient, rtol=1e-3, atol=1e-6)
    model.zero_grad()


def test_plain_linear_layers_are_found_too() -> None:
    blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 6)}) for _ in range(5)])
    found = gather.chosen_linears(nn.ModuleDict({"layers": blocks, "lm_head": nn.Linear(4, 9)}))
    assert list(found) == ["layers.0.a", "layers.2.a", "layers.4.a"]


def test_results_name_no_folder(trained: Any) -> None:
    assert trained.about["training"]["data"] == trained.about["data"]["source"] == "text.txt"
    arguments = ["/some/where/studies/x/run.py", "--data", "/some/where/text.txt", "--out", "/some/where/x.json"]
    assert options.command(arguments) == "python -m studies.x.run --data text.txt"


def test_a_gpu_that_is_not_there_is_one_line() -> None:
    with pytest.raises(typer.BadParameter, match=r"^--device must be one of .* CUDA devices, got 'cuda:99'$"):
        options.origin("cuda:99")


def test_numbers_are_rounded_and_what_is_not_finite_is_left_out() -> None:
    assert options.rounded({"a": [1.23456789, float("nan")], "b": ("x", 3)}) == {
        "a": [1.23457, None],
        "b": ["x", 3],
    }
    mean, error = gather.mean_and_error([1.0, 2.0, 3.0])
    assert (mean, round(error, 6)) == (2.0, 0.57735)
