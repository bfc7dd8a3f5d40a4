"""Memory plans: bytes counted by hand, steps traced beside real ones on the CPU, and questions turned around."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measured import peak_bytes, saved_bytes
from torch import Tensor, nn

from narrowgauge import linear, recipes
from narrowgauge.recipes import _parallel
from narrowgauge.recipes._losses import token_loss
from narrowgauge.recipes._parallel import WORKSPACE
from narrowgauge.recipes._plan import largest, parse_bytes
from narrowgauge.recipes._timeline import Recorder, rounded
from narrowgauge.recipes._trace import Traced, _loss_apart, enable_checkpointing, without_memory
from narrowgauge.trainers import build_model
from narrowgauge.trainers._models import configuration, next_token_loss
from pairwise import by_pairs

# By hand, for a matrix of 512 x 512 (N = 262 144 elements, 1024 blocks of 256): bytes of the weight, of what is
# added to it, and of both moments. A block of 8 bits has one scale of 4 bytes, one of log4's two.
N, BLOCKS = 512 * 512, 1024
LOG8, LOG4 = N + 4 * BLOCKS, N // 2 + 8 * BLOCKS
M_LOG4 = N // 2 + 4 * BLOCKS  # beside v it has one number a block
BY_HAND = {
    "fp32": (4 * N, 0, 8 * N),
    "bf16": (2 * N, 0, 4 * N),
    "collage-light": (2 * N, 2 * N, 4 * N),
    "collage-plus": (2 * N, 2 * N, 2 * N + 4 * N),
    "master": (2 * N, 4 * N, 8 * N),
    "fp32-states": (2 * N, 0, 8 * N),
    "kahan": (2 * N, 2 * N, 4 * N),
    "stochastic": (2 * N, 0, 4 * N),
    "split": (2 * N, 2 * N, 8 * N),
    "split8": (2 * N, N, 8 * N),
    "adamw8bit": (4 * N, 0, 2 * LOG8),
    "adamw8bit-expansion": (2 * N, 2 * N, 2 * LOG8),
    "adamw8bit-split": (2 * N, 2 * N, 2 * LOG8),
    "adamw8bit-split8": (2 * N, N, 2 * LOG8),
    "adamw6bit-split8": (2 * N, N, M_LOG4 + LOG8),
    "adamw8bit-split4": (2 * N, N // 2, 2 * LOG8),
    "adamw6bit-split4": (2 * N, N // 2, M_LOG4 + LOG8),
    "adamw6bit-stochastic": (2 * N, 0, M_LOG4 + LOG8),
    "adamw4bit-split8": (2 * N, N, M_LOG4 + LOG4),
    "adamw8bit-dynamic": (4 * N, 0, 2 * LOG8),
    "adamw8bit-dynamic-split8": (2 * N, N, 2 * LOG8),
    "stable-adamw": (4 * N, 0, 8 * N),
    "lion8bit": (4 * N, 0, LOG8),
}


def square_loss(model: nn.Module, batch: int, sequence: int) -> Tensor:
    """A loss of rows: one a token."""
    dtype = next(model.parameters()).dtype
    out: Tensor = model(torch.empty((batch * sequence, 512), dtype=dtype, device="meta"))
    return out.sum()


@pytest.mark.parametrize("name", recipes.names())
def test_what_is_held_is_counted_by_hand(name: str) -> None:
    weight, low, moments = BY_HAND[name]
    plan = recipes.plan_memory(nn.Linear(512, 512, bias=False), name, loss=square_loss)
    assert plan.held["weights"] == plan.held["gradients"] == weight
    assert plan.held["low words"] == low
    # Beside the moments: a counter of steps and one of those skipped, 512 bytes each, and the kernels' tables.
    tables = plan.held["states"] - moments - 1024
    assert 0 < tables < 0.005 * 8 * N
    frozen = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    frozen[0].requires_grad_(False)  # which has no gradient and no state
    held = recipes.plan_memory(frozen, name, loss=square_loss).held
    assert held == plan.held | {"weights": 2 * weight}
    recipe = recipes.get(name)
    assert weight * 2 + low + moments == pytest.approx(recipe.bytes_per_parameter() * N, rel=1e-12)


def test_a_step_by_hand() -> None:
    """Two layers without biases, bf16: the input is saved by the first, relu's output by relu and by the second.

    x (64, 512) is 65 536 bytes, so is every feature and its gradient; the output's gradient comes expanded from one
    number. In the backward pass of the second layer are its input's gradient and its weight's, both new.
    """
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False))
    traced = Traced(without_memory(model), recipes.get("A"), None, False, square_loss, {})
    timeline = traced.trace(4, 16)
    feature, gradient = 64 * 512 * 2, 2 * N
    before = timeline.at("backward")
    assert before.live == {"activations": feature, "loss": feature + 512, "backward": 0, "gradients": 0}
    after = timeline.at("optimizer")
    assert after.live == {"activations": 0, "loss": 512, "backward": 0, "gradients": 2 * gradient}
    # At the end: x, the gradient behind relu, and both weights' gradients; loss and its gradient, 512 bytes each.
    assert timeline.peak().total == 2 * feature + 2 * gradient + 1024
    assert timeline.peak(("gradients",)).live["gradients"] == 2 * gradient


@by_pairs(
    of={"gpt2 fp32": ("mini", "fp32"), "gpt2 bf16": ("mini", "A"), "llama bf16": ("llama-micro", "A")},
    checkpointing={"kept": False, "checkpointed": True},
    plan={"linear": None, "saved": linear.SWITCHBACK, "codes": linear.SWITCHBACK_M},
)
def test_a_trace_is_what_a_real_step_takes(of: tuple[str, str], checkpointing: bool, plan: Any) -> None:
    """Storages that autograd really saves, and the allocator's own count of a step, on the CPU."""
    preset, recipe = of
    model = build_model(preset, vocabulary=1024, sequence=128, seed=0)
    traced = Traced(without_memory(model), recipes.get(recipe), plan, checkpointing, token_loss, {})
    timeline = traced.trace(8, 128)
    recipes.cast(model, recipes.get(recipe).dtype)
    if plan is not None:
        linear.swap_linears(model, plan)
    if checkpointing:
        enable_checkpointing(model)
    windows = torch.randint(0, 1024, (8, 129))
    real = saved_bytes(model, lambda: next_token_loss(model, windows), windows)
    # The logits' labels are a copy that the trace has, and the loss itself.
    assert timeline.at("backward").total == pytest.approx(real, rel=0.01)
    if plan is not None:  # in eager torch on a CPU quantizers take float32 copies that kernels do not
        return

    def step() -> None:
        torch.autograd.backward(next_token_loss(model, windows))

    step()
    for p in model.parameters():
        p.grad = None
    assert timeline.peak().total == pytest.approx(peak_bytes(step), rel=0.01)


@pytest.mark.parametrize("preset", ["micro", "llama-micro"])
def test_held_activations_are_what_a_real_step_holds(preset: str) -> None:
    """Storages alive between the passes, on the meta device and on the CPU."""
    model = build_model(preset, vocabulary=256, sequence=64, seed=0)
    bare = without_memory(model)
    traced = Traced(bare, recipes.get("A"), None, False, token_loss, {}, hold="e4m3")
    planned = traced.trace(8, 64).at("backward").live["activations"]
    whole = Traced(without_memory(model), recipes.get("A"), None, False, token_loss, {}).trace(8, 64)
    recipes.cast(model, torch.bfloat16)
    linear.hold_activations(model)
    windows = torch.randint(0, 256, (8, 65))
    recorder = Recorder([*model.parameters(), *model.buffers(), windows], {})
    with recorder, recorder.during("loss"), _loss_apart(model, recorder):
        loss = next_token_loss(model, windows)
        recorder.timeline.mark("backward")
    real = recorder.timeline.at("backward").live["activations"]
    assert loss.requires_grad
    assert planned == pytest.approx(real, rel=0.01)
    assert planned < 0.75 * whole.at("backward").live["activations"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_gradients_of_an_earlier_batch_are_added_to(checkpointing: bool) -> None:
    model = build_model("mini", vocabulary=1024, sequence=128, seed=0)
    planned = without_memory(model)
    traced = Traced(planned, recipes.get("fp32"), None, checkpointing, token_loss, {}, accumulate=True)
    if checkpointing:
        enable_checkpointing(model)
    windows = torch.randint(0, 1024, (8, 129))

    def step() -> None:
        torch.autograd.backward(next_token_loss(model, windows))

    step()
    before = [p.grad for p in model.parameters()]
    real = peak_bytes(step)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert traced.trace(8, 128).peak().total == pytest.approx(real, rel=0.01)
    options = {"batch": 8, "sequence": 128, "checkpointing": checkpointing}
    plan = recipes.plan_memory(model, "fp32", accumulate=True, **options)
    assert plan.at_peak["gradients"] == plan.held["gradients"]
    assert plan.peak == traced.trace(8, 128).peak().total + sum(traced.held().values()) + WORKSPACE
    assert plan.peak > recipes.plan_memory(model, "fp32", **options).peak


@pytest.fixture(scope="module")
def config() -> Any:
    return configuration("tiny", vocabulary=1000, sequence=512)


def peak(config: Any, recipe: str = "D", batch: int = 2, sequence: int = 64, **options: Any) -> int:
    return recipes.plan_memory(config, recipe, batch=batch, sequence=sequence, **options).peak


def test_more_takes_more(config: Any) -> None:
    one = peak(config)
    assert peak(config, batch=1) < one < peak(config, batch=64)
    assert one < peak(config, sequence=65)
    assert peak(config, "adamw8bit-split8") < peak(config, "A") < one
    assert peak(config, "A", 16, 512, checkpointing=True) < peak(config, "A", 16, 512)


def test_attention_is_linear_in_the_sequence_and_as_real_with_a_mask() -> None:
    class Attention(nn.Module):
        def __init__(self, masked: bool) -> None:
            super().__init__()
            self.masked, self.scale = masked, nn.Parameter(torch.ones(64))

        def forward(self, sequence: int) -> Tensor:
            x = torch.empty((1, 4, sequence, 64), device="meta", dtype=self.scale.dtype) * self.scale
            mask = torch.ones((sequence, sequence), device="meta", dtype=torch.bool) if self.masked else None
            return nn.functional.scaled_dot_product_attention(x, x, x, mask)

    def saved(sequence: int, masked: bool, recipe: str) -> Any:
        loss = lambda model, _, sequence: model(sequence).sum()  # noqa: E731
        return recipes.plan_memory(Attention(masked), recipe, sequence=sequence, loss=loss).saved

    for recipe, itemsize in (("A", 2), ("fp32", 4)):
        one = 4 * 1024 * 64 * itemsize  # a tensor of all heads
        # What the product reads, what attention reads three times, its output, a number a row, the state of random
        # numbers in two pieces, the loss.
        assert saved(1024, False, recipe) == 3 * one + 4 * 4 * 1024 + 3 * 512
        assert saved(2048, False, recipe) < 2.01 * saved(1024, False, recipe)
        # A mask is kept as numbers, once for all heads: never four heads of scores.
        assert saved(1024, True, recipe) - saved(1024, False, recipe) == 1024 * 1024 * itemsize


@pytest.mark.parametrize(
    ("recipe", "memory"),
    [
        pytest.param("D", "400MB", marks=pytest.mark.slow),
        pytest.param("adamw8bit-split8", "250MB", marks=pytest.mark.slow),
        pytest.param("C", "1GB", marks=pytest.mark.slow),
    ],
)
def test_the_largest_that_fits_fits_and_one_more_does_not(config: Any, recipe: str, memory: str) -> None:
    plan = recipes.plan_memory(config, recipe, batch=2, sequence=64, device_memory=memory)
    room = parse_bytes("memory", memory)
    batch = plan.largest_batch()
    assert peak(config, recipe, batch) <= room < peak(config, recipe, batch + 1)
    tokens = plan.longest_sequence()
    assert tokens == 512 or peak(config, recipe, 2, tokens) <= room < peak(config, recipe, 2, tokens + 1)
    assert plan.largest_batch(plan.peak) == 2
    assert plan.largest_batch(plan.peak - 1) == 1
    assert plan.largest_batch("1MB") == 0
    model = plan.largest_model()
    assert recipes.plan_memory(model, recipe).peak <= room
    assert recipes.plan_memory(model + 1000, recipe).peak > room


@pytest.mark.parametrize(("kind", "positions"), [("Roberta", 512), ("Bert", 514), ("GPT2", 514)])
def test_positions_behind_that_of_padding_are_those_that_can_be_read(kind: str, positions: int) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(max_position_embeddings=514, vocab_size=300, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(config) if kind != "GPT2" else None
    plan = recipes.plan_memory(config, "D", batch=1, device_memory="80GB")
    assert plan.longest_sequence() == plan.positions == plan.sequence == positions
    if model is not None:
        model(torch.ones(1, positions, dtype=torch.long) * 5)
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.ones(1, positions + 1, dtype=torch.long) * 5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(0, 2000))
def test_the_search_finds_what_a_walk_finds(rises: list[int], memory: int) -> None:
    peaks = [sum(rises[: count + 1]) for count in range(len(rises))]
    walked = sum(one <= memory for one in peaks)
    assert largest(lambda count: peaks[count - 1], memory, len(peaks)) == walked


@pytest.mark.parametrize(
    ("linear", "square", "memory", "most"),
    [(12_345_678, 0.0, 80e9, 12), (1e4, 12.0, 80e9, 18), (1e4, 12.0, 5e9, 18), (1e4, 1e-3, 80e9, 18)],
)
def test_a_search_takes_few_looks(linear: float, square: float, memory: float, most: int) -> None:
    looks: list[int] = []

    def peak(count: int) -> float:
        looks.append(count)
        return 1e7 + linear * count + square * count * count

    found = largest(peak, memory, 1 << 20)
    assert len(looks) < most
    assert found == 1 << 20 or peak(found) <= memory < peak(found + 1)


def test_ddp_adds_buckets_and_fsdp_cuts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = recipes.plan_memory(config, "D", batch=2, sequence=64)
    ddp = recipes.plan_memory(config, "D", batch=2, sequence=64, gpus=8)
    assert ddp.peak - alone.peak == ddp.at_peak["communication"] == alone.held["gradients"]
    together = recipes.plan_memory(config, "D", batch=2, sequence=64, gpus=8, parallel="fsdp")
    monkeypatch.setattr(_parallel, "UNIT", 1)
    shared = recipes.plan_memory(config, "D", batch=2, sequence=64, gpus=8, parallel="fsdp")
    for part in ("weights", "gradients", "low words"):
        assert alone.held[part] / 8 <= shared.held[part] < alone.held[part] / 8 + 512 * 80
    # Gathered: all that is in no block, whole with its gradients, and two units, likewise; all blocks are one unit.
    model = without_memory(build_model("tiny", vocabulary=1000, sequence=512, seed=0))
    block = sum(rounded(2 * p.numel()) for p in model.transformer.h[0].parameters())
    root = sum(rounded(2 * p.numel()) for p in model.parameters()) - 6 * block
    assert shared.at_peak["communication"] == 2 * root + 4 * block
    assert together.at_peak["communication"] == 2 * root + 2 * 6 * block
    assert recipes.plan_memory(config, "D", batch=2, sequence=64, parallel="fsdp").peak == alone.peak


def test_units_of_fsdp_are_small_blocks_together_and_large_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_parallel, "UNIT", 100)
    model = nn.ModuleDict({
        "one": nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 5) for _ in range(5))}),  # of 25 parameters
        "other": nn.Sequential(nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)]), nn.ModuleList()),
        "head": nn.Linear(10, 10),
    })  # fmt: skip
    found = _parallel.units(model)
    assert [len(unit) for unit in found] == [3, 2, 1, 1]
    blocks = [*model["one"]["layers"], *model["other"][0]]
    assert [block for unit in found for block in unit] == blocks


def test_a_number_of_parameters_is_the_papers_table() -> None:
    """Collage, Table 2, for OpenLLaMA-7B's 6.74 billion: 53.9, 67.4, 80.9 and 107.8 GB."""
    count = 6_738_415_616
    for letter, each in {"A": 8, "B": 10, "C": 12, "D": 16}.items():
        plan = recipes.plan_memory(count, letter, device_memory="80GB")
        assert plan.peak == each * count
        assert plan.fits == (each * count <= 80e9)
        assert plan.saved is None
        shares = recipes.plan_memory(count, letter, gpus=8, parallel="fsdp")
        assert shares.peak == pytest.approx(each * count / 8, abs=8)
        assert recipes.plan_memory(count, letter, gpus=2).peak == (each + 2) * count


def test_the_model_is_left_alone() -> None:
    model = build_model("micro", vocabulary=300, sequence=16, seed=0)
    torch.autograd.backward(next_token_loss(model, torch.zeros((1, 17), dtype=torch.int64)))
    before = copy.deepcopy(model.state_dict())
    kinds = {name: type(module) for name, module in model.named_modules()}
    grads = [p.grad for p in model.parameters()]
    plan = recipes.plan_memory(model, "A", batch=2, sequence=16, linear=linear.SWITCHBACK, checkpointing=True)
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert [p.grad for p in model.parameters()] == grads
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert model.transformer.wte.weight.device.type == "cpu"
    from_config = recipes.plan_memory(model.config, "A", batch=2, sequence=16)
    assert recipes.plan_memory(model, "A", batch=2, sequence=16).peak == from_config.peak


def test_the_record_adds_up(config: Any) -> None:
    plan = recipes.plan_memory(config, "C", batch=2, sequence=64, device_memory="1GiB")
    record = plan.record()
    assert record["peak"] == sum(record["at_peak"].values()) == plan.peak
    assert record["at_peak"]["workspaces"] == WORKSPACE
    assert record["device_memory"] == 2**30
    assert record["fits"] is True


def test_what_cuda_keeps_of_dropout_is_a_byte() -> None:
    class Dropped(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.first, self.drop = nn.Linear(512, 512, bias=False), nn.Dropout(p)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.first(x)).square()

    without, with_it = (
        recipes.plan_memory(Dropped(p), "A", batch=8, sequence=64, loss=square_loss).saved for p in (0.0, 0.1)
    )
    assert with_it - without == 8 * 64 * 512


ERRORS: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "batch": (None, "D", {"batch": 0}, "batch must be an integer from 1.*, got 0"),
    "sequence": (None, "D", {"sequence": 513}, "sequence must be at most 512.*, got 513"),
    "memory": (None, "D", {"device_memory": "80 quarts"}, "device_memory must be a number.*, got '80 quarts'"),
    "model": (["gpt2"], "D", {}, "model_or_config must be a .*, got list"),
    "count": (0, "D", {}, "model_or_config must be at least 1.*, got 0"),
    "linear": (7, "D", {"linear": linear.SWITCHBACK}, "linear must .*got"),
    "checkpointing": (7, "D", {"checkpointing": True}, "checkpointing must .*got True"),
    "loss": (nn.Linear(512, 512), "D", {}, "loss must be a function .* for a Linear"),
    "held": (7, "D", {"hold_activations": "e4m3"}, "hold_activations must be left out for a number"),
    "held in": (None, "D", {"hold_activations": "fp4"}, "hold_activations must be .*got 'fp4'"),
    "held blocks": (
        None, "D", {"hold_activations": "int8", "checkpointing": True}, "hold_activations must be None with.*'int8'"
    ),
    "no blocks": (nn.Linear(8, 8), "D", {"checkpointing": True}, "checkpointing must be False for a Linear"),
    "no layers": (nn.LayerNorm(512), "A", {"linear": linear.SWITCHBACK, "loss": square_loss}, "linear must be"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:swap_linears. no linear layer:UserWarning")
@pytest.mark.parametrize(("model", "recipe", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_input_is_refused_by_name(
    config: Any, model: Any, recipe: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        recipes.plan_memory(config if model is None else model, recipe, **options)


def test_questions_without_an_answer_are_refused(config: Any) -> None:
    with pytest.raises(ValueError, match=r"^device_memory must be bytes, .*, got None"):
        recipes.plan_memory(config, "D", sequence=64).largest_batch()
    with pytest.raises(ValueError, match=r"^model_or_config must be a model .*, got 7 parameters"):
        recipes.plan_memory(7, "D").largest_batch("80GB")


class Indexes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x.sum(-1) > 0]


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.sum())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Indexes, "model must run on the meta device, got a Indexes whose step fails"),
        (Reads, "model must have a step .*, got one that reads a number of torch.bfloat16"),
    ],
)
def test_a_step_that_depends_on_values_is_refused(kind: type[nn.Linear], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        recipes.plan_memory(kind(512, 512), "A", loss=square_loss)


@pytest.mark.parametrize("wrong", [lambda y: y, lambda y: y.detach().sum(), lambda y: 1.0])
def test_a_loss_that_is_none_is_refused(wrong: Any) -> None:
    def loss(model: nn.Module, batch: int, _: int) -> Tensor:
        found: Tensor = wrong(model(torch.zeros(batch, 8, device="meta").bfloat16()))
        return found

    with pytest.raises(ValueError, match=r"^loss must return one element with a graph of gradients, got "):
        recipes.plan_memory(nn.Linear(8, 8), "bf16", batch=2, loss=loss)


def test_a_model_without_fused_attention_is_planned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Gemma2Config, Gemma2PreTrainedModel

    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", False)  # as transformers 5.24 has it
    config = Gemma2Config(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=64, vocab_size=300,
    )  # fmt: skip
    short, long = (recipes.plan_memory(config, "A", sequence=sequence).saved for sequence in (512, 1024))
    assert long > 3 * short  # scores of attention


def test_bytes_are_read_as_they_are_written() -> None:
    read = {"80GB": 80 * 10**9, "80 GiB": 80 << 30, "1.5tb": 15 * 10**11, "512B": 512, "2kB": 2000, "3MiB": 3 << 20}
    assert {text: parse_bytes("x", text) for text in read} == read
    assert parse_bytes("x", 12) == 12


def test_codes_and_scales_of_blocks_are_counted() -> None:
    """X in blocks along the tokens or X itself, and the tiles of W where the input has a gradient."""
    sides, tokens = ((640, 520), (520, 640)), 300

    def loss(model: nn.Module, batch: int, sequence: int) -> torch.Tensor:
        return model(torch.zeros(tokens, 640, dtype=torch.bfloat16, device="meta")).float().square().mean()

    def saved(plan: linear.LinearPlan) -> int:
        model = nn.Sequential(*(nn.Linear(*side, bias=False) for side in sides)).bfloat16()
        return recipes.plan_memory(model, "A", linear=plan, loss=loss).saved

    plain, weight = saved(linear.HIGH_PRECISION), rounded(520 * 640) + rounded(4 * 5 * 5)
    assert saved(replace(linear.BLOCKWISE_FP8, saved="input")) == plain + weight
    inputs = sum(rounded(tokens * n) + rounded(4 * 3 * n) - rounded(2 * tokens * n) for n, _ in sides)
    assert saved(linear.BLOCKWISE_FP8) == plain + weight + inputs
