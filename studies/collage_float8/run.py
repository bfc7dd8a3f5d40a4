"""Collage with float8 storage: 5 and 6 bytes a parameter, in simulation, beside bf16 and fp32 master weights.

The paper's Appendix D proposes it and reports no run; this is one.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any

import typer

from narrowgauge import recipes
from narrowgauge.recipes import Recipe
from narrowgauge.trainers import (
    Batches,
    Settings,
    build_model,
    load_corpus,
    next_token_loss,
    tokenize,
    train,
    validation_windows,
)
from studies.collage_float8 import float8
from studies.shared import gather, options
from studies.shared.gather import Training

COMPARED = ("D", "A", "C")


def study(training: Training) -> dict[str, Any]:
    """Train each recipe from one start on one sequence of batches."""
    corpus = load_corpus(training.data)
    text = tokenize(corpus, training.vocabulary)
    start = build_model(
        training.model, vocabulary=training.vocabulary, sequence=training.sequence, seed=training.seed
    )
    hyperparameters = {"betas": (0.9, training.beta2), "eps": 1e-8, "weight_decay": 0.1}
    settings = Settings(training.steps, training.lr, training.warmup, decay_all=True, options=hyperparameters)
    validation = validation_windows(text.validation, training.sequence, 128).split(training.batch)
    rows, losses = [], []
    for recipe in (*map(recipes.get, COMPARED), *float8.RECIPES):
        batches = Batches(text.train, training.batch, training.sequence, training.seed)
        model = copy.deepcopy(start).to(training.device)
        run = train(recipe, model, next_token_loss, batches, settings, seed=training.seed, validation=validation)
        rows.append(row(recipe, run))
        losses = losses or run.loss
        print(f"{rows[-1]['name']}: validation loss {rows[-1]['validation_loss']}", flush=True)
    return gather._about(training, corpus.source, text, start, losses) | {"recipes": rows}


def row(recipe: Recipe, run: Any) -> dict[str, Any]:
    """What is kept of a run."""
    last = run.loss[-20:]
    stats = list(run.stats.values())
    total = type(stats[0]).total(stats)
    real = recipe.real_bytes if isinstance(recipe, float8.Float8Recipe) else recipe.bytes_per_parameter()
    return {
        "name": recipe.letters or recipe.name,
        "title": recipe.title,
        "bytes": real,
        "validation_loss": run.validation_loss,
        "training_loss": sum(last) / len(last),
        "effective_descent_quality": total.effective_descent_quality,
        "lost_updates": total.lost_updates,
    }


def main(
    out: options.Out,
    data: options.Data = Training.data,
    model: options.Model = Training.model,
    vocabulary: options.Vocabulary = Training.vocabulary,
    steps: options.Steps = Training.steps,
    batch: options.Batch = Training.batch,
    sequence: options.Sequence_ = Training.sequence,
    lr: options.Rate = Training.lr,
    beta2: Annotated[float, typer.Option(help="Decay rate of the second moment.")] = Training.beta2,
    seed: options.Seed = Training.seed,
    device: options.Device = Training.device,
    check: options.Check = False,
) -> None:
    """Train a small GPT with Collage's float8 storage, simulated, and with what it is compared to."""
    options.one_thread(check)
    if check:
        vocabulary, steps, batch, sequence = 256, 8, 4, 32
    training = Training(data, model, vocabulary, steps, batch, sequence, lr, beta2=beta2, seed=seed, device=device)
    results = study(training)
    options.write(out, results)


if __name__ == "__main__":
    typer.run(main)
