"""With torch.compile, gradient checkpointing, accumulation and tied weights, alone and together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from narrowgauge import optim
from narrowgauge.trainers._compare_run import peak_memory

OPTIONS = {"lr": 0.01, "weights": "split8", "min_quantized_size": 0}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


class Tied(torch.nn.Module):
    """An autoencoder whose second matrix is the first, transposed."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = torch.nn.Linear(8, 16), torch.nn.Linear(16, 16, bias=False)
        self.again = torch.nn.Linear(16, 16, bias=False)
        self.again.weight = self.out.weight
        self.checkpointing = checkpointing

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.out(x).tanh()).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x).tanh()
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpointing else self.middle(x)
        return x.float().square().mean()


def train(
    model: torch.nn.Module,
    forward: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro: int = 1,
    steps: int = 3,
) -> torch.Tensor:
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        x = x.to(next(model.parameters()).dtype)
        for part in x.chunk(micro):
            (forward(part) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_trains_as_it_does_uncompiled(backend: str, checkpointing: bool) -> None:
    ends = {}
    for how in ("uncompiled", "compiled", "compiled, in backward", "compiled in place"):
        model = Tied(checkpointing).bfloat16()
        forward = torch.compile(model, backend=backend) if how != "uncompiled" else model
        if how == "compiled in place":
            forward = model
            model.compile(backend=backend)
        if "in backward" in how:
            optimizer = optim.step_in_backward(forward, optim.AdamW8bit, **OPTIONS)
        else:
            optimizer = optim.AdamW8bit(forward.named_parameters(), **OPTIONS)
        assert len(optimizer.describe().rows) == 3  # the tied one once
        ends[how] = train(model, forward, optimizer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    wanted = ends.pop("uncompiled")
    assert all(torch.equal(end, wanted) for end in ends.values())
    assert not torch.equal(wanted, torch.cat([p.detach().reshape(-1) for p in Tied().bfloat16().parameters()]))


def test_checkpointing_and_accumulation_change_memory_not_results() -> None:
    """Checkpointing moves no bit; two halves of a batch are the batch, but for what their sum rounds."""
    ends = []
    for checkpointing in (False, True):
        for micro in (1, 2):
            model = Tied(checkpointing)
            optimizer = optim.AdamW8bit(model.named_parameters(), **{**OPTIONS, "weights": "plain"})
            ends.append(train(model, model, optimizer, micro))
    assert torch.equal(ends[0], ends[2])
    assert torch.equal(ends[1], ends[3])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_blocks_compiled_one_by_one_free_their_gradients_one_by_one() -> None:
    """One compiled graph yields all gradients together; one a block, that block's."""

    def peak(by_block: bool) -> int:
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(256, 256, bias=False) for _ in range(8)]
        parts = [torch.compile(block, backend="aot_eager") for block in blocks] if by_block else blocks
        model = torch.nn.Sequential(*parts)
        forward = model if by_block else torch.compile(model, backend="aot_eager")
        optimizer = optim.step_in_backward(model, optim.SGD, lr=0.1)

        def step() -> None:
            forward(torch.ones(1, 256)).sum().backward()
            optimizer.step()

        step()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        return peak_memory(step, 0, torch.device("cpu"))[1]

    assert peak(by_block=False) - peak(by_block=True) > 5 * 4 * 256 * 256
