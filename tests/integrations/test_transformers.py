"""Inside Hugging Face's Trainer: passed as `optimizers=`, checkpointed by it, resumed by it to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge import gauges, optim

pytest.importorskip("accelerate", reason="Trainer needs the package accelerate")
transformers = pytest.importorskip("transformers", reason="needs the package transformers")

STEPS = 4


def model() -> Any:
    """GPT-2 of one small layer in bf16: tied weights, and dropout, whose random state a checkpoint has to keep."""
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).bfloat16()


def texts() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(folder: Path, make: Any, **arguments: Any) -> Any:
    network = model()
    optimizer = make(network)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
    given = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, save_steps=STEPS // 2, use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no", **arguments,
    )  # fmt: skip
    return transformers.Trainer(network, given, train_dataset=texts(), optimizers=(optimizer, schedule))


def adamw(network: Any) -> optim.NarrowOptimizer:
    return optim.AdamW8bit(network.named_parameters(), weights="split8", min_quantized_size=0)


def checkpointed(network: Any) -> optim.NarrowOptimizer:
    # transformers 5.20 gave it the second name and warns of the first.
    new = getattr(network, "activation_checkpointing_enable", None)
    (new or network.gradient_checkpointing_enable)()
    return adamw(network)


def within(network: Any) -> optim.NarrowOptimizer:
    return optim.step_in_backward(network, optim.AdamW8bit, weights="split8", min_quantized_size=0)


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (adamw, {}),
        (checkpointed, {"gradient_accumulation_steps": 2}),
        (within, {"max_grad_norm": 0.0}),
    ],
    ids=["plain", "accumulated, checkpointed", "in backward"],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, make: Any, arguments: Any) -> None:
    whole = trainer(tmp_path / "whole", make, **arguments)
    begun = weights(whole)
    whole.train()
    resumed = trainer(tmp_path / "resumed", make, **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}"))
    wanted = weights(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(resumed).items())
    assert not any(torch.equal(value, wanted[name]) for name, value in begun.items() if "weight" in name)
    p = resumed.model.lm_head.weight
    assert p is resumed.model.transformer.wte.weight
    state = resumed.optimizer.state  # accelerate's wrapper hands it through
    assert state[p]["step"] == STEPS
    assert state[p]["m.codes"].dtype == torch.uint8
    assert resumed.lr_scheduler.last_epoch == STEPS


def test_the_gauges_callback_changes_nothing_and_goes_on_with_a_resumed_run(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", adamw)
    plain.train()
    whole = trainer(tmp_path / "whole", adamw)
    callback = gauges.HuggingFaceCallback(every=2, states_every=2)
    whole.add_callback(callback)
    whole.train()
    wanted = weights(plain)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(whole).items())
    rows = gauges.read_records(tmp_path / "whole" / "gauges.jsonl")
    assert rows.damage is None
    assert callback.rows() == list(rows)
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(row["loss"] > 0 for row in steps)
    kinds = {row["kind"] for row in rows if row.get("step") == 2}
    assert kinds == {"step", "update", "gradient", "activation", "activation_gradient", "state", "adam_error"}
    assert {row["name"] for row in rows if row["kind"] == "activation"} == {
        "transformer.wte", "transformer.wpe", "transformer.h.0",
    }  # fmt: skip
    assert not any(module._forward_hooks for module in whole.model.modules())
    resumed = trainer(tmp_path / "whole", adamw)
    resumed.add_callback(gauges.HuggingFaceCallback(every=2, states_every=2))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{STEPS // 2}"))
    again = gauges.read_records(tmp_path / "whole" / "gauges.jsonl")
    assert again.damage is None
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in some] for some in (rows, again)]
    assert timeless[0] == timeless[1]
