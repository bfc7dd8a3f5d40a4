"""Which model fits: Table 2 of the 8-bit optimizers' paper, Tables 2, 8 and 12 of Collage's, from memory plans.

    python -m studies.memory_plans.run [--out studies/memory_plans/results/memory_plans.json]

Everything is planned, nothing is run: it takes a minute on a CPU and needs no GPU. What the papers leave open is a
convention here, and each is an argument of a function below: docs/plan.md says what it does to the tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge import recipes
from narrowgauge.recipes import MemoryPlan, Recipe
from studies.shared import options

LETTERS = ("A", "B", "C", "D")
GIB = 1 << 30

# Collage

NAMES = {"A": "bf16", "B": "collage-light", "C": "collage-plus", "D": "master"}
PAPER_BYTES = {"A": 8, "B": 10, "C": 12, "D": 16}
# Table 11: layers, width, heads; a LLaMA's hidden width behind them. Table 12: D's peak, others' difference, GB.
SIZES: dict[str, tuple[int, ...]] = {
    "GPT-125M": (12, 768, 12), "GPT-1.3B": (24, 2048, 16), "GPT-2.7B": (32, 2560, 32), "GPT-6.7B": (32, 4096, 32),
    "OpenLLaMA-7B": (32, 4096, 32, 11008),
}  # fmt: skip
TABLE_12 = {
    "GPT-125M": {"A": -1.1, "B": -0.8, "C": -0.5, "D": 4.4},
    "GPT-1.3B": {"A": -10.3, "B": -7.6, "C": -5.0, "D": 35.5},
    "GPT-2.7B": {"A": -20.8, "B": -15.6, "C": -10.1, "D": 65.3},
    "GPT-6.7B": {"A": -51.2, "B": -38.2, "C": -25.7, "D": 143.7},
    "OpenLLaMA-7B": {"A": -65.7, "B": -49.2, "C": -32.7, "D": 176.7},
}
# Table 8: does GPT-30B fit, by micro-batch and sequence.
CASES_8 = ((1, 1024), (1, 2048), (2, 1024), (2, 2048))
TABLE_8 = {
    "A": (True, True, True, True), "B": (True, True, True, False), "C": (True, True, True, False),
    "D": (True, False, False, False),
}  # fmt: skip


def collage_model(name: str) -> Any:
    """GPTs as in GPT-NeoX (rotary positions, outputs not tied), sequences of 2048 tokens; Appendix E.2."""
    from transformers import GPTNeoXConfig, LlamaConfig

    layers, width, heads, *hidden = SIZES[name]
    common = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "use_cache": False,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    if hidden:
        return LlamaConfig(vocab_size=32000, intermediate_size=hidden[0], **common)
    return GPTNeoXConfig(
        vocab_size=50257, intermediate_size=4 * width, rotary_pct=1.0, tie_word_embeddings=False, **common
    )


def table_12(names: tuple[str, ...] = tuple(SIZES)) -> dict[str, Any]:
    """Peaks of one GPU with all of the model, micro-batch 1 of 2048 tokens, in bytes."""
    found: dict[str, Any] = {}
    for name in names:
        plans = {x: recipes.plan_memory(collage_model(name), x, batch=1, sequence=2048) for x in LETTERS}
        found[name] = {
            "parameters": plans["D"].parameters,
            "peak": {letter: plan.peak for letter, plan in plans.items()},
            "saved": plans["D"].saved,
        }
    return found


def table_8(memory: float = 40e9, in_flight: int = 1) -> dict[str, Any]:
    """GPT-30B on 16 GPUs, in 8 parts of each layer and 2 of the layers: what a GPU of the first half holds.

    States are the recipe's bytes for each of a 16th of the parameters. Activations are Megatron's with each layer
    cut in t parts and without sequence parallelism, s b h (10 + 24 / t + 5 a s / (h t)) bytes a layer (Korthikanti
    et al. 2022, Section 4.2): tensors that are not cut, those that are, and scores of attention. A pipeline of two
    keeps the activations of one or two micro-batches in flight.
    """
    layers, width, heads, vocabulary, parts = 56, 7168, 56, 50257, 8
    parameters = layers * (12 * width * width + 13 * width) + 2 * vocabulary * width + 2 * width
    found: dict[str, Any] = {
        "parameters": parameters,
        "activations": {},
        "fits": {letter: [] for letter in LETTERS},
    }
    for batch, sequence in CASES_8:
        a_token = 10 + 24 / parts + 5 * heads * sequence / (width * parts)
        activations = layers // 2 * in_flight * batch * sequence * width * a_token
        found["activations"][f"{batch}x{sequence}"] = activations
        for letter in LETTERS:
            states = recipes.plan_memory(parameters, letter).peak / 16
            found["fits"][letter].append(states + activations <= memory)
    return found


# 8-bit optimizers

# Table 2: GPU in GB, the largest that 32-bit Adam finetunes, the largest with 8-bit Adam; candidates in between.
TABLE_2 = (
    (6, ("RoBERTa-base", "RoBERTa-large"), "RoBERTa-base", "RoBERTa-large"),
    (11, ("MT5-small", "MT5-base", "MT5-large"), "MT5-small", "MT5-base"),
    (24, ("MT5-small", "MT5-base", "MT5-large"), "MT5-base", "MT5-large"),
    (24, ("GPT-2-medium", "GPT-2-large"), "GPT-2-medium", "GPT-2-large"),
)
# The paper's names of GPT-2s are a size behind: 762 and 1500 million parameters.
GPT2 = {"GPT-2-medium": (36, 1280, 20), "GPT-2-large": (48, 1600, 25)}
ROBERTA = {"RoBERTa-base": (12, 768, 12, 3072), "RoBERTa-large": (24, 1024, 16, 4096)}
MT5 = {"MT5-small": (8, 512, 6, 1024), "MT5-base": (12, 768, 12, 2048), "MT5-large": (24, 1024, 16, 2816)}
# 2021: torch Adam with fp32 weights, gradients and states; states alone change.
ADAMS = {"32-bit Adam": "fp32", "8-bit Adam": "adamw8bit-dynamic"}


def finetuned(name: str) -> tuple[nn.Module, Callable[[nn.Module, int, int], Tensor]]:
    """A model of Table 2, attention by the formula as in 2021, and the loss it is finetuned with."""
    import transformers as hf

    if name in GPT2:
        layers, width, heads = GPT2[name]
        config: Any = hf.GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
        return _bare(hf.GPT2LMHeadModel, config), _language
    if name in ROBERTA:
        layers, width, heads, hidden = ROBERTA[name]
        config = hf.RobertaConfig(
            vocab_size=50265, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
            intermediate_size=hidden, max_position_embeddings=514, num_labels=2,
        )  # fmt: skip
        return _bare(hf.RobertaForSequenceClassification, config), _classes
    layers, width, heads, hidden = MT5[name]
    config = hf.MT5Config(
        vocab_size=250112, num_layers=layers, num_decoder_layers=layers, d_model=width, num_heads=heads,
        d_ff=hidden, d_kv=64, use_cache=False,
    )  # fmt: skip
    model: Any = _bare(hf.MT5ForConditionalGeneration, config)
    # Its output is not tied to the embedding that encoder and decoder share; the configuration ties all or none.
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model, _translation


def _bare(kind: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = kind._from_config(config, attn_implementation="eager")
    return model.train()


def _tokens(batch: int, sequence: int) -> Tensor:
    return torch.empty((batch, sequence), dtype=torch.int64, device="meta")


def _language(model: nn.Module, batch: int, sequence: int) -> Tensor:
    logits = model(input_ids=_tokens(batch, sequence)).logits
    return F.cross_entropy(logits.flatten(0, 1), _tokens(batch, sequence).flatten())


def _classes(model: nn.Module, batch: int, sequence: int) -> Tensor:
    logits = model(input_ids=_tokens(batch, sequence)).logits
    return F.cross_entropy(logits, _tokens(batch, 1).flatten())


def _translation(model: nn.Module, batch: int, sequence: int) -> Tensor:
    words = _tokens(batch, sequence)
    logits = model(input_ids=words, decoder_input_ids=words).logits
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def finetuning_plan(name: str, recipe: str | Recipe, sequence: int) -> MemoryPlan:
    """One sequence a step."""
    model, loss = finetuned(name)
    return recipes.plan_memory(model, recipe, batch=1, sequence=sequence, loss=loss)


def table_2(sequence: int = 512, context: float = GIB, table: Sequence[Any] = TABLE_2) -> dict[str, Any]:
    """Peaks of every candidate, and the largest that fits each GPU less what CUDA takes for itself."""
    names = list(dict.fromkeys(name for _, candidates, _, _ in table for name in candidates))
    found: dict[str, Any] = {"sequence": sequence, "peak": {}, "parameters": {}, "largest": []}
    for name in names:
        plans = {adam: finetuning_plan(name, recipe, sequence) for adam, recipe in ADAMS.items()}
        found["parameters"][name] = plans["32-bit Adam"].parameters
        found["peak"][name] = {adam: plan.peak for adam, plan in plans.items()}
    for size, candidates, *_ in table:
        room = size * GIB - context
        fits = {adam: [name for name in candidates if found["peak"][name][adam] <= room] for adam in ADAMS}
        found["largest"].append({adam: names_of[-1] if names_of else None for adam, names_of in fits.items()})
    return found


def main(
    out: options.Out = Path("studies/memory_plans/results/memory_plans.json"),
    check: options.Check = False,
) -> None:
    """Plan the memory of every model of the papers' tables."""
    sequences, names, table = (128, 256, 512), tuple(SIZES), TABLE_2
    if check:
        size, candidates, *paper = TABLE_2[0]
        sequences, names, table = (128,), ("GPT-125M",), ((size, candidates[:1], *paper),)
    results = {
        **options.origin("cpu"),
        "table_2": [table_2(sequence, table=table) for sequence in sequences],
        "table_8": [table_8(in_flight=count) for count in (1, 2)],
        "table_12": table_12(names),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
