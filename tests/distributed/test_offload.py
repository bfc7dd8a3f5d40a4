"""States on the CPU: results of the same optimizer without, to the bit, whatever is late, written to or saved."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import DIM, KINDS, Net, train
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.distributed import CPUOffload, _offload_buffers, load_checkpoint, save_checkpoint
from narrowgauge.distributed._offload_buffers import host_tensors
from pairwise import by_pairs

OPTIONS: dict[str, tuple[torch.dtype, Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (torch.float32, ng.optim.AdamW, {}),
    "split8, 8bit": (torch.bfloat16, ng.optim.AdamW, {"weights": "split8", "states": "8bit"}),
    "stochastic, log8": (torch.bfloat16, ng.optim.AdamW8bit, {"weights": "stochastic"}),
    "master, fp16": (torch.float16, ng.optim.AdamW, {"weights": "master", "states": "bf16"}),
    "LAMB": (torch.bfloat16, ng.optim.LAMB, {"weights": "split"}),
    "clipped": (torch.bfloat16, ng.optim.StableAdamW, {"weights": "kahan", "max_grad_norm": 0.01}),
    "Adam": (torch.float32, ng.optim.Adam, {}),
    "raise": (torch.bfloat16, ng.optim.Lion, {"nonfinite": "raise"}),
    "SGD": (torch.bfloat16, ng.optim.SGD, {"momentum": 0.9, "weights": "expansion", "states": "bf16"}),
    "strict": (torch.bfloat16, ng.optim.CollageAdamW, {"arithmetic": "strict"}),
}


class DelayedEvent:
    """What ends a copy when somebody waits for it."""

    def __init__(self, copies: Callable[[], Any]) -> None:
        self._copies: Callable[[], Any] | None = copies

    def synchronize(self) -> None:
        if self._copies is not None:
            self._copies()
        self._copies = None


class DelayedStreams:
    """A device whose copies happen as late as they may: to the host when waited for, back when the step ends."""

    def __init__(self, device: torch.device) -> None:
        self._sent: list[tuple[Tensor, Tensor]] = []

    def fetch(self, there: Tensor, here: Tensor) -> DelayedEvent:
        as_it_is = there.clone()
        here.fill_(float("nan"))  # what nobody may read
        return DelayedEvent(lambda: here.copy_(as_it_is))

    def begin(self) -> None:
        assert not self._sent

    def send(self, here: Tensor, there: Tensor) -> None:
        there.add_(0)  # counted as written, and still what it was
        self._sent.append((here, there))

    def end(self) -> None:
        for here, there in self._sent:
            there.data.copy_(here)
        self._sent.clear()


COPIES = ("at once", "delayed")
SCALERS = ("DynamicLossScaler", "StaticLossScaler", "TensorLossScaler", "GradScaler")


@pytest.fixture(params=COPIES)
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "delayed":
        monkeypatch.setattr(_offload_buffers, "CopyStreams", DelayedStreams)
    return request.param


def pair(kind: str, **more: Any) -> tuple[Net, Any, Net, CPUOffload]:
    """The same model twice, stepped without and with."""
    dtype, optimizer, options = OPTIONS[kind]
    options = {"lr": 1e-2, **({"min_quantized_size": 100, "block_size": 64} | options)}
    plain, net = Net(dtype), Net(dtype)
    mine = CPUOffload(optimizer, net.named_parameters(), **more, **options)
    return plain, optimizer(plain.named_parameters(), **options), net, mine


def batch(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(8, DIM, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(net: Net, step: int) -> Tensor:
    return (net(batch(step, net.up.weight.dtype)).float() - 1).square().mean()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def assert_same_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert [group["lr"] for group in a["param_groups"]] == [group["lr"] for group in b["param_groups"]]
    assert a["state"].keys() == b["state"].keys()
    for key, words in a["state"].items():
        assert words.keys() == b["state"][key].keys()
        for word, value in words.items():
            assert torch.equal(value, b["state"][key][word]), (key, word)


@by_pairs(indirect=["copies"], kind=OPTIONS.keys(), gradients=["kept", "freed"], copies=COPIES)
def test_steps_are_those_without(kind: str, gradients: str, copies: str) -> None:
    plain, optimizer, net, mine = pair(kind, gradients=gradients)
    before = copy.deepcopy(net.state_dict())
    assert train(plain, optimizer, range(6)) == train(net, mine, range(6))
    assert mine.late == 0
    assert not torch.equal(before["up.weight"], net.up.weight)
    assert_same(plain, net)
    assert_same_states(optimizer.state_dict(), mine.state_dict())
    assert mine.state_bytes() == optimizer.state_bytes()
    assert {row.path for row in mine.describe().rows} == {row.path for row in optimizer.describe().rows}
    assert all(p.grad is None for p in net.parameters()) == (gradients == "freed")


def test_parameters_are_stepped_in_the_order_of_arrival(copies: str) -> None:
    _, _, net, mine = pair("AdamW")
    order: list[str] = []
    inner: Any = mine.inner
    take_step = inner.take_step

    def listening(arrival: Any) -> None:
        done = arrival.done
        arrival.done = lambda p: (order.append(inner.plan_of(p).name), done(p))
        take_step(arrival)

    inner.take_step = listening
    loss_of(net, 0).backward()
    mine.step()
    assert [name.split(".")[0] for name in order] == ["down", "down", "up", "up"]


@pytest.mark.parametrize("transfer", ["backward", "step"])
def test_gradients_accumulate(transfer: Any, copies: str) -> None:
    plain, optimizer, net, mine = pair("split8, 8bit", transfer=transfer)
    for step in range(0, 9, 3):
        for model, one in ((plain, optimizer), (net, mine)):
            for part in range(3):
                loss_of(model, step + part).backward()
            one.step()
            one.zero_grad()
    assert mine.late == (4 if transfer == "step" else 0)
    assert_same(plain, net)


@pytest.mark.parametrize("how", ["clip_grad_norm_", "replaced", "none", "by hand"])
def test_gradients_written_to_after_backward(how: str, copies: str) -> None:
    plain, optimizer, net, mine = pair("AdamW")
    for step in range(3):
        for model, one in ((plain, optimizer), (net, mine)):
            one.zero_grad()
            loss_of(model, step).backward()
            if how == "clip_grad_norm_":
                assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
            elif how == "replaced":
                model.up.weight.grad = model.up.weight.grad.clone() * 3
            elif how == "none":
                model.up.weight.grad = None
            else:
                with torch.no_grad():
                    model.down.bias.grad.mul_(-1)
            one.step()
        assert mine.late == {"clip_grad_norm_": 4, "none": 0}.get(how, 1)
    assert_same(plain, net)


def test_a_gradient_of_another_step_is_not_used_again(copies: str) -> None:
    plain, optimizer, net, mine = pair("AdamW")
    for model, one in ((plain, optimizer), (net, mine)):
        loss_of(model, 0).backward()
        model.zero_grad()  # the optimizer does not hear of it
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        one.step()
        one.step()
    assert mine.late == 4
    assert_same(plain, net)


@by_pairs(indirect=["copies"], kind=SCALERS, clips=[False, True], copies=COPIES)
@pytest.mark.filterwarnings("ignore")
def test_loss_scalers(kind: str, clips: bool, copies: str) -> None:
    fused = clips  # torch's GradScaler leaves unscaling to a fused step
    plain, optimizer, net, mine = pair("AdamW", fused=fused)
    optimizer = type(optimizer)(plain.named_parameters(), lr=1e-2, fused=fused)
    lates = []
    for model, one in ((plain, optimizer), (net, mine)):
        scaler = torch.amp.GradScaler("cpu") if kind == "GradScaler" else getattr(ng.scaling, kind)("cpu")
        for step in range(5):
            one.zero_grad()
            loss = loss_of(model, step) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(one)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3, error_if_nonfinite=False)
            scaler.step(one)
            scaler.update()
            lates.append(getattr(one, "late", 0))
    assert all(torch.isfinite(p).all() for p in plain.parameters())
    assert_same(plain, net)
    assert optimizer.skipped == mine.skipped
    if not clips and kind != "GradScaler":
        assert not any(lates)  # unscaled by the step


@pytest.mark.filterwarnings("ignore:.*steps skipped")
def test_what_is_not_finite(copies: str) -> None:
    plain, optimizer, net, mine = pair("split8, 8bit")
    for step in range(4):
        for model, one in ((plain, optimizer), (net, mine)):
            one.zero_grad()
            loss_of(model, step).backward()
            if step == 2:
                model.up.bias.grad[3] = float("nan")
            one.step()
    assert mine.skipped == optimizer.skipped == {"up.bias": 1}
    assert_same(plain, net)
    plain, optimizer, net, mine = pair("raise")
    before = copy.deepcopy(net.state_dict())
    loss_of(net, 0).backward()
    net.down.weight.grad[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"down\.weight"):
        mine.step()
    for name, p in net.named_parameters():
        assert torch.equal(before[name], p), name


def test_schedulers_and_options_of_groups(copies: str) -> None:
    plain, optimizer, net, mine = pair("AdamW")
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, max_lr=0.05, total_steps=8) for one in (optimizer, mine)]
    for step in range(6):
        for model, one, scheduler in zip((plain, net), (optimizer, mine), schedulers, strict=True):
            one.zero_grad()
            loss_of(model, step).backward()
            if step == 4:
                one.param_groups[0]["weight_decay"] = 0.5
                one.param_groups[0]["clip_updates"] = True
            one.step()
            scheduler.step()
    assert_same(plain, net)
    assert mine.inner.param_groups[0]["clip_updates"] is True
    assert_same_states(optimizer.state_dict(), mine.state_dict())


def test_groups_come_later_and_marks_are_kept(copies: str) -> None:
    plain, net = Net(), Net()
    made = []
    for model, maker in (
        (plain, ng.optim.AdamW8bit),
        (net, lambda ps, **o: CPUOffload(ng.optim.AdamW8bit, ps, **o)),
    ):
        ng.storage.mark_states(model.up.weight, "fp32")
        one = maker(model.up.parameters(), lr=1e-2, min_quantized_size=1)
        train(model, one, range(2))
        one.param_groups[0]["lr"] = 5e-3  # as a scheduler does, between the last step and the new group
        one.add_param_group({"params": list(model.down.parameters()), "lr": 1e-3})
        assert [group["lr"] for group in one.param_groups] == [5e-3, 1e-3]
        train(model, one, range(2, 4))
        made.append(one)
    assert_same(plain, net)
    assert "m" in made[1].state[net.up.weight]
    assert made[1].state[net.up.weight]["m"].dtype == torch.float32
    with pytest.raises(ValueError, match="weights"):
        made[1].add_param_group({"params": [nn.Parameter(torch.ones(3))], "weights": "split8"})
    assert len(made[1].param_groups) == len(made[1].inner.param_groups) == 2
    assert train(plain, made[0], range(4, 6)) == train(net, made[1], range(4, 6))


def test_weights_written_to_from_outside(copies: str) -> None:
    plain, optimizer, net, mine = pair("master, fp16")
    for step in range(4):
        for model, one in ((plain, optimizer), (net, mine)):
            if step == 2:
                with torch.no_grad():
                    model.up.weight.clamp_(-0.05, 0.05)
                model.down.load_state_dict(Net(torch.float16, seed=7).down.state_dict())
            train(model, one, range(step, step + 1))
    assert_same(plain, net)


def test_states_load_both_ways(copies: str) -> None:
    plain, optimizer, net, mine = pair("split8, 8bit")
    train(plain, optimizer, range(3))
    train(net, mine, range(3))
    plain2, optimizer2, net2, mine2 = pair("split8, 8bit")
    plain2.load_state_dict(net.state_dict())
    net2.load_state_dict(plain.state_dict())
    optimizer2.load_state_dict(mine.state_dict())
    seen = []
    mine2.register_load_state_dict_post_hook(lambda one: seen.append(one))
    mine2.load_state_dict(optimizer.state_dict())
    assert seen == [mine2]
    losses = train(plain, optimizer, range(3, 6))
    for model, one in ((net, mine), (plain2, optimizer2), (net2, mine2)):
        assert train(model, one, range(3, 6)) == losses
    with pytest.raises(ValueError, match="this optimizer's groups"):
        mine.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("kind", ["split8, log8", "master, expansion", "SGD"])
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    dtype, optimizer = KINDS[kind]

    def made(seed: int) -> tuple[Net, CPUOffload]:
        net = Net(dtype, seed)
        return net, CPUOffload(optimizer, net.named_parameters())

    net, mine = made(0)
    train(net, mine, range(3))
    path = save_checkpoint(tmp_path, model=net, optimizer=mine, step=3)
    losses = train(net, mine, range(3, 6))
    again, loaded = made(1)
    assert load_checkpoint(path, model=again, optimizer=loaded).step == 3
    assert train(again, loaded, range(3, 6)) == losses
    plain = Net(dtype, 2)
    without = optimizer(list(plain.named_parameters()))
    load_checkpoint(path, model=plain, optimizer=without)
    assert train(plain, without, range(3, 6)) == losses


def test_closures_frozen_parameters_and_copies() -> None:
    plain, optimizer, net, mine = pair("AdamW")
    for model, one in ((plain, optimizer), (net, mine)):
        model.up.weight.requires_grad_(False)

        def closure(model: Net = model, one: Any = one) -> Tensor:
            one.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        assert one.step(closure) > 0
        model.up.weight.requires_grad_(True)
        one.step(closure)
    assert_same(plain, net)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(mine)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(mine)


def test_a_second_backward_pass_needs_gradients_kept(copies: str) -> None:
    _, _, net, mine = pair("AdamW", gradients="freed")
    loss_of(net, 0).backward()
    with pytest.raises(RuntimeError, match=r"down\..* has a second gradient before step"):
        loss_of(net, 1).backward()
    mine.zero_grad()
    loss_of(net, 0).backward()
    net.up.bias.grad = torch.ones_like(net.up.bias)
    with pytest.raises(RuntimeError, match=r"up\.bias has a second gradient"):
        mine.step()


def test_with_several_ranks_gradients_wait_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrowgauge.distributed._offload._several_ranks", lambda: True)
    for transfer, late in ((None, 4), ("backward", 0)):
        _, _, net, mine = pair("AdamW", transfer=transfer)
        train(net, mine, range(1))
        assert mine.late == late
    _, _, net, mine = pair("AdamW", gradients="freed")
    with pytest.raises(RuntimeError, match="several ranks"):
        loss_of(net, 0).backward()


def test_hooks_are_taken_off() -> None:
    _, _, net, mine = pair("AdamW", gradients="freed")
    mine.remove()
    loss_of(net, 0).backward()
    assert net.up.weight.grad is not None


def test_what_is_refused() -> None:
    net = Net()
    for given, says in (
        ({"transfer": "never"}, "transfer must be 'backward', 'step' or None, got 'never'"),
        ({"gradients": "freed", "transfer": "step"}, "gradients must be 'kept' with transfer='step'"),
        ({"weights": "split8"}, "params must be bfloat16 for weights='split8'"),
    ):
        with pytest.raises(ValueError, match=says):
            CPUOffload(ng.optim.AdamW, net.parameters(), **given)
    with pytest.raises(TypeError, match=r"optimizer.*adamw\.AdamW"):
        CPUOffload(torch.optim.AdamW, net.parameters())
    with pytest.raises(ValueError, match="x must be on a CUDA device or the CPU, got meta"):
        CPUOffload(ng.optim.AdamW, [("x", nn.Parameter(torch.empty(3, device="meta")))])
    mine = CPUOffload(ng.optim.AdamW, net.named_parameters())
    loss_of(net, 0).backward()
    net.half()
    with pytest.raises(RuntimeError, match=r"up\.weight was torch\.float32 and is torch\.float16"):
        mine.step()
    table = nn.Embedding(4, 3, sparse=True)
    mine = CPUOffload(ng.optim.AdamW, table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        mine.step()


def test_room_on_the_host() -> None:
    like = [torch.empty(shape, dtype=dtype) for shape, dtype in (
        ((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float32), ((1000,), torch.float16),
    )]  # fmt: skip
    made = host_tensors(like, pinned=False)
    for number, (tensor, of) in enumerate(zip(made, like, strict=True)):
        assert (tensor.shape, tensor.dtype) == (of.shape, of.dtype)
        assert tensor.is_contiguous()
        tensor.fill_(number)
    for number, tensor in enumerate(made):  # none lies on another
        assert (tensor == number).all()
    _, _, net, mine = pair("split8, 8bit")
    assert mine.host_bytes() == 2 * sum(p.nbytes for p in net.parameters())


def test_full_weights_are_by_the_models_parameters_and_reach_them_at_once() -> None:
    weights, models = [], []
    for around in (None, CPUOffload):
        torch.manual_seed(0)
        model = nn.Linear(64, 128)
        optimizer = ng.recipes.get("adamw8bit-split8").apply(model, lr=1e-3, around=around)
        x = torch.randn(16, 64).bfloat16()
        for number in range(4):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                full = optimizer.full_weights()
                assert set(full) == set(model.parameters())
                doubled = {p: 2 * wide for p, wide in full.items()}
                optimizer.set_full_weights(doubled if around else {"weight": doubled[model.weight]})
                if around:
                    optimizer.set_full_weights({"bias": full[model.bias]})
                torch.testing.assert_close(model.weight.float(), doubled[model.weight], rtol=2**-8, atol=0)
        weights.append([optimizer.full_weights()[p] for p in model.parameters()])
        models.append(list(model.parameters()))
    assert all(map(torch.equal, *weights))
    assert all(map(torch.equal, *models))
