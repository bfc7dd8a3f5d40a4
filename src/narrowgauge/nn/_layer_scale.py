"""Layer scale, and putting it into a transformer's blocks.

It multiplies what a block adds to the residual stream by a learned vector that starts at zero (or near it), so that
feature magnitudes stay small at the start of training: what makes float8 training of large vision-language models
stable. `add_layer_scale` puts one at the end of each branch of a transformer's blocks.

Sources: Touvron et al. 2021 and, for layer scale from zero, Wortsman et al. 2023, Section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """x times a learned vector along the last dimension.

    Args:
        dim: its length.
        init: its first value; zero makes a block start as the identity.
        device, dtype: of the vector.

    Shapes: (..., dim) to (..., dim).

    Source: Touvron et al. 2021; Wortsman et al. 2023, Section 2.3.
    """

    def __init__(
        self,
        dim: int,
        init: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(init), device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma

    def extra_repr(self) -> str:
        return f"{self.gamma.numel()}"


# The last linear layers of a block's branches, by the class of the block. Their output goes to the residual stream,
# through dropout at most, which commutes with scaling. Paths that a block does not have are skipped.
_BRANCHES = {
    "GPT2Block": ("attn.c_proj", "crossattention.c_proj", "mlp.c_proj"),
    "LlamaDecoderLayer": ("self_attn.o_proj", "mlp.down_proj"),
    "CLIPEncoderLayer": ("self_attn.out_proj", "mlp.fc2"),
    "ViTLayer": ("attention.o_proj", "attention.output.dense", "mlp.fc2", "output.dense"),
    "BertLayer": ("attention.output.dense", "crossattention.output.dense", "output.dense"),
    "RobertaLayer": ("attention.output.dense", "crossattention.output.dense", "output.dense"),
}


@dataclass(frozen=True, eq=False)
class AddedLayerScales:
    """What `add_layer_scale` did.

    Attributes:
        scales: the layer scales, by the names of the layers whose output they multiply.
    """

    scales: dict[str, LayerScale]
    _layers: tuple[nn.Module, ...]
    _hooks: tuple[torch.utils.hooks.RemovableHandle, ...]

    def remove(self) -> None:
        """Take them out of the model, with what they have learned."""
        for hook, layer in zip(self._hooks, self._layers, strict=True):
            hook.remove()
            layer._modules.pop("layer_scale", None)

    def __str__(self) -> str:
        return "\n".join([f"layer scale: {len(self.scales)}", *(f"  {name}" for name in self.scales)])


def add_layer_scale(model: nn.Module, init: float = 0.0) -> AddedLayerScales:
    """Multiply what each block of a transformer adds to its residual stream by a learned vector.

    The vector is a parameter `layer_scale.gamma` of the last linear layer of the branch, so that checkpoints gain
    that name and lose none. Make the optimizer afterwards. Linear layers may be swapped before or after.

    Args:
        model: a model of transformers with blocks of GPT-2, LLaMA, CLIP, ViT, BERT or RoBERTa.
        init: first value of the vectors; zero makes a pre-norm block start as the identity.

    Returns:
        The layer scales by name; `remove()` takes them out.

    Raises:
        ValueError: for a model without such blocks, or with layer scales already.

    Source: Wortsman et al. 2023, Equation 3; Touvron et al. 2021.
    """
    layers: dict[str, nn.Module] = {}
    for name, block in model.named_modules():
        for path in _BRANCHES.get(type(block).__name__, ()):
            module: Any = block
            for part in path.split("."):
                module = getattr(module, part, None)
            if module is not None:
                layers[f"{name}.{path}".lstrip(".")] = module
    if not layers:
        raise ValueError(f"model must have blocks of {', '.join(_BRANCHES)}, got {type(model).__name__}")
    for name, layer in layers.items():
        if hasattr(layer, "layer_scale"):
            raise ValueError(f"model must not have layer scales already, got one at {name}")
    scales, hooks = {}, []
    for name, layer in layers.items():
        weight = layer.get_parameter("weight")
        # A Conv1D of transformers has its output features last.
        dim = weight.shape[0] if isinstance(layer, nn.Linear) else weight.shape[1]
        scales[name] = LayerScale(dim, init, device=weight.device, dtype=weight.dtype)
        layer.add_module("layer_scale", scales[name])
        hooks.append(layer.register_forward_hook(_scale_output))
    return AddedLayerScales(scales, tuple(layers.values()), tuple(hooks))


def _scale_output(layer: Any, arguments: Any, output: Tensor) -> Tensor:
    # A function of the module: hooks are copied and pickled with it.
    return layer.layer_scale(output)  # type: ignore[no-any-return]


_scale_output.repeatable = True  # type: ignore[attr-defined]  # for held activations, which run it twice
