"""A training with gauges on, for something to look at: the run whose report is pictured in docs/gauges.md.

A GPT of 0.9 million parameters in bf16 learns Python's standard library with AdamW8bit, its weights kept plainly
and its moments in the paper's 8-bit codes: the cheapest there is, and what that costs is what the gauges show.

    python benchmarks/watched_run.py runs/watched
    narrowgauge report runs/watched
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import narrowgauge as ng
from narrowgauge import trainers

VOCABULARY, SEQUENCE, BATCH = 1024, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for gauges.jsonl, which has none yet")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--weights", default="plain", help="a weight storage (default: plain)")
    parser.add_argument("--states", default="8bit", help="a state storage (default: 8bit)")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    tokens = trainers.tokenize(trainers.load_corpus(None), VOCABULARY)
    model = trainers.build_model("mini", seed=0, vocabulary=tokens.vocabulary, sequence=SEQUENCE)
    model = model.to(options.device, torch.bfloat16)
    optimizer = ng.optim.AdamW8bit(
        model.named_parameters(), lr=1e-3, weight_decay=0.1, weights=options.weights, states=options.states
    )
    batches = iter(trainers.Batches(tokens.train, BATCH, SEQUENCE, 0))
    options.out.mkdir(parents=True, exist_ok=True)
    with ng.gauges.watch(model, optimizer, every=5, path=options.out, states_every=50) as gauges:
        for _ in range(options.steps):
            loss = trainers.next_token_loss(model, next(batches).to(options.device))
            gauges.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
