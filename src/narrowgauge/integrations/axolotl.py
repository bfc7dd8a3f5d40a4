"""Recipes and linear layers in eight bits for axolotl, as a plugin that its YAML names.

    plugins:
      - narrowgauge.integrations.axolotl.NarrowgaugePlugin
    narrowgauge_recipe: adamw8bit-split8
    narrowgauge_linear: SWITCHBACK:e4m3
    bf16: full

axolotl loads the model and calls `post_model_load`, which swaps the linear layers. It makes its Trainer and calls
`post_trainer_create`, which gives the Trainer a `RecipeFactory`. `create_optimizer` makes the same optimizer:
axolotl 0.18 and 0.19 have that hook and never call it.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, model_validator

from narrowgauge import recipes
from narrowgauge.integrations.transformers import RecipeFactory, hyperparameters, swap
from narrowgauge.linear import named_plan
from narrowgauge.optim import NarrowOptimizer

# They tell axolotl how to make an optimizer of its own, which a recipe replaces.
_REFUSED = ("optim_args", "embedding_lr", "embedding_lr_scale", "lr_groups", "loraplus_lr_ratio")


class NarrowgaugeArgs(BaseModel):  # type: ignore[misc]
    """The plugin's options in axolotl's YAML.

    Attributes:
        narrowgauge_recipe: name of the recipe that takes the place of ``optimizer``.
        narrowgauge_options: more of its optimizer's arguments, which come before axolotl's own.
        narrowgauge_linear: plan of the linear layers and its format.
        narrowgauge_keep: linear layers to keep; output layers and adapters if left out.
    """

    narrowgauge_recipe: str | None = None
    narrowgauge_options: dict[str, Any] | None = None
    narrowgauge_linear: str | None = None
    narrowgauge_keep: list[str] | None = None

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def _check(self) -> NarrowgaugeArgs:
        if self.narrowgauge_recipe is not None:
            recipes.get(self.narrowgauge_recipe)
        if self.narrowgauge_linear is not None:
            named_plan(self.narrowgauge_linear)
        for part, whole in (("options", "recipe"), ("keep", "linear")):
            value = getattr(self, f"narrowgauge_{part}")
            if value is not None and getattr(self, f"narrowgauge_{whole}") is None:
                raise ValueError(f"narrowgauge_{part} must be left out without narrowgauge_{whole}, got {value!r}")
        for name in _REFUSED if self.narrowgauge_recipe is not None else ():
            value = getattr(self, name, None)  # the class is merged with axolotl's own
            if value is not None:
                raise ValueError(
                    f"{name} must be left out with narrowgauge_recipe, got {value!r}: the recipe makes the "
                    "optimizer, whose arguments are narrowgauge_options"
                )
        return self


class NarrowgaugePlugin(BasePlugin):  # type: ignore[misc]
    """Swaps linear layers and makes the optimizer, each if the YAML asks for it."""

    def get_input_args(self) -> str:
        return f"{__name__}.NarrowgaugeArgs"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if cfg.narrowgauge_linear:
            swap(model, named_plan(cfg.narrowgauge_linear), cfg.narrowgauge_keep)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if not cfg.narrowgauge_recipe:
            return
        if trainer.optimizer_cls_and_kwargs is not None:
            raise ValueError(
                f"optimizer must be one of transformers with narrowgauge_recipe, such as adamw_torch, got "
                f"{cfg.optimizer!r}"
            )
        trainer.optimizer_cls_and_kwargs = (RecipeFactory, _arguments(cfg, trainer))

    def create_optimizer(self, cfg: Any, trainer: Any) -> NarrowOptimizer | None:
        return RecipeFactory()(trainer.model, **_arguments(cfg, trainer)) if cfg.narrowgauge_recipe else None


def _arguments(cfg: Any, trainer: Any) -> dict[str, Any]:
    """All of them by name: axolotl's Trainers pass on their own arguments too, transformers' do not."""
    known = recipes.get(cfg.narrowgauge_recipe).known(hyperparameters(trainer.args))
    return {"recipe": cfg.narrowgauge_recipe, **known, **(cfg.narrowgauge_options or {})}
