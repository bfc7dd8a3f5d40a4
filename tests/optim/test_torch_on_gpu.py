"""torch's conventions where they are about the device: capturing a step, rates that live there, moving a state."""

from __future__ import annotations

import copy
import gc
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import NAMESAKES, backward, distance, ours, parameters, torchs, train, values

from narrowgauge import optim
from narrowgauge.kernels._cuda_graphs import release_destroyed

pytestmark = pytest.mark.gpu

NEAR = {
    "Adam": 5e-5, "AdamW": 1e-4, "SGD": 5e-6, "Adafactor": 5e-5, "Adagrad": 5e-6, "Muon": 5e-3,
    "RMSprop": 5e-6, "NAdam": 1e-4,
}  # fmt: skip


def test_torchs_inputs_and_errors_for_a_gpu() -> None:
    pytest.importorskip("expecttest", reason="torch's list of optimizer inputs needs the package expecttest")
    from torch.testing._internal.common_optimizers import optim_db

    for info in (info for info in optim_db if info.name in NAMESAKES):
        for given in info.optim_inputs_func(device="cuda"):
            if not given.kwargs.get("amsgrad"):
                end, _ = train(ours(info.name), given.kwargs, device="cuda")
                wanted, _ = train(torchs(info.name), given.kwargs, device="cuda")
                assert distance(end, wanted) < NEAR[info.name], (info.name, given.desc)
        for bad in info.optim_error_inputs_func("cuda", torch.float32):
            if "complex" in bad.optimizer_error_input.desc:
                continue  # refused earlier, with all other dtypes
            kwargs, params = bad.optimizer_error_input.kwargs, bad.optimizer_error_input.params
            with pytest.raises(bad.error_type, match=bad.error_regex):
                ours(info.name)(params, **kwargs)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"betas": (0.75, 0.875), "weight_decay": 0.1}),
    ("AdamW", {"states": "8bit", "min_quantized_size": 0}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adafactor", {"weight_decay": 0.1}),
    ("ScheduleFreeAdamW", {"warmup_steps": 3}),
    ("Muon", {}),
    ("AdamW", {"clip_updates": True}),
    ("StableAdamW", {"states": "log8", "min_quantized_size": 0}),
    ("Lion", {}),
    ("LAMB", {"clip_updates": True}),
    ("LARS", {"momentum": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("NAdam", {}),
    ("AdEMAMix", {"t_alpha": 100, "t_beta3": 100, "cautious": True}),
    ("Adan", {}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_a_captured_step_follows_rate_and_betas_on_the_device(name: str, options: dict[str, Any]) -> None:
    """What a replay does with a rate changed in place is what an ordinary step does with that rate."""
    ps, others = parameters("cuda"), parameters("cuda")
    rate = torch.tensor(0.01, device="cuda")
    options = copy.deepcopy(options) | {"lr": rate}
    if "betas" in options:
        options["betas"] = tuple(torch.tensor([[beta]], device="cuda") for beta in options["betas"])
    captured = ours(name)(ps, capturable=True, **options)
    ordinary = ours(name)(others, **copy.deepcopy(options))
    if name == "Adafactor":  # a graph takes factored moments' steps in eager torch, whose sums have another order
        captured._engine.backends = ordinary._engine.backends = ()
    for some in (ps, others):
        backward(some, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step()
    torch.cuda.current_stream().wait_stream(side)
    ordinary.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in range(1, 6):
        for some, one in ((ps, captured), (others, ordinary)):
            one.zero_grad(set_to_none=False)
            backward(some, step)
            one.param_groups[0]["lr"].mul_(0.8)
            if step == 3 and "betas" in options:
                one.param_groups[0]["betas"][0].fill_(0.5)
        graph.replay()
        ordinary.step()
    assert torch.equal(values(ps), values(others))
    assert all(captured.state[p]["step"] == 6 and captured.state[p]["step"].is_cuda for p in ps)
    assert not torch.equal(values(ps), values(parameters()))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_first_step_is_not_captured() -> None:
    ps = parameters("cuda")
    optimizer = ours("AdamW")(ps, capturable=True)
    backward(ps, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"the first step of 0\.0 .*cannot be captured"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("options", [{"nonfinite": "raise"}, {"arithmetic": "strict"}], ids=str)
def test_what_waits_for_the_device_is_not_captured(options: dict[str, Any]) -> None:
    ps = parameters("cuda")
    optimizer = ours("AdamW")(ps, **options)
    backward(ps, 0)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"nonfinite must be .* in a captured graph"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", NAMESAKES)
def test_rates_on_the_device_are_never_waited_for(name: str) -> None:
    ps = parameters("cuda")
    optimizer = ours(name)(ps, lr=torch.tensor(0.01, device="cuda"))
    backward(ps, 0)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_whole_training_step_is_captured() -> None:
    """Its gradients are made inside the graph, and ordinary steps between replays make others elsewhere."""
    runs = []
    for graphed in (True, False):
        ps = parameters("cuda")
        optimizer = ours("AdamW")(
            ps, lr=torch.tensor(0.01, device="cuda"), weights="plain", states="8bit", min_quantized_size=0
        )
        noise = [torch.zeros_like(p) for p in ps]

        def work(ps=ps, optimizer=optimizer, noise=noise) -> None:
            optimizer.zero_grad(set_to_none=True)
            sum(((p - n) ** 2).sum() for p, n in zip(ps, noise, strict=True)).backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
            work()
        torch.cuda.current_stream().wait_stream(side)
        step = work
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            step = graph.replay
        for number in range(6):
            for n in noise:
                n.copy_(torch.randn(n.shape, generator=torch.Generator().manual_seed(number)))
            optimizer.param_groups[0]["lr"].mul_(0.8)
            (work if number == 2 else step)()
        runs.append(values(ps))
        assert all(optimizer.state[p]["step"] == 8 for p in ps)
    assert torch.equal(*runs)


def captured(optimizer: torch.optim.Optimizer) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph


def test_what_a_graph_reads_is_kept_as_long_as_the_graph() -> None:
    ps = parameters("cuda")
    optimizer = ours("AdamW")(ps)
    backward(ps, 0)
    optimizer.step()
    before = release_destroyed()
    for _ in range(6):
        graph = captured(optimizer)
        graph.replay()
        optimizer.step()
        assert release_destroyed() == before + 1
        torch.cuda.synchronize()
        del graph
        until = time.monotonic() + 20
        while release_destroyed() > before and time.monotonic() < until:
            time.sleep(0.01)  # CUDA destroys what a graph owned in a thread of its own
        assert release_destroyed() == before
    assert all(optimizer.state[p]["step"] == 13 for p in ps)


def test_a_graph_is_replayed_after_other_parameters_were_stepped() -> None:
    runs = []
    for graphed in (True, False):
        ps = parameters("cuda")
        optimizer = ours("AdamW")(ps, states="8bit", min_quantized_size=0)
        backward(ps, 0)
        optimizer.step()
        step = captured(optimizer).replay if graphed else optimizer.step
        step()
        without, ps[0].grad = ps[0].grad, None
        optimizer.step()  # a list without the first parameter takes the place of the captured one
        ps[0].grad = without
        gc.collect()
        sizes = (64, 128, 256, 512, 1024, 2048)
        others = [torch.full((size,), -1, dtype=torch.int64).pin_memory() for size in sizes for _ in range(8)]
        step()
        torch.cuda.synchronize()
        del others
        runs.append(values(ps))
    assert torch.equal(*runs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_raising_waits_once_for_all() -> None:
    ps = parameters("cuda")
    optimizer = ours("AdamW")(ps, nonfinite="raise")
    backward(ps, 0)
    optimizer.step()
    assert all(row.path.startswith("fused Triton") for row in optimizer.describe().rows)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="called a synchronizing") as waits:
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing" in str(wait.message) for wait in waits) == 1
    ps[1].grad[0, 0] = torch.nan
    before = values(ps)
    with pytest.raises(FloatingPointError, match=r"^0\.1: the gradient has inf or NaN"):
        optimizer.step()
    assert torch.equal(values(ps), before)


def test_stepping_in_backward_frees_gradients_on_the_device() -> None:
    """Twelve square layers of 32 MiB gradients: the same bits, at a peak lower by most of them."""
    ends, peaks = [], []
    for wrap in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(12)))
        model = model.to("cuda", torch.bfloat16)
        options: dict[str, Any] = {"weights": "split8", "lr": 1e-3}
        if wrap:
            optimizer = optim.step_in_backward(model, optim.AdamW8bit, **options)
        else:
            optimizer = optim.AdamW8bit(model.named_parameters(), **options)
        for step in range(3):
            if step == 1:  # the states exist
                torch.cuda.reset_peak_memory_stats()
            x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(step))
            model(x.to("cuda", torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
        ends.append(values(list(model.parameters())))
        del model, optimizer
        torch.cuda.empty_cache()
    assert torch.equal(*ends)
    assert peaks[1] - peaks[0] > 8 * 2 * 4096 * 4096


def test_the_captured_loop_of_the_docs_is_the_eager_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Its two graphs, of steps with gauges and without, print what eager steps print."""
    page = Path(__file__).resolve().parents[2] / "docs" / "training_loops.md"
    (block,) = [
        text for text in re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL) if "graph.replay()" in text
    ]
    eager = "optimizer.gauges = step % 10 == 0; loss = train_step(); stats = optimizer.last_stats"
    ends, printed = [], []
    for text in (block, block.replace("graph.replay()", eager)):
        space: dict[str, Any] = {}
        exec(text, space)
        ends.append(values(list(space["model"].parameters())))
        assert all(state["step"] == 32 for state in space["optimizer"].state.values())
        printed.append([list(map(float, line.split())) for line in capsys.readouterr().out.splitlines()])
    assert len(printed[0]) == 3
    for mine, theirs in zip(*printed, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert (ends[0] - ends[1]).abs().max() < 1e-3
