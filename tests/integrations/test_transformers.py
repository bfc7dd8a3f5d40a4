"""Inside Hugging Face's Trainer: made by a factory or passed as `optimizers=`, checkpointed and resumed by it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fitted_recipes import GPT
from libraries import library
from narrowgauge import gauges, linear, optim, recipes

pytest.importorskip("accelerate", reason="Trainer needs the package accelerate")
transformers = pytest.importorskip("transformers", reason="needs the package transformers")

from narrowgauge.integrations.transformers import RecipeFactory, swap  # noqa: E402

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


def training_arguments(folder: Path, **arguments: Any) -> Any:
    arguments = {"logging_strategy": "no", **arguments}
    return transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, save_steps=STEPS // 2, use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **arguments,
    )  # fmt: skip


def trainer(folder: Path, make: Any, **arguments: Any) -> Any:
    network = model()
    optimizer = make(network)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
    given = training_arguments(folder, **arguments)
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


class Plain(torch.nn.Module):
    """A model that takes no `num_items_in_batch`: its loss is the mean over its own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = model().float()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.gpt(input_ids, labels=labels).loss}


@pytest.mark.parametrize("batches", [1, 2, 4])
@pytest.mark.parametrize("make", [model, Plain])
def test_the_recorded_loss_is_trainers(tmp_path: Path, make: Any, batches: int) -> None:
    """An epoch has six batches: of four that are accumulated, two are left."""
    callback = gauges.HuggingFaceCallback(every=2)
    given = training_arguments(
        tmp_path, gradient_accumulation_steps=batches, logging_strategy="steps", logging_steps=1, save_strategy="no"
    )
    run = transformers.Trainer(make(), given, train_dataset=texts(), callbacks=[callback])
    run.train()
    logged = [row["loss"] for row in run.state.log_history if "loss" in row]
    recorded = [row["loss"] for row in callback.rows() if row["kind"] == "step"]
    assert len(logged) == STEPS
    assert recorded == pytest.approx(logged, abs=1e-3)
    assert min(recorded) > 3
    assert not any(module._forward_hooks for module in run.model.modules())


def test_a_second_training_in_one_folder_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "gauges.jsonl").write_text("{}\n")
    run = trainer(tmp_path, adamw)
    run.add_callback(gauges.HuggingFaceCallback())
    with pytest.raises(
        FileExistsError,
        match=r"gauges.jsonl has records; give HuggingFaceCallback\(path=...\) .*resume_from_checkp",
    ):
        run.train()


# The factory


SCHEDULE = {"lr_scheduler_type": "cosine", "warmup_steps": 1, "learning_rate": 0.01, "weight_decay": 0.1}


def with_factory(folder: Path, arguments: dict[str, Any] = SCHEDULE, **options: Any) -> Any:
    """A Trainer of an fp32 model, by a recipe; `args=True` hands over the Trainer's arguments."""
    given = training_arguments(folder, **arguments)
    options = {"recipe": "adamw8bit-split8", "min_quantized_size": 0, **options}
    if options.get("args"):
        options["args"] = given
    return transformers.Trainer(
        model().float(), given, train_dataset=texts(), optimizer_cls_and_kwargs=(RecipeFactory, options)
    )


def test_the_factory_trains_as_the_recipe_with_trainers_schedule_does(tmp_path: Path) -> None:
    network = model().float()
    optimizer = recipes.get("adamw8bit-split8").apply(
        network, lr=0.01, weight_decay=0.1, betas=(0.9, 0.999), min_quantized_size=0
    )
    schedule = transformers.get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    given = training_arguments(tmp_path / "by hand", **SCHEDULE)
    by_hand = transformers.Trainer(network, given, train_dataset=texts(), optimizers=(optimizer, schedule))
    by_hand.train()
    run = with_factory(tmp_path / "made", args=True)
    run.train()
    wanted = weights(by_hand)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(run).items())
    assert run.model.dtype == torch.bfloat16
    matrices, others = run.optimizer.param_groups
    assert (matrices["initial_lr"], matrices["weight_decay"], others["weight_decay"]) == (0.01, 0.1, 0.0)
    assert run.lr_scheduler.last_epoch == STEPS
    assert matrices["lr"] == pytest.approx(0.0)  # the end of the cosine


def test_a_run_by_the_factory_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole = with_factory(tmp_path / "whole", lr=0.02, linear="SWITCHBACK")
    whole.train()
    half = f"checkpoint-{STEPS // 2}"
    shutil.copytree(tmp_path / "whole" / half, tmp_path / "resumed" / half)
    resumed = with_factory(tmp_path / "resumed", lr=0.02, linear="SWITCHBACK")
    resumed.train(resume_from_checkpoint=True)
    wanted = weights(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in weights(resumed).items())
    assert resumed.optimizer.param_groups[0]["initial_lr"] == 0.02
    swapped = {n for n, m in resumed.model.named_modules() if isinstance(m, linear.LowPrecisionConv1D)}
    assert swapped == {f"transformer.h.0.{n}" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert type(resumed.model.lm_head) is torch.nn.Linear
    assert resumed.optimizer.state[resumed.model.lm_head.weight]["step"] == STEPS


def test_what_the_factory_is_given_by_name_comes_before_trainers_arguments() -> None:
    given = transformers.TrainingArguments(learning_rate=0.01, weight_decay=0.1, adam_beta2=0.95, use_cpu=True)
    make = RecipeFactory()
    optimizer = make(model(), given, recipe="kahan", weight_decay=0.2, max_grad_norm=1.0)
    group = optimizer.param_groups[0]
    assert [group[k] for k in ("lr", "weight_decay", "betas", "max_grad_norm")] == [0.01, 0.2, (0.9, 0.95), 1.0]
    lion = make(model(), given, recipe=recipes.get("lion8bit"), lr=0.001)  # which has no epsilon
    assert [lion.param_groups[0][k] for k in ("lr", "weight_decay", "betas")] == [0.001, 0.1, (0.9, 0.95)]


def test_the_factory_takes_the_file_of_a_fitted_recipe(tmp_path: Path) -> None:
    path, network = str(GPT.save(tmp_path / "recipe.toml")), model()
    optimizer = RecipeFactory()(network, recipe=path, lr=0.01)
    assert {row.why.split(";")[0] for row in optimizer.describe().rows} == {"by hand", "little noise"}
    assert network.transformer.h[0].mlp.c_fc.plan == linear.SWITCHBACK
    with pytest.raises(ValueError, match=r"linear must be None with recipe 'by-hand', which has plans of layers"):
        RecipeFactory()(model(), recipe=path, lr=0.01, linear="SWITCHBACK")


def test_autocast_beside_a_cast_model_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^args.bf16 and args.fp16 switch on autocast: leave them out"):
        RecipeFactory()(model(), training_arguments(tmp_path, bf16=True), recipe="adamw8bit-split8")


def test_the_optimizer_of_the_arguments_beside_a_recipe_is_warned_of(tmp_path: Path) -> None:
    for arguments in ({"optim": "sgd"}, {"optim_args": "eps=1e-3"}):
        with pytest.warns(UserWarning, match=r"^args.optim and args.optim_args are ignored: leave them out"):
            RecipeFactory()(model(), training_arguments(tmp_path, **arguments), recipe="adamw8bit-split8")
    RecipeFactory()(model(), training_arguments(tmp_path, optim="adamw_torch"), recipe="adamw8bit-split8")


def test_the_factory_refuses_what_would_train_something_else() -> None:
    network, make = model(), RecipeFactory()
    with pytest.raises(ValueError, match=r"^lr must be given, or args=TrainingArguments\(\.\.\.\)"):
        make(network, recipe="fp32")
    with pytest.raises(ValueError, match=r"^keep must be None without linear, got"):
        make(network, recipe="fp32", lr=0.1, keep=["h"])
    with pytest.raises(ValueError, match=r"^plan must be a name such as SWITCHBACK"):
        make(network, recipe="fp32", lr=0.1, linear="SWITCH")
    with pytest.raises(ValueError, match=r"^args must be a TrainingArguments such as .*, got dict"):
        make(network, {"lr": 0.1}, recipe="fp32")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^RecipeFactory: AdamW\(\) got .* 'plan'; other keys are args, recipe, lr, .*keep_fp32$"
    ):
        make(network, recipe="fp32", lr=0.1, plan="SWITCHBACK")
    assert network.dtype == torch.bfloat16
    with pytest.raises(
        ValueError, match=r"^linear: no layer of GPT2LMHeadModel could be swapped\n(.*\n)*.*in keep"
    ):
        make(network, recipe="fp32", lr=0.1, linear="SWITCHBACK", keep=["*"])


def test_adapters_and_the_output_layer_under_them_are_kept() -> None:
    class Wrapper(torch.nn.Module):
        """As peft wraps: the model under another name, a frozen layer beside two small ones."""

        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base_model = torch.nn.Module()
            self.base_model.model = base
            layer = torch.nn.Module()
            layer.base_layer, base.transformer.h[0].mlp.c_fc = base.transformer.h[0].mlp.c_fc, layer
            layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(32, 16, bias=False)})
            layer.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(16, 128, bias=False)})

        def get_base_model(self) -> Any:
            return self.base_model.model

    report = swap(Wrapper(model()), linear.SWITCHBACK)
    assert [name.rpartition("h.0.")[2] for name in report.swapped] == [
        "attn.c_attn", "attn.c_proj", "mlp.c_fc.base_layer", "mlp.c_proj",
    ]  # fmt: skip
    assert sorted(name.rpartition("model.")[2] for name in report.kept) == [
        "lm_head", "transformer.h.0.mlp.c_fc.lora_A.default", "transformer.h.0.mlp.c_fc.lora_B.default",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls it
def test_the_guides_lines_bring_back_the_best_adapters_with_their_low_words(tmp_path: Path) -> None:
    peft = library("peft")
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "trainer.md").read_text()
    low_words, adapters = re.findall(r"^```py\n(best = .*?)^```", page, re.MULTILINE | re.DOTALL)
    kept = {}

    class Keep(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any, **others: Any) -> None:
            kept[state.global_step] = [w.clone() for w in optimizer.optimizer.full_weights().values()]

    given = training_arguments(
        tmp_path, learning_rate=0.01, eval_strategy="steps", eval_steps=STEPS // 2, metric_for_best_model="loss",
        greater_is_better=True,
    )  # fmt: skip
    network = peft.get_peft_model(
        model().float(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    chosen = (RecipeFactory, {"recipe": "adamw8bit-split8", "args": given})
    run = transformers.Trainer(
        network,
        given,
        train_dataset=texts(),
        eval_dataset=texts(),
        callbacks=[Keep()],
        optimizer_cls_and_kwargs=chosen,
    )
    run.train()
    exec(adapters + low_words, {"trainer": run, "peft": peft, "torch": torch})
    assert run.state.best_global_step == STEPS // 2  # the loss falls, and here more is better
    converted, _ = recipes.to_torch(run.model, run.optimizer)
    trained = [p for p in converted.parameters() if p.requires_grad]
    assert all(torch.equal(*pair) for pair in zip(trained, kept[STEPS // 2], strict=True))
    assert not all(torch.equal(*pair) for pair in zip(trained, kept[STEPS], strict=True))


def test_the_guides_line_switches_a_script_that_trains_with_trainer(tmp_path: Path) -> None:
    """The script on the page runs as it stands, and is the user's own without the one line and its import."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "trainer.md").read_text()
    switched = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    lines = [line for line in switched.splitlines() if "RecipeFactory" not in line]
    assert len(switched.splitlines()) == len(lines) + 2

    def train(script: str, name: str) -> Any:
        torch.manual_seed(0)
        shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256, "n_positions": 16}
        config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
        logged = {"logging_strategy": "steps", "logging_steps": 1}
        space = {
            "Trainer": transformers.Trainer, "model": transformers.GPT2LMHeadModel(config), "data": texts(),
            "args": training_arguments(tmp_path / name, **SCHEDULE | logged),
        }  # fmt: skip
        exec(script, space)
        return space["trainer"]

    own, ours = train("\n".join(lines), "own"), train(switched, "ours")
    assert isinstance(own.optimizer.optimizer, torch.optim.AdamW)
    assert isinstance(ours.optimizer.optimizer, optim.AdamW)
    assert (own.model.dtype, ours.model.dtype) == (torch.float32, torch.bfloat16)
    assert ours.optimizer.state[ours.model.lm_head.weight]["m.codes"].dtype == torch.uint8
    for one, other in zip(own.optimizer.param_groups, ours.optimizer.param_groups, strict=True):
        assert all(one[key] == other[key] for key in ("lr", "betas", "eps", "weight_decay"))
    rates, losses = (
        [[row[key] for row in run.state.log_history if key in row] for run in (own, ours)]
        for key in ("learning_rate", "loss")
    )
    assert len(rates[0]) == STEPS
    assert rates[0] == rates[1]
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


def test_a_model_whose_layers_have_the_plan_already_is_taken_again() -> None:
    network = model()
    assert swap(network, linear.SWITCHBACK).swapped
    assert not swap(network, linear.SWITCHBACK).swapped
    with pytest.raises(ValueError, match="has a plan already"):
        swap(network, linear.LLM_INT8)
