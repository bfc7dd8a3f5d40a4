"""A step that has the last word on swapping: how it is timed, what is decided, what stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowgauge as ng
from forked import run_ranks
from narrowgauge.linear import SWITCHBACK, LowPrecisionLinear, _by_step, _speeds, swap_linears

STEPS = 2 * (_by_step.WARM_UP + _by_step.ROUNDS * (1 + _by_step.STEPS))


class Clocked:
    """A model's step on a clock of its own, which goes on by what a step with swapped layers and one without take.

    Attributes:
        sides: of each step, whether layers were swapped.
    """

    def __init__(self, model: nn.Module, seconds: Callable[[bool, int], float]) -> None:
        self._model, self._seconds, self.now, self.sides = model, seconds, 0.0, list[bool]()

    def __call__(self) -> None:
        swapped = any(isinstance(module, LowPrecisionLinear) for module in self._model.modules())
        self.now += self._seconds(swapped, len(self.sides))
        self.sides.append(swapped)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clocked]:
    def make(model: nn.Module, seconds: Callable[[bool, int], float]) -> Clocked:
        step = Clocked(model, seconds)
        monkeypatch.setattr(_speeds, "time", SimpleNamespace(perf_counter=lambda: step.now))
        return step

    return make


def layers() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 48), "small": nn.Linear(32, 8)})


def test_where_the_step_is_slower_nothing_is_swapped(clocked: Callable[..., Clocked]) -> None:
    model = layers()
    parameters, state = list(model.parameters()), torch.get_rng_state()
    step = clocked(model, lambda swapped, _: 0.1042 if swapped else 0.0933)
    report = swap_linears(model, SWITCHBACK, step=step)
    assert report.swapped == []
    told = "the step measured faster in 0 of 7 rounds: 104.2 ms, 93.3 with nn.Linear"
    assert report.kept == {"a": told, "b": told, "small": "8 features, fewer than 16"}
    assert report.step_seconds == pytest.approx((0.1042, 0.0933))
    assert "step: 104.2 ms, 93.3 with nn.Linear\nswapped: 0\nkept: 3\n" in str(report)
    assert all(type(layer) is nn.Linear and "plan" not in vars(layer) for layer in model.values())
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(step.sides) == STEPS == 48
    report.undo()  # of nothing


def test_where_the_step_is_faster_layers_stay_swapped(clocked: Callable[..., Clocked]) -> None:
    model = layers()
    plan = ng.linear.TENSORWISE_FP8.with_moving_average()
    step = clocked(model, lambda swapped, _: 0.0071 if swapped else 0.0082)

    def averaging() -> None:
        step()
        for module in model.values():
            if isinstance(module, LowPrecisionLinear) and module.averages is not None:
                module.averages.fill_(3.0)

    report = swap_linears(model, plan, step=averaging)
    assert report.swapped == ["a", "b"]
    assert report.kept == {"small": "8 features, fewer than 16"}
    assert report.step_seconds == pytest.approx((0.0071, 0.0082))
    assert "step: 7.100 ms, 8.200 with nn.Linear\nswapped: 2" in str(report)
    # What the timed steps have seen is not what the training begins with.
    assert [type(layer) for layer in model.values()] == [LowPrecisionLinear, LowPrecisionLinear, nn.Linear]
    assert not any(model[name].averages.any() for name in "ab")
    report.undo()
    assert all(type(layer) is nn.Linear for layer in model.values())


def test_both_sides_take_turns_and_what_compiles_is_not_counted(clocked: Callable[..., Clocked]) -> None:
    """Steps that a swap makes slower, of both sides, the first ones of all most."""
    model = layers()

    def seconds(swapped: bool, taken: int) -> float:
        first = not taken or step.sides[-1] != swapped
        return 50.0 if taken < 2 * _by_step.WARM_UP else 9.0 if first else 1.0 if swapped else 2.0

    step = clocked(model, seconds)
    assert swap_linears(model, SWITCHBACK, step=step).step_seconds == (1.0, 2.0)
    warm, turn = _by_step.WARM_UP, 1 + _by_step.STEPS
    turns = "".join("ps"[side] for side in step.sides[2 * warm :: turn])
    assert step.sides[: 2 * warm] == [False] * warm + [True] * warm
    assert turns == "spps" * 3 + "sp"


@pytest.mark.parametrize("wins", range(8))
def test_a_gain_is_one_that_nearly_all_rounds_show(clocked: Callable[..., Clocked], wins: int) -> None:
    """Two steps that are alike but for noise, which favours either; however large it is for one of the two."""
    model = layers()

    def seconds(swapped: bool, taken: int) -> float:
        per_round = 2 * (1 + _by_step.STEPS)
        gains = (taken - 2 * _by_step.WARM_UP) // per_round < wins
        return (0.5 if gains else 1.001) if swapped else 1.0

    report = swap_linears(model, SWITCHBACK, step=clocked(model, seconds))
    assert bool(report.swapped) == (wins >= 6)
    if wins < 6:
        assert report.kept["a"].startswith(f"the step measured faster in {wins} of 7 rounds: ")


def test_a_machine_that_slows_down_gains_nothing(clocked: Callable[..., Clocked]) -> None:
    for factor in (1.01, 0.99):
        model = layers()
        report = swap_linears(model, SWITCHBACK, step=clocked(model, lambda _, taken, f=factor: f**taken))
        assert report.swapped == []


def test_layers_are_filtered_first(clocked: Callable[..., Clocked], monkeypatch: pytest.MonkeyPatch) -> None:
    """What measured slower by itself is not in the step, and where that is everything no step is taken."""
    for speeds, swapped in (((2.0, 0.5), ["a"]), ((0.5, 0.5), [])):
        monkeypatch.setattr(
            "narrowgauge.linear._swap.speedups", lambda kinds, s=speeds: dict(zip(kinds, s, strict=True))
        )
        model = layers()
        step = clocked(model, lambda swapped, _: 1.0 if swapped else 2.0)
        report = swap_linears(model, SWITCHBACK, tokens=16, step=step)
        assert report.swapped == swapped
        assert report.kept["b"] == "measured 0.50x nn.Linear at 16 tokens"
        assert (len(step.sides), report.step_seconds) == ((STEPS, (1.0, 2.0)) if swapped else (0, None))


@pytest.mark.parametrize("at", [0, 4, 20])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_step_that_fails_leaves_nothing_swapped(at: int, error: type[BaseException]) -> None:
    model, taken = layers(), []

    def step() -> None:
        taken.append(isinstance(model["a"], LowPrecisionLinear))
        if len(taken) > at:
            raise error("of the step")

    with pytest.raises(error, match="of the step"):
        swap_linears(model, SWITCHBACK, step=step)
    assert taken.count(True) == {0: 0, 4: 2, 20: 12}[at]
    assert all(type(layer) is nn.Linear for layer in model.values())


@pytest.mark.parametrize(("step", "got"), [(3, "int"), (nn.Linear(4, 4), "Linear")])
def test_what_is_no_step_is_refused(step: object, got: str) -> None:
    model = layers()
    with pytest.raises(ValueError, match=f"step: got {got}, takes a function without arguments, one training step"):
        swap_linears(model, SWITCHBACK, step=step)
    assert type(model["a"]) is nn.Linear


def test_a_function_that_takes_no_step_when_called_is_refused() -> None:
    model = layers()

    def generator():
        yield model["a"](torch.ones(32))

    async def coroutine() -> None:
        model["a"](torch.ones(32))

    for step in (generator, coroutine):
        with pytest.raises(ValueError, match="step: got a generator or coroutine function, which takes no step"):
            swap_linears(model, SWITCHBACK, step=step)
    assert type(model["a"]) is nn.Linear


@pytest.mark.parametrize("at", [2, 5, STEPS])
def test_a_step_that_changes_the_class_of_a_layer_is_refused(at: int) -> None:
    """Turned to another class it would lose what was put into its own: here the weight itself."""
    model, taken = layers(), []

    def step() -> None:
        taken.append(model["a"](torch.ones(32)))
        if len(taken) == at:
            nn.utils.parametrizations.weight_norm(model["a"])

    with pytest.raises(RuntimeError, match=r"step: got one that makes .a. a Parametrized.*, takes one that leaves"):
        swap_linears(model, SWITCHBACK, step=step)
    assert type(model["b"]) is nn.Linear
    assert torch.isfinite(model["a"](torch.ones(32))).all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


@pytest.fixture
def limit_of_one() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch.compiler.reset()


@pytest.mark.usefixtures("limit_of_one")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("faster", [True, False])
def test_blocks_stay_compiled_for_both_sides(clocked: Callable[..., Clocked], faster: bool) -> None:
    """Blocks of the same code share a version a side, though the limit has room for one; turns compile nothing."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, 16, requires_grad=True)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    for block in model:
        block.compile(backend=backend, dynamic=False)
    clock = clocked(model, lambda swapped, _: 1.0 if swapped is faster else 2.0)
    made: list[int] = []  # graphs, by each step

    def step() -> None:
        clock()
        before = len(graphs)
        model(x).sum().backward()
        made.append(len(graphs) - before)

    report = swap_linears(model, SWITCHBACK, step=step)
    assert bool(report.swapped) is faster
    assert {i: count for i, count in enumerate(made) if count} == {0: 1, _by_step.WARM_UP: 1}
    model(x).sum().backward()  # what was chosen is compiled, with the limit as it was
    assert len(graphs) == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(x)


def test_a_real_training_step_on_this_cpu() -> None:
    """Float8 is simulated here: nothing is gained. Weights move by all the steps, and go on moving."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = ng.optim.AdamW(model.parameters(), lr=1e-3)
    x, losses = torch.randn(64, 64), []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    report = swap_linears(model, ng.linear.TENSORWISE_FP8, step=step)
    assert report.swapped == []
    own, plain = report.step_seconds
    assert own > plain > 0
    step()
    assert len(losses) == STEPS + 1
    assert losses[-1] < losses[0]


@pytest.mark.gpu
def test_a_step_of_small_layers_on_a_gpu_waits_for_the_host() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16))).to("cuda", torch.bfloat16)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    report = swap_linears(model, SWITCHBACK, step=lambda: model(x).sum().backward())
    assert report.swapped == []
    assert report.step_seconds[0] > report.step_seconds[1]


def on_a_rank(rank: int, world: int, folder: str, lone: bool) -> None:
    """A step with a collective; by the clock of the first rank it is faster swapped, by that of the second not."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model = nn.ModuleDict({"layer": nn.Linear(16, 8 if lone and rank else 16)})
    swapped = [lambda on: 1.0 if on else 2.0, lambda on: 3.0 if on else 1.5][rank]
    clock = Clocked(model, lambda on, _: swapped(on))
    _speeds.time = SimpleNamespace(perf_counter=lambda: clock.now)

    def step() -> None:
        clock()
        dist.all_reduce(torch.ones(1))

    report = swap_linears(model, SWITCHBACK, step=step)
    torch.save((report.swapped, report.step_seconds, len(clock.sides)), f"{folder}/out{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("lone", [False, True], ids=["both have layers", "one has"])
def test_ranks_decide_alike_by_the_slowest(tmp_path: Path, lone: bool) -> None:
    """The first has 1 and 2 seconds, the second 3 and 1.5 or, where none of its layers is swapped, 1.5 and 1.5."""
    run_ranks(on_a_rank, 2, 2, str(tmp_path), lone)
    times, swapped = ((1.5, 2.0), ["layer"]) if lone else ((3.0, 2.0), [])
    assert torch.load(tmp_path / "out0") == (swapped, times, STEPS)
    assert torch.load(tmp_path / "out1") == ([], times, STEPS)
