"""What is watched of a model and an optimizer, by which names, and the header that says so.

A transformer is a list of blocks, and feature magnitudes are reported by block. So the default modules are the
elements with parameters of the model's outermost lists (`ModuleList`, `Sequential`), and the embeddings outside of
them; in a model without lists, the layers with parameters. Names are those without wrappers.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._module_names import clean_name
from narrowgauge._version import __version__
from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._history import is_embedding
from narrowgauge.gauges._records import VERSION, Record
from narrowgauge.gauges._watch._batched_rows import flat
from narrowgauge.gauges._watch._intended_update import moments_of, rule_of
from narrowgauge.gauges._watch._update_stats import Updates
from narrowgauge.rules import SGD
from narrowgauge.storage import automatic_weights

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclass(frozen=True)
class Sources:
    """What is measured, and when; see `watch`."""

    updates: Updates
    gradients: bool
    activations: bool | Iterable[str]
    targets: tuple[Target, ...]
    every: int
    states_every: int
    rms_every: int = 1
    rms_of: Iterable[str] | None = None


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names of the model's parameters, in its order; a shared one has its first name.

    Parameters that only the optimizer has come last, named by their place among the groups.

    Raises:
        ValueError: if the model has no parameters, none of the optimizer's, or one without a shape.
    """
    names: dict[Tensor, str] = {p: clean_name(name) for name, p in model.named_parameters()}
    if not names:
        raise ValueError("model must have parameters")
    for p, name in names.items():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"model must have been called once: {name} of a lazy module has no shape yet")
    places = {
        p: f"{n}.{i}" for n, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    }
    if not any(p in names for p in places):
        raise ValueError(
            "optimizer must have parameters of the model, got none; fully_shard makes new ones: make it after that"
        )
    return names | {p: f"param_groups.{place}" for p, place in places.items() if p not in names}


def embeddings(model: nn.Module, names: Mapping[Tensor, str]) -> dict[Tensor, None]:
    """The weights of embeddings, by the class of their modules or by their names."""
    found: dict[Tensor, None] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight not in names or weight.dim() < 2:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_embedding(clean_name(f"{name}.weight")):
            found[weight] = None
    return found | {p: None for p, name in names.items() if p.dim() >= 2 and is_embedding(name)}


def parameters_with_rms(
    model: nn.Module, names: Mapping[Tensor, str], wanted: Iterable[str] | None
) -> list[Tensor]:
    """The parameters whose RMS_t is measured at every step; see `watch`.

    By default the weights of embeddings and of the first other layer with a matrix.

    Raises:
        ValueError: for a name that no parameter has.
    """
    if wanted is not None:
        owners = {name: p for p, name in names.items()}
        return [owners[name] for name in _chosen("rms_of must be names of the model's parameters", wanted, owners)]
    found = embeddings(model, names)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight in names and weight.dim() >= 2 and weight not in found:
            return [*found, weight]
    return list(found)


def watched_modules(model: nn.Module, wanted: bool | Iterable[str]) -> dict[str, nn.Module]:
    """The modules whose features are measured, by name; see `watch`.

    Raises:
        ValueError: for a name that no module has.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(clean_name(name), module)  # the wrapper of a wrapped module: its hooks run
    if wanted is False:
        return {}
    if wanted is not True:
        names = _chosen("activations must be True, False or names of modules", wanted, modules)
        return {name: modules[name] for name in names}
    blocks = list(map(clean_name, _blocks(model)))
    if not blocks:
        return {n: m for n, m in modules.items() if not list(m.children()) and _has_parameters(m)}
    outside = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]
    return {name: modules[name] for name in (*outside, *blocks)}


def _chosen(must: str, wanted: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """Names that the user chose, each once."""
    if not isinstance(wanted, Iterable):
        raise ValueError(f"{must}, got {wanted!r}")
    chosen = list(dict.fromkeys([wanted] if isinstance(wanted, str) else wanted))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ValueError(f"{must}, got {unknown[0]!r}")
    return chosen


def _blocks(model: nn.Module) -> list[str]:
    """Names, with wrappers, of the elements with parameters of the outermost lists."""
    found: list[str] = []

    def walk(module: nn.Module, name: str) -> None:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if isinstance(module, _LISTS):
                found.extend([path] if _has_parameters(child) else [])
            else:
                walk(child, path)

    walk(model, "")
    return found


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _depths(model: nn.Module) -> dict[str, int]:
    """The depth of parameters and watched modules: 0 before the blocks, then the number of the block, from 1.

    What comes after the blocks is left out: only the forward pass knows it.
    """
    blocks = {name: number for number, name in enumerate(_blocks(model), start=1)}
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = next((n for block, n in blocks.items() if f"{name}.".startswith(f"{block}.")), None)
        depth = inside if inside is not None else 0 if isinstance(module, nn.Embedding) else None
        if depth is None:
            continue
        owned = [f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        for each in [name, *owned] if name in blocks or depth == 0 else owned:
            found[clean_name(each)] = depth
    return found


def header(
    model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, names: Mapping[Tensor, str]
) -> Record:
    """The first record of a run: versions, parameters, and how the run was set up.

    "groups" is as `groups_of` has it; "frozen" has the parameters without gradient; "apart" those with gradient
    that the optimizer does not have; "low_precision" the formats by module.
    """
    device = flat(next(iter(names))).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    groups = groups_of(optimizer, names)
    all_owned = {name for group in groups for name in group["parameters"]}
    return {
        "kind": "run", "version": VERSION, "every": sources.every, "rms_every": sources.rms_every,
        "optimizer": type(optimizer).__name__,
        "device": kind, "torch": torch.__version__, "narrowgauge": __version__,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parameters": {name: list(p.shape) for p, name in names.items()}, "depth": _depths(model),
        "embeddings": [names[p] for p in embeddings(model, names)],
        "groups": groups,
        "frozen": [name for p, name in names.items() if not p.requires_grad],
        "apart": [name for p, name in names.items() if p.requires_grad and name not in all_owned],
        "low_precision": {clean_name(name): found for name, m in model.named_modules() if (found := _formats(m))},
    }  # fmt: skip


def groups_of(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], only: Iterable[str] | None = None
) -> list[Record]:
    """The options of each group, or `only` some, and the names of its "parameters".

    With the weight storage that ``"auto"`` is for its first parameter, and for torch's optimizers the dtypes of
    second moments.
    """
    groups: list[Record] = []
    for number, group in enumerate(optimizer.param_groups):
        wanted = group.keys() - {"params", "param_names"} if only is None else only
        options = {key: value for key, value in group.items() if key in wanted}
        known = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        for key in ("kept", "storages"):  # by the optimizer's names there
            if isinstance(of := group.get(key), Mapping):
                places = zip(group["params"], known, strict=True)
                options[key] = {names[p]: of[name] for p, name in places if p in names and name in of}
        options = _as_json(options)
        if options.get("weights") == "auto" and group["params"]:
            options["weights"] = automatic_weights(group["params"][0].dtype, group["arithmetic"] == "strict")
        if own := _second_moments(optimizer, group, names):
            options["storages"] = own
        groups.append({**options, "parameters": [names[p] for p in group["params"] if p in names]})
    return groups


def _second_moments(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], names: Mapping[Tensor, str]
) -> dict[str, dict[str, str]]:
    """``{"v": dtype}`` by parameter for torch's optimizers; before the first step it is the parameter's."""
    if rule_of(optimizer, group) in (None, SGD):
        return {}
    dtypes = {p: moments_of(group, optimizer.state.get(p, {})).get("v", p).dtype for p in group["params"]}
    short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return {names[p]: {"v": short.get(dtype, str(dtype))} for p, dtype in dtypes.items() if p in names}


def _as_json(value: Any) -> Any:
    """An option as JSON; NotImplemented for what JSON cannot have."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else NotImplemented
    if isinstance(value, list | tuple):
        parts = [_as_json(part) for part in value]
        return NotImplemented if NotImplemented in parts else parts
    if isinstance(value, Mapping):
        return {str(key): part for key, item in value.items() if (part := _as_json(item)) is not NotImplemented}
    return value if value is None or isinstance(value, bool | int | float | str) else NotImplemented


def _formats(module: nn.Module) -> list[str]:
    """The eight-bit formats in which a layer multiplies: narrowgauge's layers, torchao's by name."""
    formats = getattr(getattr(module, "plan", None), "formats", None)
    if isinstance(formats, list | tuple | set | frozenset) and all(isinstance(each, str) for each in formats):
        return sorted(formats)
    return ["e4m3"] if type(module).__name__.startswith("Float8Linear") else []
