"""Several processes: one checkpoint, whoever wrote it and whoever reads it; and ranks that fail, die or hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import KINDS, Net, made, ours, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from forked import START, run_ranks
from narrowgauge.distributed import (
    export_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from narrowgauge.distributed._checkpoint import _save
from narrowgauge.optim._sharded_state import with_single_words

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have: in bf16 the order of sums is seen

WORLD = 2
# Storages whose words are sharded element by element as parameters are, or in blocks that begin with shards.
SHARDED: dict[str, tuple[torch.dtype, Callable]] = {
    "torch AdamW": KINDS["torch AdamW"],
    "fp32": KINDS["fp32"],
    "split4, bf16": (torch.bfloat16, lambda ps: ours(ps, weights="split4", states="bf16")),
    "split8, log8": KINDS["split8, log8"],
    "expansion, log4": KINDS["expansion, log4"],
    "clipped": KINDS["clipped"],
}
# How near losses stay; the second where moments were encoded anew, in 4 bits among others.
NEAR = (1e-3, 1e-2)
OWN = ("m.", "v.", "sh")
IN_BLOCKS = ("split8, log8", "expansion, log4")
DDP = ("fp32", "split8, log8")


def sharded(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2: of its 33 and 5 rows the ranks have unequal numbers."""
    dtype, optimizer = SHARDED[kind]
    net = Net(dtype, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert isinstance(net.up.weight, DTensor)
    return net, optimizer(list(net.named_parameters()))


def replicated(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    net, optimizer = made(kind, seed)
    return DistributedDataParallel(net), optimizer


WAYS = {"fsdp2": (sharded, tuple(SHARDED)), "ddp": (replicated, DDP)}


def on_a_rank(rank: int, world: int, folder: str, work: Callable[..., Any], *given: Any) -> None:
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store-{world}", rank=rank, world_size=world)
    try:
        torch.save(work(rank, Path(folder), *given), f"{folder}/{work.__name__}-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_ranks(world: int, folder: Path, work: Callable[..., Any], *given: Any, start: str = START) -> list[Any]:
    """What each rank returned."""
    run_ranks(on_a_rank, world, world, str(folder), work, *given, start=start)
    return [torch.load(folder / f"{work.__name__}-{rank}.pt") for rank in range(world)]


def several(rank: int, folder: Path, works: Sequence[Callable[[int, Path], Any]]) -> dict[str, Any]:
    """What each of some works returns, by its name: one start of processes for all of them."""
    found = {}
    for work in works:
        (folder / work.__name__).mkdir(exist_ok=True)
        found[work.__name__] = work(rank, folder / work.__name__)
    return found


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters and states by name, in float64, which holds them all (gloo gathers no int16)."""

    def one(value: torch.Tensor) -> torch.Tensor:
        wide = value.detach().to(torch.float64)
        return wide.full_tensor() if isinstance(wide, DTensor) else wide

    # As they are kept: a state_dict shows words of a dtype that collectives do not move as bytes.
    states = getattr(optimizer, "state_in_pieces", optimizer.state_dict)()
    ids = [i for group in states["param_groups"] for i in group["params"]]
    return {
        name.removeprefix("module."): {"p": one(p)}
        | {word: one(v) for word, v in with_single_words(states["state"][i], p.shape).items()}
        for i, (name, p) in zip(ids, model.named_parameters(), strict=True)
    }


def saving(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save, train on; each rank draws other random numbers."""
    told: dict[str, Any] = {}
    for way, (wrapped, kinds) in WAYS.items():
        for kind in kinds:
            model, optimizer = wrapped(kind)
            train(model, optimizer, range(3))
            run = folder / f"{way} {kind}"
            torch.manual_seed(rank)
            options = {"model": model, "optimizer": optimizer, "step": 3, "random_states": True}
            if kind == "fp32":
                path = save_checkpoint_async(run, **options, extra={"of": rank}).wait()
            else:
                path = save_checkpoint(run, **options, extra={"of": rank})
            assert path == run / "step-000000003"
            drawn = float(torch.rand(()))
            states = whole(model, optimizer)
            losses = train(model, optimizer, range(3, 6))
            told[f"{way} {kind}"] = {"drawn": drawn, "states": states, "losses": losses}
            # Back again on as many ranks: the run that never stopped.
            fresh, loaded = wrapped(kind, seed=1)
            assert latest_checkpoint(run) == path
            assert load_checkpoint(path, model=fresh, optimizer=loaded, random_states=True) == (3, {"of": 0})
            assert float(torch.rand(())) == drawn
            assert train(fresh, loaded, range(3, 6)) == losses
    return told


def loading_on_three(rank: int, folder: Path) -> dict[str, list[float]]:
    told = {}
    for way, (wrapped, kinds) in WAYS.items():
        for kind in kinds:
            model, optimizer = wrapped(kind, seed=1)
            path = latest_checkpoint(folder / f"{way} {kind}")
            assert path is not None
            assert load_checkpoint(path, model=model, optimizer=optimizer) == (3, {"of": 0})
            told[f"{way} {kind}"] = train(model, optimizer, range(3, 6))
            again = save_checkpoint(folder / f"{way} {kind} of 3", model=model, optimizer=optimizer, step=6)
            assert again.name == "step-000000006"
    # Codes of whole parameters beside shards: put together, or decoded to other storages.
    for kind in ("split8, log8", "split4, bf16"):
        model, optimizer = sharded(kind)
        load_checkpoint(folder / "ddp split8, log8" / "step-000000003", model=model, optimizer=optimizer)
        told[f"ddp split8, log8 as {kind}"] = train(model, optimizer, range(3, 6))
    return told


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, on_ranks(WORLD, folder, saving)


def alone(way: str, kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    if way == "ddp":
        return made(kind, seed)
    dtype, optimizer = SHARDED[kind]
    net = Net(dtype, seed)
    return net, optimizer(list(net.named_parameters()))


every = pytest.mark.parametrize(
    ("way", "kind"), [(way, kind) for way, (_, kinds) in WAYS.items() for kind in kinds]
)


@every
def test_saved_on_two_resumed_on_one(way: str, kind: str, saved: tuple[Path, list[dict]]) -> None:
    """Parameters, states and low words to the bit; what follows is one process's run, to rounding."""
    folder, told = saved
    net, optimizer = alone(way, kind, seed=1)
    path = latest_checkpoint(folder / f"{way} {kind}")
    assert path is not None
    anew = kind in IN_BLOCKS and way == "fsdp2"
    with pytest.warns(UserWarning, match="encoded moments anew") if anew else nullcontext():
        assert load_checkpoint(path, model=net, optimizer=optimizer).step == 3
    for rank in told:
        wanted = rank[f"{way} {kind}"]["states"]
        got = whole(net, optimizer)
        assert got.keys() == wanted.keys()
        for name, words in wanted.items():
            # Shards that begin within a block of the whole have blocks of their own, encoded anew here: see below.
            kept = {w: x for w, x in words.items() if not anew or w[:2] not in OWN}
            assert got[name].keys() >= kept.keys()
            assert all(torch.equal(got[name][word], value) for word, value in kept.items())
    losses = train(net, optimizer, range(3, 6))
    assert losses == pytest.approx(told[0][f"{way} {kind}"]["losses"], rel=NEAR[anew])
    if way == "ddp":
        assert losses == told[0][f"{way} {kind}"]["losses"]
    net, optimizer = alone(way, kind)
    assert train(net, optimizer, range(6))[3:] == pytest.approx(losses, rel=NEAR[anew])


def test_each_rank_writes_what_only_it_has(saved: tuple[Path, list[dict]]) -> None:
    folder, told = saved
    files = {way: sorted((folder / f"{way} fp32" / "step-000000003").glob("*.safetensors")) for way in WAYS}
    names = {way: [path.name for path in paths] for way, paths in files.items()}
    assert names["fsdp2"] == names["ddp"] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    sizes = {way: [path.stat().st_size for path in paths] for way, paths in files.items()}
    elements = sum(p.numel() for p in Net().parameters())
    assert sizes["fsdp2"][1] > 12 * elements * 0.4  # its half of weights and two moments
    assert sizes["ddp"][1] < 12 * elements  # its random states alone
    assert sizes["ddp"][0] > 12 * elements
    assert told[0]["ddp fp32"]["drawn"] != told[1]["ddp fp32"]["drawn"]


def test_saved_on_two_resumed_on_three_and_on_one_again(saved: tuple[Path, list[dict]]) -> None:
    folder, told = saved
    on_three = on_ranks(3, folder, loading_on_three)
    for name, one_kind in told[0].items():
        for one in on_three:
            # Sums of three gradients are rounded otherwise, and blocks are others.
            near = NEAR[name.removeprefix("fsdp2 ") in IN_BLOCKS]
            assert one[name] == pytest.approx(one_kind["losses"], rel=near)
        way, kind = name.split(" ", 1)
        net, optimizer = alone(way, kind, seed=1)
        path = latest_checkpoint(folder / f"{name} of 3")
        assert path is not None
        anew = kind in IN_BLOCKS and way == "fsdp2"
        with pytest.warns(UserWarning, match="encoded moments anew") if anew else nullcontext():
            assert load_checkpoint(path, model=net, optimizer=optimizer).step == 6
        if anew:
            with pytest.raises(ValueError, match="do not begin with its blocks of 64"):
                export_checkpoint(path, folder / f"{name}.pt")
            continue
        whole = torch.load(export_checkpoint(path, folder / f"{name}.pt"))
        assert all(torch.equal(whole["model"][n], value) for n, value in net.state_dict().items())


def refused(rank: int, folder: Path) -> str:
    """A word that is neither sharded as its parameter nor the same everywhere."""
    model, optimizer = sharded("torch AdamW")
    optimizer.state[model.up.weight]["codes"] = torch.zeros(3)
    try:
        save_checkpoint(folder / "run", model=model, optimizer=optimizer, step=0)
    except ValueError as error:
        return str(error)
    return "saved"


def test_a_state_that_is_not_sharded_as_its_parameter_is_refused(told: tuple[Path, list[dict]]) -> None:
    folder, ranks = told
    for one in ranks:
        assert one["refused"].startswith("optimizer: 'codes' of up.weight must be sharded as its parameter is")
    assert not (folder / "refused" / "run").exists()


def failing(rank: int, folder: Path) -> list[str]:
    """A full disk on one rank, then on the other; then all is well again."""
    told = []
    run, net = folder / "run", DistributedDataParallel(Net())
    options = {"model": net, "optimizer": None, "timeout": 20.0, "random_states": True}
    save_checkpoint(run, step=1, **options)
    real = _save.write_tensors

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    for who in (1, 0):
        _save.write_tensors = full if rank == who else real
        try:
            save_checkpoint(run, step=2, **options)
        except (OSError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
        assert latest_checkpoint(run) == run / "step-000000001"
    _save.write_tensors = real
    assert save_checkpoint(run, step=2, **options) == run / "step-000000002"
    # A model that one rank cannot load, and nobody then does.
    dist.barrier()
    kept = [p.detach().clone() for p in net.parameters()]
    try:
        load_checkpoint(run / "step-000000002", model=net if rank == 0 else nn.Linear(2, 2), optimizer=None)
    except (ValueError, RuntimeError) as error:
        told.append(f"{type(error).__name__}: {error}")
    assert all(map(torch.equal, net.parameters(), kept))
    # What one rank cannot save, and nobody then does.
    try:
        save_checkpoint_async(run, step=3, extra=object() if rank else None, **options).wait()
    except (ValueError, RuntimeError) as error:
        told.append(f"{type(error).__name__}: {error}")
    # A folder that cannot be made, so that there is none to leave word in.
    (folder / "file").touch()
    try:
        save_checkpoint(folder / "file" / "run", step=2, **options)
    except (OSError, RuntimeError) as error:
        told.append(f"{type(error).__name__}: {error}")
    return told


def differing(rank: int, folder: Path) -> list[str]:
    """A step, a number of checkpoints and a folder that one rank has otherwise."""
    said = []
    for given in ({"step": 6 + rank}, {"keep_last": 2 + rank}, {"directory": folder / f"run{rank}"}):
        for save in (save_checkpoint, save_checkpoint_async):
            options = {"directory": folder / "run", "model": Net(), "optimizer": None, "step": 5, "timeout": 5.0}
            try:
                save(**options | given)
            except ValueError as error:
                said.append(str(error))
    return said


def evaluating(rank: int, folder: Path) -> tuple[list[bool], list[str]]:
    """The weights alone, of a model that was saved with an optimizer; and what another optimizer drops."""
    model, optimizer = sharded("split4, bf16")
    train(model, optimizer, range(2))
    path = save_checkpoint(folder / "run", model=model, optimizer=optimizer, step=2)
    fresh, _ = sharded("split4, bf16", seed=1)
    load_checkpoint(path, model=fresh, optimizer=None)
    if rank == 0:
        torch.save([p.detach().to_local() for p in fresh.parameters()], folder / "first.pt")
    pairs = zip(model.parameters(), fresh.parameters(), strict=True)
    equal = [torch.equal(p.detach().to_local(), q.detach().to_local()) for p, q in pairs]
    paths = path, save_checkpoint(folder / "run", model=model, optimizer=optimizer, step=3)
    with pytest.raises(
        ValueError, match=r"^path must be one checkpoint on all ranks, got another on rank 1 than on"
    ):
        load_checkpoint(paths[rank], model=fresh, optimizer=None)
    plain = ours(list(fresh.parameters()), weights="plain", states="bf16")
    with pytest.warns(UserWarning, match="dropped") as caught:
        load_checkpoint(path, model=fresh, optimizer=plain)
    return equal, [str(one.message) for one in caught]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("told")
    return folder, on_ranks(WORLD, folder, several, (refused, failing, differing, evaluating))


def test_ranks_that_save_different_things_are_told_so_at_once(told: tuple[Path, list[dict]]) -> None:
    folder, ranks = told
    for one in ranks:
        assert one["differing"] == [
            f"{name} must be the same on all ranks, got {first} on rank 0 and {second} on rank 1"
            for name, first, second in (("step", 6, 7), ("keep_last", 2, 3), ("directory", "'run0'", "'run1'"))
            for _ in range(2)
        ]
    assert not os.listdir(folder / "differing")


def test_weights_are_loaded_without_an_optimizer(told: tuple[Path, list[dict]]) -> None:
    """On as many ranks and in one process: those that training computed with."""
    folder, ranks = told
    net = Net(torch.bfloat16, seed=1)
    path = folder / "evaluating" / "run" / "step-000000002"
    load_checkpoint(path, model=net, optimizer=None)
    for p, first in zip(net.parameters(), torch.load(folder / "evaluating" / "first.pt"), strict=True):
        assert torch.equal(p[: len(first)], first)
    for equal, said in (one["evaluating"] for one in ranks):
        assert all(equal)
        assert "dropped 'weight.codes' of 'split4', which 'plain' has no place for" in said[0]


def test_where_one_rank_fails_all_say_which(told: tuple[Path, list[dict]]) -> None:
    first, second = (one["failing"] for one in told[1])
    assert first[0] == "RuntimeError: save_checkpoint: rank 1 failed: OSError: [Errno 28] No space left on device"
    assert second[0] == "OSError: [Errno 28] No space left on device"
    assert first[1] == "OSError: [Errno 28] No space left on device"
    assert second[1] == "RuntimeError: save_checkpoint: rank 0 failed: OSError: [Errno 28] No space left on device"
    assert first[2].startswith(
        "RuntimeError: rank 1 failed: ValueError: model: the checkpoint has no 'weight', 'bias'"
    )
    assert second[2].startswith("ValueError: model: the checkpoint has no 'weight', 'bias'")
    assert second[3].startswith("ValueError: extra must be None, bool, int, float, str, a tensor, or lists")
    assert first[3] == f"RuntimeError: rank 1 failed: {second[3]}"
    assert first[4].startswith("NotADirectoryError")
    assert second[4] == f"RuntimeError: rank 0 failed: {first[4]}"


def leaving(rank: int, world: int, folder: str) -> None:
    """Save beside, and be done with the process group before it is written."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    real = _save.write_tensors

    def slowly(*args: Any) -> Any:
        left.wait(20)
        return real(*args)

    left, _save.write_tensors = Event(), slowly
    save_checkpoint_async(f"{folder}/run", model=Net(), optimizer=None, step=1, random_states=True, timeout=20.0)
    dist.destroy_process_group()
    left.set()


def test_a_save_goes_on_after_the_process_group(tmp_path: Path) -> None:
    run_ranks(leaving, WORLD, WORLD, str(tmp_path))
    assert latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-000000001"


def dying(rank: int, world: int, folder: str, who: int, how: str) -> None:
    """One rank dies or hangs in the middle of a save; the other waits for it as long as it was told to."""

    def writes(*_: Any) -> None:
        if how == "hangs":
            (Path(folder) / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    run, net = Path(folder) / "run", Net()
    save_checkpoint(run, model=net, optimizer=None, step=1)
    if rank == who:
        _save.write_tensors = writes
    said = "nothing"
    try:
        save_checkpoint(run, model=net, optimizer=None, step=2, random_states=True, timeout=1.0)
    except TimeoutError as error:
        said = str(error)
    (Path(folder) / "said").write_text(said)
    if how == "hangs":  # it still did, all the while
        os.kill(int((Path(folder) / "stopped").read_text()), signal.SIGCONT)
    os._exit(0)


@pytest.mark.parametrize("how", ["dies", "hangs"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_in_the_middle_is_named_by_the_other(who: int, how: str, tmp_path: Path) -> None:
    run_ranks(dying, WORLD, WORLD, str(tmp_path), who, how)
    said = (tmp_path / "said").read_text()
    what = "rank 1 has not written its part of" if who == 1 else "rank 0 has not completed"
    assert said.startswith(f"save_checkpoint: {what} {tmp_path}/run/.step-000000002.")
    assert "within 1 s (timeout): it died, hangs, or sees another folder" in said
    with pytest.warns(UserWarning, match=r"\.step-000000002\..* was not finished; taking .*step-000000001"):
        path = latest_checkpoint(tmp_path / "run")
    load_checkpoint(path, model=Net(), optimizer=None)
