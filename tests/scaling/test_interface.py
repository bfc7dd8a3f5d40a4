"""The interface is torch's, argument for argument, and what frameworks do with a scaler works with ours."""

import copy
import inspect
import math
import pickle

import pytest
import torch

from narrowgauge.optim import AdamW
from narrowgauge.scaling import DynamicLossScaler, LossScaler, StaticLossScaler, TensorLossScaler

# Many steps skip, and say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*inf or NaN:UserWarning")
SCALERS = [DynamicLossScaler, StaticLossScaler, TensorLossScaler]
all_scalers = pytest.mark.parametrize("kind", SCALERS, ids=lambda kind: kind.__name__)


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def iterate(scaler, optimizer, net: torch.nn.Linear, *, seed: int = 0, bad: bool = False) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    scaler.scale(net(x.to(net.weight.dtype)).square().mean()).backward()
    if bad:
        net.weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()


@all_scalers
def test_every_method_of_torchs_scaler_is_there_with_its_parameters(kind) -> None:
    assert issubclass(kind, torch.amp.GradScaler)
    for name, method in vars(torch.amp.GradScaler).items():
        if name.startswith("_") or not callable(method):
            continue
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(method).parameters)
    ours = list(inspect.signature(kind).parameters)
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters)
    assert ours == [name for name in theirs if name in ours]
    assert {"device", "init_scale", "enabled"} <= set(ours)


def test_the_defaults_are_those_of_the_sources() -> None:
    dynamic = DynamicLossScaler()
    assert (dynamic.get_scale(), dynamic.get_growth_interval()) == (65536.0, 2000)
    assert (dynamic.get_growth_factor(), dynamic.get_backoff_factor()) == (2.0, 0.5)
    assert StaticLossScaler().get_scale() == 8.0
    assert TensorLossScaler().get_scale() == 65536.0
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert dynamic._device == ("cpu" if accelerator is None else accelerator.type)


def test_the_dynamic_scale_is_torchs_bit_for_bit() -> None:
    options = {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 4}
    runs = []
    for kind in (torch.amp.GradScaler, DynamicLossScaler):
        net, scaler = model(), kind(device="cpu", **options)
        optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.1)
        trace = []
        for i in range(40):
            iterate(scaler, optimizer, net, seed=i, bad=i in (3, 4, 11, 30))
            trace.append((scaler.get_scale(), scaler._get_growth_tracker(), net.weight.detach().clone()))
        runs.append(trace)
    for (*wanted, weight), (*found, our_weight) in zip(*runs, strict=True):
        assert found == wanted
        assert torch.equal(weight, our_weight)
    assert scaler.skipped_steps == 4
    assert scaler.skipped == {"weight": 4}


@all_scalers
def test_a_fixed_scale_never_moves_and_a_dynamic_one_does(kind) -> None:
    net, scaler = model(), kind(init_scale=64.0)
    optimizer = AdamW(net.named_parameters())
    for i in range(3):
        iterate(scaler, optimizer, net, bad=i > 0)
    assert scaler.get_scale() == (16.0 if kind is DynamicLossScaler else 64.0)
    scaler.update(4)
    assert scaler.get_scale() == 4.0
    scaler.update(torch.tensor([32.0]))
    assert scaler.get_scale() == 32.0


@all_scalers
def test_disabled_it_is_not_there(kind) -> None:
    net, scaler = model(), kind(enabled=False)
    twin = model()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, twin))
    loss = net(torch.ones(2, 4)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    twin(torch.ones(2, 4)).sum().backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 7.0) == 7.0  # with a closure, as the optimizer itself
    plain.step()
    scaler.update(3.0)
    assert torch.equal(net.weight, twin.weight)
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    scaler.load_state_dict({"anything": 1})
    assert (scaler.skipped, scaler.skipped_steps) == ({}, 0)
    assert scaler.get_growth_interval() == 2000
    assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


REFUSED = {
    "init_scale nan": (SCALERS, {"init_scale": math.nan}, "init_scale must be a number from 2.*, got nan"),
    "init_scale, its inverse": (SCALERS, {"init_scale": 2.0**127}, "init_scale must .*got "),
    "enabled": (SCALERS, {"enabled": 1}, "enabled must be True or False.*, got 1"),
    "growth_factor": ([DynamicLossScaler], {"growth_factor": 1.0}, "growth_factor must be a finite number above 1"),
    "backoff_factor": (
        [DynamicLossScaler],
        {"backoff_factor": 1.0},
        "backoff_factor must be a number between",
    ),
    "growth_interval": (
        [DynamicLossScaler],
        {"growth_interval": 0},
        "growth_interval must be an integer of",
    ),
}


@pytest.mark.parametrize(("kinds", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_named(kinds: list, options: dict, message: str) -> None:
    for kind in kinds:
        with pytest.raises(ValueError, match=message):
            kind(**options)
        for name, value in options.items():
            if hasattr(kind, f"set_{name}"):
                with pytest.raises(ValueError, match=message):
                    getattr(kind(), f"set_{name}")(value)


@pytest.mark.parametrize("kind", [StaticLossScaler, TensorLossScaler])
@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor"])
def test_a_fixed_scale_takes_no_dynamics(kind, name: str) -> None:
    scaler = kind()
    getattr(scaler, f"set_{name}")(1.0)
    assert getattr(scaler, f"get_{name}")() == 1.0
    with pytest.raises(ValueError, match=rf"must be 1.0 for {kind.__name__}.*, got 2.0"):
        getattr(scaler, f"set_{name}")(2.0)


@all_scalers
def test_a_bad_new_scale_is_named_and_changes_nothing(kind) -> None:
    net, scaler = model(), kind(init_scale=64.0)
    iterate(scaler, torch.optim.SGD(net.parameters(), lr=0.1), net)
    for bad in (0.0, math.nan, torch.ones(2), torch.ones(1, requires_grad=True)):
        with pytest.raises(ValueError, match=r"new_scale must .*got "):
            scaler.update(bad)
    assert scaler.get_scale() == 64.0


@all_scalers
def test_the_order_of_calls_is_torchs(kind) -> None:
    net, scaler = model(), kind()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
            call(optimizer)
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        scaler.update()
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)  # and it begins again


@all_scalers
def test_a_closure_is_refused_and_none_is_not(kind) -> None:
    net, scaler = model(), kind()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    for arguments in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(RuntimeError, match="closure must be None"):
            scaler.step(optimizer, *arguments[0], **arguments[1])
    before = net.weight.detach().clone()
    scaler.step(optimizer, closure=None)
    assert not torch.equal(before, net.weight)


@all_scalers
def test_an_optimizer_without_gradients_is_no_error(kind) -> None:
    net, frozen, scaler = model(), model(), kind()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, frozen)]
    scaler.scale(net(torch.ones(1, 4)).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert torch.equal(frozen.weight, model().weight)
    assert scaler.skipped_steps == 0


@all_scalers
def test_it_scales_collections_and_copies_at_any_time_between_iterations(kind) -> None:
    scaler = kind(init_scale=4.0)
    one, (two, three) = scaler.scale([torch.ones(()), (torch.full((2,), 2.0), torch.full((), 3.0))])
    assert (one.item(), two.tolist(), three.item()) == (4.0, [8.0, 8.0], 12.0)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(other) is kind
        assert other.state_dict() == scaler.state_dict()


@all_scalers
def test_a_resumed_run_is_the_same_bit_for_bit(kind) -> None:
    def start() -> tuple[torch.nn.Linear, AdamW, LossScaler]:
        options = {"growth_interval": 3} if kind is DynamicLossScaler else {}
        net = model()
        return net, AdamW(net.named_parameters(), lr=0.01), kind(init_scale=1024.0, **options)

    net, optimizer, scaler = start()
    for i in range(7):
        iterate(scaler, optimizer, net, seed=i, bad=i == 4)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    copied = copy.deepcopy(scaler)
    for i in range(7, 12):
        iterate(scaler, optimizer, net, seed=i, bad=i == 9)
    for loaded in (True, False):
        twin, twin_optimizer, fresh = start()
        twin_scaler = fresh if loaded else copied
        twin.load_state_dict(saved[0])
        twin_optimizer.load_state_dict(saved[1])
        if loaded:
            twin_scaler.load_state_dict(saved[2])
        for i in range(7, 12):
            iterate(twin_scaler, twin_optimizer, twin, seed=i, bad=i == 9)
        assert torch.equal(net.weight, twin.weight)
        assert torch.equal(net.bias, twin.bias)
        assert twin_scaler.state_dict() == scaler.state_dict()
        assert twin_scaler.skipped == scaler.skipped == {"weight": 2}


def test_states_go_to_and_come_from_torchs_scaler_but_not_to_another_kind() -> None:
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=7), DynamicLossScaler()
    ours.load_state_dict(theirs.state_dict())
    assert (ours.get_scale(), ours.get_growth_interval()) == (512.0, 7)
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == theirs.state_dict()
    for fixed in (StaticLossScaler(), TensorLossScaler()):
        with pytest.raises(ValueError, match=r"got one that moves \(growth_factor=2\.0"):
            fixed.load_state_dict(ours.state_dict())
        with pytest.raises(ValueError, match=r"got that of a fixed scale \(growth_factor=1\.0"):
            ours.load_state_dict(fixed.state_dict())
        with pytest.raises(ValueError, match="got no 'growth_factor'"):
            fixed.load_state_dict({"scale": 8.0})
        with pytest.raises(RuntimeError, match="empty"):
            fixed.load_state_dict({})
    assert ours.get_scale() == 512.0


@all_scalers
@pytest.mark.parametrize("make", [AdamW, torch.optim.AdamW], ids=["ours", "torch"])
def test_what_accelerate_does_works(kind, make) -> None:
    """Its wrapper replaces `optimizer.step` on the instance, passes the closure None by position, and looks whether
    its replacement was called."""
    net, scaler = model(), kind()
    optimizer = make(net.named_parameters())
    called = []
    original = optimizer.step
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if bad and kind is not TensorLossScaler:
            scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][torch.device("cpu")].fill_(1.0)
        optimizer.step = lambda *args, **kwargs: (called.append(args), original(*args, **kwargs))
        scaler.step(optimizer, None)
        scaler.update()
        optimizer.step = original
    assert called == [(None,)] if kind is not TensorLossScaler else [(None,), (None,)]
    # FSDP2's loading path reaches for the private initialiser.
    fresh = kind()
    fresh.load_state_dict(scaler.state_dict())
    fresh._lazy_init_scale_growth_tracker(fresh._device)
    assert fresh.get_scale() == scaler.get_scale()


@all_scalers
def test_what_is_no_state_is_refused_by_name(kind) -> None:
    scaler = kind("cpu")
    before = scaler.state_dict()
    for given, words in (
        ([1.0], "state_dict must be the state of a loss scaler.*, got list"),
        (before | {"growth_factor": None}, r"state_dict\['growth_factor'\] must .*a finite number.*got None"),
        (before | {"_growth_tracker": "x"}, r"state_dict\['_growth_tracker'\] must .*got 'x'"),
        (before | {"scale": None}, r"state_dict\['scale'\] must .*got None"),
    ):
        with pytest.raises(ValueError, match=words):
            scaler.load_state_dict(given)
    assert scaler.state_dict() == before


@all_scalers
def test_a_group_may_be_added_after_unscaling_but_not_with_a_scaled_gradient(kind) -> None:
    p, late = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer, scaler = AdamW([("p", p)], lr=0.1), kind("cpu")
    for with_gradient in (False, True):
        loss = p.sum() + late.sum() if with_gradient else p.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.add_param_group({"params": [("late", late)]})
        if with_gradient:
            with pytest.raises(RuntimeError, match=r"late: came into the optimizer after unscale_\(\)"):
                scaler.step(optimizer)
            assert torch.equal(late, torch.ones(3))
            return
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(p, torch.full((3,), 0.9), atol=2e-3)
        optimizer = AdamW([("p", p)], lr=0.1)
