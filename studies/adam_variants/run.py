"""The 8-bit paper's optimizers side by side: Tables 1 and 7 in small, and Table 3 where the learning rate is high.

    python -m studies.adam_variants.run --device cuda --jobs 8 --seconds 500 --resume --out NAME.json
    python -m studies.adam_variants.run --check --out runs/check.json # a toy, seconds on a CPU

Three tasks: a causal and a masked language model on the Python sources that are installed, and characters in
pictures (`glyphs.py`). On each, 32-bit Adam (Momentum on pictures), torch's Adafactor, AdaGrad, and their 8-bit
forms: this library's two, bitsandbytes', torchao's and FlashOptim's where they are installed. A sweep with one seed
finds the learning rate of a family for its 32-bit row, and all its rows get that one, each with several seeds.

Then Table 3's rows again at several times the causal model's learning rate, with several seeds: which of
dynamic codes, blocks and the stable embedding keeps a run from diverging. At the best rate `eight_bit_adam` has
asked that, with Figure 3 and Table 8.

Results are written after every run; `--seconds` and `--resume` divide the study over several calls.

Source: 8-bit Optimizers via Block-wise Quantization (Dettmers et al. 2022), Sections 3 and 4, Appendix H.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import replace
from typing import Annotated

import typer

from studies.adam_variants.training import FAMILIES, RATES, VARIANTS, Plan, Task, name_of, run
from studies.adam_variants.training import family as family_of
from studies.eight_bit_adam import plan as planned
from studies.shared import language, options
from studies.shared.resumable import Study

KINDS = ("language", "masked", "images", "ablation")
FACTORS = (1.0, 2.0, 4.0)  # times the best learning rate, in the ablation
PACKAGES = ("bitsandbytes", "torchao", "flashoptim")
CHECK = Plan(
    replace(
        Plan().language, megabytes=1, model="micro", vocabulary=300, sequence=24, batch=4, steps=4, windows=4
    ),
    models=("micro", "roberta-micro"), image_steps=2, image_batch=8, image_width=4, validated=1, ablation_steps=4,
)  # fmt: skip


def sweep(kind: str, family: str) -> list[Task]:
    """The family's 32-bit row at each of its learning rates."""
    return [Task(kind, family_of(family)[0].name, lr, 0) for lr in RATES[family]]


def best(results: Study, kind: str, family: str) -> float | None:
    """The learning rate with the lowest validation loss; None before the sweep's end, or if nothing ended well."""
    found = {task.lr: results.of(task) for task in sweep(kind, family)}
    if not all(found.values()):
        return None
    losses = {lr: r["validation_loss"] for lr, r in found.items() if r is not None and r.get("validation_loss")}
    return min(losses, key=lambda lr: losses[lr]) if losses else None


def compared(kind: str, family: str, lr: float, seeds: int) -> list[Task]:
    """All rows of a family at its learning rate: by seed, so that a study cut short has a seed of each."""
    return [Task(kind, row.name, lr, seed) for seed in range(seeds) for row in family_of(family)]


def ablation(lr: float, seeds: int) -> list[Task]:
    """Table 3's rows at several times a learning rate, the highest first."""
    return [
        Task("ablation", name_of(arm), planned.digits(factor * lr), seed)
        for factor in reversed(FACTORS)
        for seed in range(seeds)
        for arm in planned.ARMS
    ]


def main(
    out: options.Out,
    data: options.Text = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Of a language run. [500]")] = None,
    image_steps: Annotated[int | None, typer.Option(min=2, help="Of an image run. [600]")] = None,
    ablation_steps: Annotated[int | None, typer.Option(min=2, help="Of a run of the ablation. [400]")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of every row.")] = 3,
    ablation_seeds: Annotated[int, typer.Option(min=1, help="Of every row of the ablation.")] = 4,
    only: options.Only = None,
    device: options.Device = "cpu",
    jobs: options.Jobs = 1,
    seconds: options.Seconds = math.inf,
    resume: options.Resume = False,
    check: options.Check = False,
) -> None:
    """Train three tasks under every optimizer, and write how they ended."""
    end = time.monotonic() + seconds
    options.one_thread(check)
    plan = CHECK if check else Plan()
    setting = replace(plan.language, **options.given(data=data, steps=steps, device=device))
    lengths = options.given(image_steps=image_steps, ablation_steps=ablation_steps)
    plan = replace(plan, language=setting, **lengths)
    kinds = options.matching("--only", only, KINDS)
    counts = {"seeds": 1 if check else seeds, "ablation_seeds": 1 if check else ablation_seeds}
    lines = [{"name": row.name, "title": row.title, "family": row.family} for row in VARIANTS]
    about = language.about(plan.language, plan.plain() | counts, lines) | options.origin(plan.device, PACKAGES)
    about["data"] |= {"parameters": {model: language.parameters_of(plan.language, model) for model in plan.models}}
    del about["parameters"]
    results = Study(out, about, resume, grows=tuple(counts))
    # Sweeps, then what they are for, task by task.
    one = functools.partial(run, plan=plan)
    pairs = [(kind, family) for kind in kinds if kind != "ablation" for family in FAMILIES[kind]]
    if "ablation" in kinds and ("language", "adam") not in pairs:
        pairs.insert(0, ("language", "adam"))  # its learning rate
    sweeps = [task for pair in pairs for task in sweep(*pair)]
    print(f"{len(sweeps)} runs of sweeps, {len(sweeps) - len(results.missing(sweeps))} of them there", flush=True)
    results.make(sweeps, one, end, jobs=jobs)
    rates = {pair: lr for pair in pairs if (lr := best(results, *pair)) is not None}
    print("learning rates: " + ", ".join(f"{kind} {family} {lr:g}" for (kind, family), lr in rates.items()))
    tasks = [t for pair, lr in rates.items() if pair[0] in kinds for t in compared(*pair, lr, counts["seeds"])]
    if "ablation" in kinds and ("language", "adam") in rates:
        tasks += ablation(rates["language", "adam"], counts["ablation_seeds"])
    print(f"{len(results.missing(tasks))} runs are to be made", flush=True)
    left = results.make(tasks, one, end, jobs=jobs)
    results.write(left + results.missing(sweeps))


if __name__ == "__main__":
    typer.run(main)
