"""The plugin for axolotl, against the protocol of its plugins.

Axolotl itself is not installed: it brings a hundred packages. The stub has the methods of `BasePlugin` in axolotl
0.19 with their parameters, and the rest does what axolotl does with a plugin, in its order.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from narrowgauge import linear, recipes

pydantic = pytest.importorskip("pydantic", reason="axolotl's options are its models")
pytest.importorskip("accelerate", reason="Trainer needs the package accelerate")
transformers = pytest.importorskip("transformers", reason="needs the package transformers")

NAME = "narrowgauge.integrations.axolotl"
# Each method's parameters after self.
PROTOCOL = {
    "register": "cfg", "on_config_validation_error": "cfg", "get_input_args": "", "get_training_args_mixin": "",
    "get_adapter_capabilities": "", "get_lora_config_kwargs": "cfg",
    "load_adapter": "model, cfg, inference=False, config_only=False", "load_datasets": "cfg, preprocess=False",
    "pre_model_load": "cfg", "post_model_build": "cfg, model", "pre_lora_load": "cfg, model",
    "post_lora_load": "cfg, model", "post_model_load": "cfg, model", "get_trainer_cls": "cfg",
    "post_trainer_create": "cfg, trainer", "get_training_args": "cfg",
    "get_collator_cls_and_kwargs": "cfg, is_eval=False", "create_optimizer": "cfg, trainer",
    "create_lr_scheduler": "cfg, trainer, optimizer, num_training_steps",
    "add_callbacks_pre_trainer": "cfg, model", "add_callbacks_post_trainer": "cfg, trainer",
    "on_rollouts_scored": "cfg, trainer, prompts, completions, rewards, advantages",
    "post_train": "cfg, model", "post_train_unload": "cfg",
}  # fmt: skip


class Config(dict[str, Any]):
    """Of what is not there it says None, as axolotl's."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module under test, beside the stub."""
    body = "\n".join(f"    def {name}(self, {parameters}): pass" for name, parameters in PROTOCOL.items())
    space: dict[str, Any] = {}
    exec(f"class BasePlugin:\n{body}", space)
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = space["BasePlugin"]  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def validated(plugin: Any, options: dict[str, Any]) -> Config:
    """The options after axolotl's check: a class made of its own and the plugin's."""
    module, _, cls = plugin.get_input_args().rpartition(".")
    own = pydantic.create_model("Own", optimizer=(str, "adamw_torch_fused"), optim_args=(str | None, None))
    merged = type("Merged", (own, getattr(importlib.import_module(module), cls)), {})
    return Config(merged(**options).model_dump(exclude_none=True))


def model() -> Any:
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    return transformers.GPT2LMHeadModel(config)


def trainer_of(kind: Any, network: Any, folder: Path) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, save_strategy="no", use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, logging_strategy="no", learning_rate=0.01,
        weight_decay=0.1, adam_beta2=0.95, lr_scheduler_type="cosine",
    )  # fmt: skip
    rows = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    return kind(network, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])


class AxolotlTrainer(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A factory is given the Trainer's arguments too."""

    def create_optimizer(self, model: Any = None) -> Any:
        factory, options = self.optimizer_cls_and_kwargs
        self.optimizer = factory()(self.model if model is None else model, self.args, **options)
        return self.optimizer


YAML = {
    "narrowgauge_recipe": "adamw8bit-split8", "narrowgauge_linear": "SWITCHBACK:e4m3",
    "narrowgauge_options": {"min_quantized_size": 0, "betas": [0.8, 0.95]}, "optimizer": "adamw_torch",
}  # fmt: skip


@pytest.mark.parametrize("kind", [AxolotlTrainer, transformers.Trainer])
def test_a_run_by_the_plugin_is_the_recipes_with_axolotls_settings(plugins: Any, kind: Any, tmp_path: Path) -> None:
    plugin = plugins.NarrowgaugePlugin()
    cfg = validated(plugin, YAML)
    network = model()
    plugin.post_model_load(cfg, network)
    run = trainer_of(kind, network, tmp_path)
    plugin.post_trainer_create(cfg, run)
    run.train()

    by_hand = model()
    linear.swap_linears(by_hand, linear.SWITCHBACK.with_format("e4m3"))
    optimizer = recipes.get("adamw8bit-split8").apply(
        by_hand, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), min_quantized_size=0
    )
    schedule = transformers.get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=2)
    other = trainer_of(transformers.Trainer, by_hand, tmp_path)
    other.optimizer, other.lr_scheduler = optimizer, schedule
    other.train()
    for p, q in zip(run.model.parameters(), by_hand.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, q)
    assert isinstance(network.transformer.h[0].mlp.c_fc, linear.LowPrecisionConv1D)


def test_the_plugins_methods_are_axolotls(plugins: Any) -> None:
    kind = plugins.NarrowgaugePlugin
    own = [name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")]
    assert sorted(own) == ["create_optimizer", "get_input_args", "post_model_load", "post_trainer_create"]
    for name in own:
        stub = inspect.signature(getattr(kind.__bases__[0], name))
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(stub.parameters)


def test_without_its_options_the_plugin_does_nothing(plugins: Any, tmp_path: Path) -> None:
    plugin = plugins.NarrowgaugePlugin()
    cfg = validated(plugin, {})
    run = trainer_of(transformers.Trainer, model(), tmp_path)
    plugin.post_model_load(cfg, run.model)
    plugin.post_trainer_create(cfg, run)
    assert run.optimizer_cls_and_kwargs is None
    assert plugin.create_optimizer(cfg, run) is None
    assert not any(isinstance(m, linear.LowPrecisionConv1D) for m in run.model.modules())
    cfg = validated(plugin, {"narrowgauge_recipe": "C"})
    made = plugin.create_optimizer(cfg, run)
    assert (made.defaults["weights"], made.defaults["betas"]) == ("expansion", (0.9, 0.95))


def test_the_guides_yaml_names_the_plugin_and_is_taken(plugins: Any) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "axolotl.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    given = yaml.safe_load(block)
    module, _, name = given.pop("plugins")[0].rpartition(".")
    cfg = validated(getattr(importlib.import_module(module), name)(), given)
    assert cfg["narrowgauge_recipe"] == given["narrowgauge_recipe"] == "adamw8bit-split8"
    table = re.findall(r"^\| `(narrowgauge_\w+)` \|", page, re.MULTILINE)
    assert set(table) == set(plugins.NarrowgaugeArgs.model_fields)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"narrowgauge_recipe": "adam"}, "recipe must be one of fp32, "),
        ({"narrowgauge_linear": "SWITCHBACK:e3"}, "plan 'SWITCHBACK:e3': "),
        ({"narrowgauge_options": {"lr": 1}}, r"narrowgauge_options must be left out without narrowgauge_recipe"),
        ({"narrowgauge_keep": ["h"]}, r"narrowgauge_keep must be left out without narrowgauge_linear, got \['h'\]"),
        ({**YAML, "optim_args": "eps=1"}, "optim_args must be left out with narrowgauge_recipe, got 'eps=1'"),
    ],
)
def test_options_that_contradict_are_refused_where_axolotl_checks_them(
    plugins: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=error):
        validated(plugins.NarrowgaugePlugin(), options)


def test_an_optimizer_of_axolotls_own_is_refused_beside_a_recipe(plugins: Any, tmp_path: Path) -> None:
    run = trainer_of(transformers.Trainer, model(), tmp_path)
    run.optimizer_cls_and_kwargs = (torch.optim.SGD, {})
    cfg = validated(plugins.NarrowgaugePlugin(), {**YAML, "optimizer": "muon"})
    with pytest.raises(ValueError, match=r"^optimizer must be one of transformers .* got 'muon'"):
        plugins.NarrowgaugePlugin().post_trainer_create(cfg, run)


@pytest.mark.skipif(importlib.util.find_spec("axolotl") is not None, reason="axolotl is installed")
def test_without_axolotl_the_import_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'axolotl'$"):
        importlib.import_module(NAME)
