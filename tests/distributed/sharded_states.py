"""States of shared parameters: saved and resumed, on other ranks, by torch's tools, and what is refused."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_steps import (
    BLOCK,
    SHAPES,
    STORAGES,
    Block,
    boxes_mesh,
    cut,
    fsdp,
    gradient,
    made,
    meshes,
    same,
    spread,
    weights,
)
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import narrowgauge as ng
from narrowgauge.distributed import latest_checkpoint, load_checkpoint, save_checkpoint
from narrowgauge.rules import Muon

# In blocks of a row shards begin with blocks, in longer ones some do not.
BLOCKS = (BLOCK, 4 * BLOCK)
# Every storage in one of them; with `--slow` in both, and a rule that sums over parameters.
ALL = [("AdamW", storage, block) for storage in STORAGES for block in BLOCKS]
ALL += [("LAMB", "split8, log8", block) for block in BLOCKS]
FEW = [case for number, case in enumerate(ALL) if number % 8 in (0, 3) or case[0] == "LAMB"]


def model(rule: str, storage: str, block: int, shared: bool, seed: int = 0) -> tuple[nn.Module, Any]:
    start = weights(STORAGES[storage][0])
    net = nn.ParameterDict({name: nn.Parameter(x.clone() + seed) for name, x in start.items()})
    if shared:
        fully_shard(net, mesh=meshes()["rows"])
    return net, made(rule, storage, [(name, net[name]) for name in SHAPES], block_size=block)


def train(net: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        for name in SHAPES:
            p = net[name]
            grad = gradient(name, step, torch.empty(SHAPES[name], dtype=p.dtype), True)
            p.grad = spread(p, grad) if hasattr(p, "to_local") else grad
        optimizer.step()


def full(net: Any) -> dict[str, Tensor]:
    return {
        name: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone()
        for name, p in net.items()
    }


def moments(net: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Moments as they are decoded here."""
    found: dict[str, dict[str, Any]] = {}
    for name in SHAPES:
        p = net[name]
        plan = optimizer.plan_of(p)
        here = p.to_local() if hasattr(p, "to_local") else p
        found[name] = {s.slot.name: s.decode(optimizer.state[p], here.shape) for s in plan.slots}
    return found


def saving(rank: int, folder: Path, cases: Any = FEW) -> dict[Any, Any]:
    """Train and save; what follows is for the others."""
    told = {}
    for rule, storage, block in cases:
        net, optimizer = model(rule, storage, block, shared=True)
        train(net, optimizer, range(3))
        save_checkpoint(folder / f"{rule} {storage} {block}", model=net, optimizer=optimizer, step=3)
        decoded = whole_moments(net, optimizer)
        train(net, optimizer, range(3, 6))
        told[rule, storage, block] = {"end": full(net), "moments": decoded}
    return told


def resumed(rank: int, folder: Path, cases: Any = FEW, shared: bool = True) -> dict[Any, Any]:
    told = {}
    for rule, storage, block in cases:
        net, optimizer = model(rule, storage, block, shared, seed=1)
        path = latest_checkpoint(folder / f"{rule} {storage} {block}")
        assert path is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert load_checkpoint(path, model=net, optimizer=optimizer).step == 3
        wanted, off = torch.load(folder / "moments.pt")[rule, storage, block]["moments"], {}
        for name, slots in moments(net, optimizer).items():
            for slot, moment in slots.items():
                whole = wanted[name][slot]
                here = cut(net[name].detach(), whole) if shared else whole
                if moment.numel():
                    off[name, slot] = float((moment - here).abs().max()), float(whole.abs().max())
        train(net, optimizer, range(3, 6))
        said = [str(w.message) for w in caught if "anew" in str(w.message)]
        told[rule, storage, block] = {"end": full(net), "off": off, "said": said}
    return told


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
PARTS = StateDictOptions()
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Case = tuple[str, int]
# Every low word and every width of codes where blocks align; one with 8-bit codes, and one with two codes a byte,
# where they do not. The other storages, aligned, with `--slow`.
OTHERS: list[Case] = [(storage, BLOCKS[0]) for storage in ("plain, fp32", "plain, 8bit", "stochastic, bf16")]
BY_TORCH = [(storage, BLOCKS[0]) for storage in STORAGES if (storage, BLOCKS[0]) not in OTHERS]
BY_TORCH += [(storage, BLOCKS[1]) for storage in ("split8, log8", "split4, 4bit")]


def whole_moments(net: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    return {
        name: {
            slot: type(net[name].data).from_local(
                moment, net[name].device_mesh, net[name].placements, run_check=False,
                shape=net[name].shape, stride=net[name].stride(),
            ).full_tensor()
            for slot, moment in slots.items()
        }
        for name, slots in moments(net, optimizer).items()
    }  # fmt: skip


def same_states(net: Any, optimizer: Any, other: Any, fresh: Any) -> bool:
    """Whether two optimizers of like models have the same bits."""
    return all(
        same(value, fresh.state[other[name]][word])
        for name in SHAPES
        for word, value in optimizer.state[net[name]].items()
    )


def loading(net: Any, optimizer: Any, state: Any, options: StateDictOptions, like: Any = None) -> list[str]:
    """The warnings of `set_optimizer_state_dict`, with the weights of another model."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for name, p in net.items() if like is not None else ():
            p.copy_(like[name])
        set_optimizer_state_dict(net, optimizer, state, options=options)
    return [str(w.message) for w in caught if "anew" in str(w.message)]


def by_torch(rank: int, folder: Path, cases: Sequence[Case] = BY_TORCH) -> dict[Case, Any]:
    """torch's own functions on as many ranks, with every option; what they save is for the others."""
    told: dict[Case, Any] = {}
    flat, kept = {}, {}
    for number, (storage, block) in enumerate(cases):
        net, optimizer = model("AdamW", storage, block, shared=True)
        train(net, optimizer, range(2))
        weights, full_state = get_state_dict(net, optimizer, options=FULL)
        flattened = flat[f"{storage} {block}"] = get_optimizer_state_dict(net, optimizer, options=FLAT)
        found = []
        ways = [(flattened, FLAT)]
        ways.append((full_state, BROADCAST) if number % 2 else (get_optimizer_state_dict(net, optimizer), PARTS))
        for state, options in ways:
            other, fresh = model("AdamW", storage, block, shared=True)
            said = loading(other, fresh, state, options, net)
            found.append((said, same_states(net, optimizer, other, fresh)))
        told[storage, block] = found
        kept[storage, block] = weights, full_state, whole_moments(net, optimizer)
    dcp.save(flat, checkpoint_id=folder / "flat")
    if rank == 0:
        torch.save(kept, folder / "full.pt")
    return told


def others_by_torch(rank: int, folder: Path) -> dict[Case, Any]:
    return by_torch(rank, folder, OTHERS)


def of_the_page(rank: int, folder: Path) -> bool:
    """What `docs/distributed.md` shows: a whole state from the first rank, of which the others have nothing."""
    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?set_optimizer_state_dict.*?)^```", page, re.MULTILINE | re.DOTALL)
    save, load = block.split("\n...\n")
    net, optimizer = model("AdamW", "split8, log8", BLOCK, shared=True)
    train(net, optimizer, range(2))
    names = {"model": net, "optimizer": optimizer}
    exec(save, names)
    other, fresh = model("AdamW", "split8, log8", BLOCK, shared=True, seed=1)
    exec(load, {**names, "model": other, "optimizer": fresh})
    weights_too = all(same(p.detach().to_local(), other[name].detach().to_local()) for name, p in net.items())
    return weights_too and same_states(net, optimizer, other, fresh)


def away(net: Any, optimizer: Any, wanted: dict[str, dict[str, Tensor]]) -> float:
    """How far decoded moments are from others, at most, in shares of the largest of each."""
    off = [0.0]
    for name, slots in moments(net, optimizer).items():
        for slot, moment in slots.items():
            whole = wanted[name][slot]
            here = cut(net[name].detach(), whole) if hasattr(net[name], "to_local") else whole
            if moment.numel():
                off.append(float((moment - here).abs().max() / whole.abs().max()))
    return max(off)


def from_torch(rank: int, folder: Path) -> dict[Case, Any]:
    """What four ranks saved, on two: as whole states and in place; and on to one process."""
    told: dict[Case, Any] = {}
    place = folder.parent / "by_torch"
    kept, flat, nets = torch.load(place / "full.pt"), {}, {}
    for storage, block in BY_TORCH:
        weights, state, decoded = kept[storage, block]
        net, optimizer = model("AdamW", storage, block, shared=True, seed=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
        said = [str(w.message) for w in caught if "anew" in str(w.message)]
        other, fresh = model("AdamW", storage, block, shared=True)
        nets[storage, block] = net, optimizer, other, fresh
        with torch.no_grad():
            for name, p in other.items():
                p.copy_(net[name])
        flat[f"{storage} {block}"] = get_optimizer_state_dict(other, fresh, options=FLAT)
        told[storage, block] = {"said": said, "off": away(net, optimizer, decoded)}
    dcp.load(flat, checkpoint_id=place / "flat")
    for storage, block in BY_TORCH:
        net, optimizer, other, fresh = nets[storage, block]
        told[storage, block]["flat said"] = loading(other, fresh, flat[f"{storage} {block}"], FLAT)
        told[storage, block]["flat"] = same_states(net, optimizer, other, fresh)
        wanted = whole_moments(net, optimizer)
        weights, state = get_state_dict(net, optimizer, options=FULL)
        if rank == 0:
            told[storage, block]["alone"] = on_one(storage, block, weights, state, wanted)
    return told


def on_one(storage: str, block: int, weights: Any, state: Any, wanted: Any) -> dict[str, Any]:
    """A whole state in a model without shards; the bits of one that was never shared."""
    net, optimizer = model("AdamW", storage, block, shared=False, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state, options=WHOLE)
    said = [str(w.message) for w in caught if "anew" in str(w.message)]
    twin, alone = model("AdamW", storage, block, shared=False)
    train(twin, alone, range(2))
    names = [name for name in SHAPES if name != "bias" or not storage.startswith(("stochastic", "split4"))]
    equal = all(
        same(value, optimizer.state[net[name]][word])
        for name in names
        for word, value in alone.state[twin[name]].items()
    )
    return {"said": said, "off": away(net, optimizer, wanted), "twin": equal}


def by_hand(rank: int, folder: Path) -> dict[str, Any]:
    """Conversion, copies and whole states of one process; and what is refused."""
    told: dict[str, Any] = {}
    # Whole states of one process, kept in the same way; and written to another storage.
    for storage in ("split4, 4bit", "split8, log8"):
        whole, alone = model("AdamW", storage, BLOCK, shared=False)
        train(whole, alone, range(2))
        net, optimizer = model("AdamW", storage, BLOCK, shared=True)
        with torch.no_grad():
            for name, p in net.items():
                p.copy_(spread(p, whole[name].detach()))
        if storage.endswith("4bit"):
            loading(net, optimizer, get_optimizer_state_dict(whole, alone), WHOLE)
        else:
            optimizer.load_state_dict(alone.state_dict())
        train(whole, alone, range(2, 4))
        train(net, optimizer, range(2, 4))
        names = [name for name in SHAPES if name != "bias"]
        told[f"whole {storage}"] = all(same(full(net)[name], whole[name].detach()) for name in names)
    wrong = alone.state_dict()
    wrong["state"][0] = {**wrong["state"][0], "weight.lo": torch.zeros(3, dtype=torch.int8)}
    told["wrong"] = message(optimizer.load_state_dict, wrong)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in (optimizer, alone):
            one.param_groups[0]["states"] = "bf16"
    train(whole, alone, range(4, 5))
    train(net, optimizer, range(4, 5))
    told["converted"] = all(same(full(net)[name], whole[name].detach()) for name in SHAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = optimizer.torch_state_dict()["state"]
        ours = alone.torch_state_dict()["state"]
    told["to torch"] = all(same(theirs[i]["exp_avg"].full_tensor(), ours[i]["exp_avg"]) for i in range(len(SHAPES)))
    told["unsharded"] = message(alone.load_state_dict, optimizer.state_dict())
    return told


def without_rows(rank: int, folder: Path) -> list[str]:
    """What is said where a rank has nothing of a parameter, and loads what was saved on as many ranks."""
    said = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.ParameterDict({"w": nn.Parameter(torch.randn(dist.get_world_size() - 1, 40).bfloat16())})
        fully_shard(net, mesh=meshes()["rows"])
        optimizer = made("AdamW", "split8, log8", [("w", net["w"])], min_quantized_size=16)
        if seed == 0:
            net["w"].grad = spread(net["w"], torch.randn(net["w"].shape).bfloat16())
            optimizer.step()
            path = save_checkpoint(folder / "run", model=net, optimizer=optimizer, step=1)
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                load_checkpoint(path, model=net, optimizer=optimizer)
            said = [str(w.message) for w in caught if "anew" in str(w.message)]
    return said


def message(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusing(rank: int, folder: Path) -> dict[str, Any]:
    """A bad gradient that raises, on all ranks and before anything has moved."""
    told: dict[str, Any] = {}
    mesh = meshes()["rows"]
    for path in ("C", "eager"):
        ps = fsdp({name: nn.Parameter(x.float()) for name, x in weights(torch.float32).items()}, mesh)
        before = {name: p.detach().to_local().clone() for name, p in ps.items()}
        optimizer = ng.optim.AdamW(list(ps.items()), nonfinite="raise", states="8bit", min_quantized_size=100)
        if path == "eager":
            optimizer._engine.backends = ()
        for name, p in ps.items():
            p.grad = spread(p, gradient(name, 1, torch.empty(SHAPES[name]), True))
        told[path] = (
            message(optimizer.step),
            all(torch.equal(before[name], p.detach().to_local()) for name, p in ps.items()),
        )
        ps["long"].grad = None
        told[f"{path}, then"] = message(optimizer.step)
    return told


def muon(rank: int, folder: Path) -> tuple[bool, int]:
    """Matrices that are orthogonalized as wholes: whether they are those of one process, and how many this rank has
    computed of those without sums, each of which one rank computes. Cautious updates have sums.
    """
    mesh, same_everywhere, computed = meshes()["rows"], True, 0
    orthogonalize = Muon.orthogonalize

    def counted(self: Muon, x: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += not cautious
        return orthogonalize(self, x)

    for states, cautious in (("8bit", False), ("fp32", True)):
        whole = {name: nn.Parameter(x) for name, x in weights(torch.bfloat16).items() if x.dim() == 2}
        shared = fsdp({name: nn.Parameter(p.detach().clone()) for name, p in whole.items()}, mesh)
        options = {"states": states, "weights": "split", "block_size": BLOCK, "min_quantized_size": 100}
        options["cautious"] = cautious
        one, other = (ng.optim.Muon(list(ps.items()), lr=1e-2, **options) for ps in (whole, shared))
        for step in range(3):
            for name, p in whole.items():
                p.grad = gradient(name, step, p.detach(), False)
                shared[name].grad = spread(shared[name], p.grad)
            one.step()
            Muon.orthogonalize = counted
            other.step()
            Muon.orthogonalize = orthogonalize
        for name, p in shared.items():
            same_everywhere &= same(p.detach().to_local(), cut(p, whole[name].detach()))
    return same_everywhere, computed


def offloaded(rank: int, folder: Path) -> list[float]:
    """Low-precision linear layers whose shards FSDP2 has on the CPU, trained by an 8-bit optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(torch.bfloat16)
    ng.linear.swap_linears(net, ng.linear.SWITCHBACK, min_features=1)
    if dist.is_initialized():
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=meshes()["rows"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = ng.optim.AdamW8bit(
        net.parameters(), lr=1e-2, weights="split8", block_size=64, min_quantized_size=100
    )
    losses = []
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        loss = (net(x).float() - x.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def in_backward(rank: int, folder: Path) -> list[bool]:
    """Stepping in the backward pass, where ranks have nothing to agree on; and resumed by torch's functions."""
    nets: list[nn.Module] = []
    saved: tuple[Any, Any] = ({}, {})
    for way in ("ordinary", "in backward", "resumed"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(torch.bfloat16)
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=meshes()["rows"])
        fully_shard(net, mesh=meshes()["rows"])
        options = {"lr": 1e-2, "weights": "split8", "min_quantized_size": 100, "nonfinite": "propagate"}
        if way == "ordinary":
            optimizer: Any = ng.optim.AdamW8bit(net.named_parameters(), **options)
        else:
            optimizer = ng.optim.step_in_backward(net, ng.optim.AdamW8bit, **options)
        if way == "resumed":
            set_state_dict(net, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=WHOLE)
        for step in range(3) if way != "resumed" else range(2, 3):
            if step == 2 and way == "in backward":
                saved = copy.deepcopy(get_state_dict(net, optimizer, options=WHOLE))
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            (net(x).float() - x.float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    return [
        same(p.detach().to_local(), q.detach().to_local())
        for other in nets[1:]
        for p, q in zip(nets[0].parameters(), other.parameters(), strict=True)
    ]


def block_of_two(shared: bool, storage: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """A block under FSDP over tensor parallelism on four ranks; whole on one."""
    net = Block(STORAGES[storage][0])
    with torch.no_grad():
        for p in net.parameters():
            p += seed
    if shared:
        mesh = boxes_mesh()
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
    return net, made("AdamW", storage, list(net.named_parameters()))


def steps_of_block(net: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        for p in net.parameters():
            g = torch.Generator().manual_seed(step)
            grad = torch.randn(p.shape, generator=g).to(p.dtype)
            p.grad = spread(p, grad) if hasattr(p, "to_local") else grad
        optimizer.step()


def saving_on_meshes(rank: int, folder: Path) -> dict[str, Any]:
    """On meshes of two dimensions: replicas, of which one writes; boxes of rows and columns."""
    net, optimizer = model("AdamW", "split8, log8", BLOCK, shared=False)
    fully_shard(net, mesh=meshes()["hybrid"])
    optimizer = made("AdamW", "split8, log8", [(name, net[name]) for name in SHAPES], block_size=BLOCK)
    train(net, optimizer, range(3))
    save_checkpoint(folder / "hybrid", model=net, optimizer=optimizer, step=3)
    told = {}
    for storage in ("split, 8bit", "plain, fp32"):
        block, stepping = block_of_two(True, storage)
        steps_of_block(block, stepping, range(2))
        save_checkpoint(folder / storage, model=block, optimizer=stepping, step=2)
        fresh, loaded = block_of_two(True, storage, seed=1)
        load_checkpoint(folder / storage / "step-000000002", model=fresh, optimizer=loaded)
        third, by_torch = block_of_two(True, storage)
        state = get_optimizer_state_dict(block, stepping, options=WHOLE)
        third.load_state_dict(block.state_dict())
        set_optimizer_state_dict(third, by_torch, state, options=WHOLE)
        for one in ((block, stepping), (fresh, loaded), (third, by_torch)):
            steps_of_block(*one, range(2, 4))
        threes = zip(block.parameters(), fresh.parameters(), third.parameters(), strict=True)
        locals_ = [[p.detach().to_local() for p in three] for three in threes]
        told[storage] = all(same(p, q) and same(p, r) for p, q, r in locals_)
    return told
