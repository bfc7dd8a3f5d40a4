"""Layers: the stable embedding's three parts, and layer scale."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from narrowgauge.nn import LayerScale, StableEmbedding


def test_a_stable_embedding_is_xavier_rows_behind_a_layer_norm() -> None:
    torch.manual_seed(0)
    embedding = StableEmbedding(500, 64)
    bound = (6 / (500 + 64)) ** 0.5
    assert float(embedding.weight.detach().abs().max()) <= bound
    assert float(embedding.weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    tokens = torch.randint(500, (3, 7))
    out = embedding(tokens)
    assert torch.equal(out, torch.nn.functional.layer_norm(embedding.weight[tokens], (64,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_has_the_dtype_of_its_table_and_takes_what_an_embedding_takes(dtype: torch.dtype) -> None:
    embedding = StableEmbedding(10, 8, padding_idx=3, dtype=dtype)
    assert embedding(torch.tensor([1, 3])).dtype == dtype
    assert not embedding.weight[3].any()
    assert set(dict(embedding.named_parameters())) == {"weight", "norm.weight", "norm.bias"}


def states(embedding: StableEmbedding) -> str:
    optimizer = ng.optim.AdamW8bit(embedding.named_parameters())
    return next(row.states for row in optimizer.describe().rows if row.parameter == "weight")


def test_its_table_keeps_32_bit_states_however_it_came_to_be() -> None:
    embedding = StableEmbedding(500, 64)
    file = io.BytesIO()
    torch.save(embedding, file)
    file.seek(0)
    assigned = StableEmbedding(500, 64, device="meta")
    assigned.load_state_dict(embedding.state_dict(), assign=True)
    filled = StableEmbedding(500, 64, device="meta").to_empty(device="cpu")
    filled.reset_parameters()
    loaded = torch.load(file, weights_only=False)
    for one in (embedding, copy.deepcopy(embedding), embedding.bfloat16(), loaded, assigned, filled):
        assert states(one) == "m:fp32 v:fp32"
    row = ng.optim.AdamW8bit(embedding.named_parameters()).describe().rows[0]
    assert "m, v in fp32: the parameter is marked so" in row.why
    ng.storage.mark_states(embedding.weight, "bf16")
    embedding.float()
    assert ng.storage.marked_states(embedding.weight) == "bf16"


def test_a_mark_goes_before_the_optimizers_option_and_must_be_a_storage() -> None:
    p = torch.nn.Parameter(torch.ones(100, 100))
    ng.storage.mark_states(p, "bf16")
    assert ng.storage.marked_states(p) == "bf16"
    assert ng.optim.AdamW([p], states="8bit").describe().rows[0].states == "m:bf16 v:bf16"
    with pytest.raises(ValueError, match=r"states.* got '7bit'"):
        ng.storage.mark_states(p, "7bit")


def test_a_copied_optimizer_knows_the_marks_that_its_states_were_made_for() -> None:
    optimizer = ng.optim.AdamW8bit(StableEmbedding(512, 64).parameters())

    def step(one: torch.optim.Optimizer) -> torch.Tensor:
        for p in one.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.5)
        one.step()
        return one.param_groups[0]["params"][0].detach()

    step(optimizer)
    twins = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    wanted = step(optimizer)
    for twin in twins:
        assert twin.describe().rows[0].states == "m:fp32 v:fp32"
        assert torch.equal(step(twin), wanted)


def test_layer_scale_starts_as_it_is_told_and_learns() -> None:
    x = torch.randn(2, 5, 8)
    assert not LayerScale(8)(x).any()
    scale = LayerScale(8, 0.1, dtype=torch.bfloat16)
    assert scale.gamma.dtype == torch.bfloat16
    assert torch.equal(scale(x.bfloat16()), x.bfloat16() * torch.tensor(0.1, dtype=torch.bfloat16))
    scale = LayerScale(8, 1)
    assert torch.equal(scale(x), x)
    scale(x).sum().backward()
    assert torch.allclose(scale.gamma.grad, x.sum(dim=(0, 1)), atol=1e-5)


def test_a_sharded_stable_embedding_keeps_32_bit_states(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(StableEmbedding(500, 64), torch.nn.Linear(64, 64))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.tensor([1, 2])).sum().backward()
        assert isinstance(model[0].weight, DTensor)
        assert ng.storage.marked_states(model[0].weight) == "fp32"
    finally:
        dist.destroy_process_group()
