"""Bytes against loss: what is compared. A row is a way to keep weights and moments, ours or a peer's.

Rows are run in order of their tiers, so that a run that is cut short has answered the first questions:

    0 anchors   fp32 states, and 8-bit states of two kinds, all on exact fp32 weights: only the states differ
    1 low       fewer and fewer bytes, and the control: fp32 states again, other ties in rounding
    2 peers     other libraries' optimizers on the same bf16 weights, as they come
    3           the anchors under other settings; adds no row
    4 rest      every other recipe of the library
    5 float8    linear layers that multiply in float8, over fp32 masters and over float8 weights

Rows are compared with D; those with float8 layers with `FLOAT8_REFERENCE`, because what float8 multiplies cost is
not what is asked here.

A row whose storage this version of the library does not know is left out. A peer that is not installed stays,
and is reported as that. Peers get the learning rate, betas, eps and decay of everybody else; all else is their
default.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from narrowgauge import recipes
from narrowgauge.recipes import Recipe
from narrowgauge.storage import mark_states, state_storages

ANCHORS, LOW, PEERS, VARIATIONS, REST, FLOAT8 = range(6)
REFERENCE = "D"
FLOAT8_PLAN = "TENSORWISE_FP8"
FLOAT8_REFERENCE = "float8 layers, D"
_BF16 = torch.bfloat16
Options = Mapping[str, Any]
Maker = Callable[[list[nn.Parameter], Options], torch.optim.Optimizer]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str  # its name in results, tables and pictures
    title: str  # what is kept, in a line
    tier: int  # when it is run
    family: str  # ``"ours"``, or the peer's package

    @property
    def reference(self) -> str:
        """The row that its losses are compared with."""
        return FLOAT8_REFERENCE if self.tier == FLOAT8 else REFERENCE

    def refusal(self) -> str | None:
        """Why it cannot be run here; None if it can."""
        return None

    def formula(self) -> float | None:
        """Bytes a parameter by the library's own count; None for peers."""
        return None

    def optimizer(self, model: nn.Module, options: Options, seed: int) -> torch.optim.Optimizer:
        """Cast the model, which is in fp32 on its device, and make its optimizer of lr, betas, eps and decay."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ours(Row):
    """A composition of this library's storages, under AdamW unless the recipe names another optimizer."""

    recipe: Recipe = field(default_factory=lambda: recipes.get(REFERENCE))  # format, weights and states
    block_size: int = 256  # of quantized states
    # the state storage that embeddings are marked with, over the recipe's; None for no mark
    embeddings: str | None = None
    keep_fp32: str = ""  # parameters that stay in fp32, as `Recipe.apply` takes them
    adapts: bool = False  # whether storages that lose too much are widened, in studies that train so

    def formula(self) -> float | None:
        return None if self.embeddings else self.recipe.bytes_per_parameter(self.block_size)

    def optimizer(self, model: nn.Module, options: Options, seed: int) -> torch.optim.Optimizer:
        if self.embeddings:
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    mark_states(module.weight, self.embeddings)
        known = self.recipe.known(options)
        kept = [self.keep_fp32] * bool(self.keep_fp32)
        return self.recipe.apply(
            model, decay_all=True, block_size=self.block_size, seed=seed, keep_fp32=kept, **known
        )


@dataclass(frozen=True)
class Peer(Row):
    """Another library's optimizer on bf16 weights."""

    # takes the parameters and the options; imports the library
    make: Maker = field(repr=False, default=lambda p, o: None)

    def refusal(self) -> str | None:
        missing = importlib.util.find_spec(self.family) is None
        return f"{self.family} is not installed" if missing else None

    def optimizer(self, model: nn.Module, options: Options, seed: int) -> torch.optim.Optimizer:
        recipes.cast(model, _BF16)
        torch.manual_seed(seed)  # torchao's stochastic rounding draws from torch's own generator
        return self.make([p for p in model.parameters() if p.requires_grad], options)


def _bitsandbytes(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, **options)


def _torchao(name: str, **more: Any) -> Maker:
    def make(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
        import torchao.optim

        return getattr(torchao.optim, name)(params, **options, **more)

    return make


def _flashoptim(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    import flashoptim

    return flashoptim.FlashAdamW(params, **options)


def _optimi(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    import optimi

    return optimi.AdamW(params, **options)


def _ours(tier: int, weights: str, states: str | dict[str, str], title: str, **more: Any) -> Ours:
    """A row that is no named recipe: `split8 + log8`, or `split8 + log4/log8` for m and v apart."""
    short = states if isinstance(states, str) else "/".join(states.values())
    name = f"{weights} + {short}" + more.pop("suffix", "")
    recipe = Recipe(name, title, _BF16, weights, states)  # type: ignore[arg-type]
    return Ours(name, title, tier, "ours", recipe, **more)


def _named(tier: int, name: str) -> Ours:
    recipe = recipes.get(name)
    return Ours(recipe.letters or recipe.name, recipe.title, tier, "ours", recipe)


_EXACT = "bf16 + int16 words (exact fp32 weights), "
_SPLIT8 = "bf16 + int8 words (24-bit weights), "
_SPLIT4 = "bf16 + 4-bit words (20-bit weights), "
_FP8SPLIT8 = "float8 + int8 words (16-bit weights), "
_STOCHASTIC = "bf16 rounded stochastically, "
_PEERS = (
    Peer("FlashAdamW", "24-bit weights, companded 8-bit states", PEERS, "flashoptim", _flashoptim),
    Peer("bitsandbytes AdamW8bit", "bf16 alone, paper's 8-bit states", PEERS, "bitsandbytes", _bitsandbytes),
    Peer("optimi AdamW", "bf16 with Kahan-summed weights, bf16 states", PEERS, "optimi", _optimi),
    Peer(
        "torchao AdamW4bit, stochastic", "bf16 rounded stochastically, 4-bit states",
        PEERS, "torchao", _torchao("AdamW4bit", bf16_stochastic_round=True),
    ),
    Peer(
        "torchao AdamW8bit, stochastic", "bf16 rounded stochastically, dynamic 8-bit states",
        PEERS, "torchao", _torchao("AdamW8bit", bf16_stochastic_round=True),
    ),
    Peer("torchao AdamW8bit", "bf16 alone, dynamic 8-bit states", PEERS, "torchao", _torchao("AdamW8bit")),
    Peer("torchao AdamW4bit", "bf16 alone, 4-bit states", PEERS, "torchao", _torchao("AdamW4bit")),
    Peer("torchao AdamWFp8", "bf16 alone, float8 states", PEERS, "torchao", _torchao("AdamWFp8")),
)  # fmt: skip


def rows() -> tuple[Row, ...]:
    """All rows by tier; those of state storages that this version does not have are left out."""
    mixed, factored = {"m": "log4", "v": "log8"}, {"m": "log4", "v": "factored"}
    found: list[Ours] = [
        _named(ANCHORS, REFERENCE),
        _ours(ANCHORS, "split", "log8", _EXACT + "logarithmic 8-bit states"),
        _ours(ANCHORS, "split", "8bit", _EXACT + "the paper's 8-bit states"),
        _ours(LOW, "split8", "log8", _SPLIT8 + "logarithmic 8-bit states"),
        _ours(LOW, "split8", mixed, _SPLIT8 + "m in 4 bits, v in 8"),
        _ours(LOW, "split8", "log4", _SPLIT8 + "logarithmic 4-bit states"),
        _ours(LOW, "split4", "log8", _SPLIT4 + "logarithmic 8-bit states"),
        _ours(LOW, "split4", mixed, _SPLIT4 + "m in 4 bits, v in 8"),
        _ours(LOW, "split4", "log4", _SPLIT4 + "logarithmic 4-bit states"),
        _ours(LOW, "split4", factored, _SPLIT4 + "m in 4 bits, v by rows and columns"),
        _ours(LOW, "stochastic", "log8", _STOCHASTIC + "logarithmic 8-bit states"),
        _ours(LOW, "stochastic", mixed, _STOCHASTIC + "m in 4 bits, v in 8"),
        _ours(LOW, "stochastic", "log4", _STOCHASTIC + "logarithmic 4-bit states"),
        _ours(LOW, "stochastic", factored, _STOCHASTIC + "m in 4 bits, v by rows and columns"),
        _ours(LOW, "split8", "8bit", _SPLIT8 + "the paper's 8-bit states"),
        _named(LOW, "split"),
        _ours(LOW, "split", "8bit", "the paper's, in blocks of 2048", block_size=2048, suffix=", 2048"),
        _ours(LOW, "split", "log8", "logarithmic, in blocks of 2048", block_size=2048, suffix=", 2048"),
        _ours(REST, "split", "8bit", "the paper's, embeddings in fp32", embeddings="fp32", suffix=", wte fp32"),
        _ours(REST, "expansion", "8bit", "bf16 weights as expansions, the paper's 8-bit states"),
        _ours(REST, "plain", "log8", "bf16 alone, logarithmic 8-bit states"),
        _ours(REST, "split8", "4bit", _SPLIT8 + "block-wise 4-bit states"),
        _ours(REST, "split8", "fp8", _SPLIT8 + "block-wise float8 states"),
    ]  # fmt: skip
    there = {_kept(row.recipe) for row in found if row.block_size == 256 and not row.embeddings}
    found += [_named(REST, name) for name in recipes.names() if _kept(recipes.get(name)) not in there]
    found += [
        Ours(name, title, FLOAT8, "ours", Recipe(name, title, _BF16, weights, states, linear=FLOAT8_PLAN))
        for name, weights, states, title in (
            (FLOAT8_REFERENCE, "master", "fp32", "bf16 with fp32 master weights and fp32 states"),
            ("float8 layers, split8 + log8", "split8", "log8", _SPLIT8 + "logarithmic 8-bit states"),
            ("fp8split8 + log8", "fp8split8", "log8", _FP8SPLIT8 + "logarithmic 8-bit states"),
            ("fp8split8 + log4/log8", "fp8split8", mixed, _FP8SPLIT8 + "m in 4 bits, v in 8"),
        )
    ]
    known = set(state_storages())
    return tuple(sorted((*(row for row in found if _names(row) <= known), *_PEERS), key=lambda row: row.tier))


def _names(row: Ours) -> set[str]:
    states = row.recipe.states
    return {states} if isinstance(states, str) else set(states.values())


def _kept(recipe: Recipe) -> tuple[Any, ...]:
    """What tells two recipes apart but for their names."""
    return recipe.dtype, recipe.weights, str(recipe.states)


def row(name: str) -> Row:
    """A row by its name."""
    return next(found for found in rows() if found.name == name)
