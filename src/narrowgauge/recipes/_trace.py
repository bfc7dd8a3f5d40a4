"""One training step of a model on the meta device, and the memory that it would take.

The model is a copy on the meta device: same modules, same code, tensors that have shapes only. A recipe is applied
to it and a linear plan swapped into it exactly as in a training, and a step runs: forward, loss, backward. That
takes a fraction of a second however large the model is.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from narrowgauge._arguments import shown
from narrowgauge._module_names import computed
from narrowgauge.linear import LinearPlan, hold_activations, swap_linears
from narrowgauge.linear._swap import output_heads
from narrowgauge.optim._plan import ParamPlan
from narrowgauge.recipes._cuda_kernels import WORKSPACES, as_on_cuda
from narrowgauge.recipes._losses import Loss
from narrowgauge.recipes._recipe import Recipe
from narrowgauge.recipes._timeline import Recorder, Timeline, rounded
from narrowgauge.storage import Float8Weight

# Elements of a program of the step: where all is plain words, and where something is in blocks (kernels._step).
_PLAIN, _BLOCKS = 512, 4096
_MOST_LAYERS = 10_000  # each is made, one after the other

_COUNTERS = 4 + 8  # bytes: how many steps a parameter has taken, and how many were skipped

# Which model is trained of a configuration that names none.
_IMAGE_MODELS = {"clip": "CLIPModel", "vit": "ViTForImageClassification"}


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device; the model is left alone, and no memory is taken."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *computed(model)):
        twin: Tensor = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            for name, value in vars(tensor).items():  # marks
                setattr(twin, name, value)
        memo[id(tensor)] = twin
    for p in model.parameters():
        if p.grad is not None:
            memo[id(p.grad)] = None
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"model must be one that copy.deepcopy copies, got a {type(model).__name__}: {error}"
        ) from None


def from_config(config: Any) -> nn.Module:
    """The transformers model of a configuration, on the meta device, with fused attention where it has that."""
    library: Any = sys.modules.get("transformers")  # imported, if the configuration is one of its
    if library is None or not isinstance(config, library.PretrainedConfig):
        raise ValueError(
            "model_or_config must be a torch.nn.Module, a transformers configuration or a number of parameters, "
            f"got {type(config).__name__}"
        )
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ValueError(f"model_or_config must have at most {_MOST_LAYERS} layers, got {layers}")
    masked = type(config) in library.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    make = library.AutoModelForMaskedLM if masked else library.AutoModelForCausalLM

    def made(attention: str) -> nn.Module:
        named = [name for name in config.architectures or () if hasattr(library, name)]
        named += [_IMAGE_MODELS[config.model_type]] if config.model_type in _IMAGE_MODELS else []
        kind: Callable[..., Any] = getattr(library, named[0])._from_config if named else make.from_config
        with torch.device("meta"):
            model: nn.Module = kind(copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32)
        return model

    try:
        try:
            model = made("sdpa")
        except ValueError:  # a few have none that is fused
            model = made("eager")
    except Exception as error:  # the models' classes raise anything for unexpected values
        raise ValueError(f"model_or_config: {type(config).__name__}: {_message(error)}") from error
    config_of: Any = model.config
    config_of.use_cache = False
    return model.train()


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


class Traced:
    """A model under a recipe, ready to be traced with one batch after the other.

    Args:
        model: on the meta device; it is cast and swapped here.
        recipe, linear, hold, checkpointing: as `plan_memory` takes them, `hold` as its `hold_activations`.
        loss: the forward pass.
        options: of the optimizer.
        accumulate: whether there are gradients of an earlier micro-batch, which a step adds to.
        frees: whether each gradient is freed as soon as it is made.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, linear: LinearPlan | None, checkpointing: bool, loss: Loss,
        options: Mapping[str, Any], accumulate: bool = False, frees: bool = False, hold: Any = None,
    ) -> None:  # fmt: skip
        if checkpointing:
            enable_checkpointing(model)
        self.optimizer = recipe.apply(model, **options)
        # As `narrowgauge train` does for transformers; the default of `swap_linears` for other models.
        heads: dict[str, Any] = {"keep": output_heads(model)} if hasattr(model, "config") else {}
        if linear is not None:
            report = swap_linears(model, linear, **heads)
            if not report.swapped:
                raise ValueError(f"linear must be None for a model without layers to swap, got {linear}")
        if hold is not None:
            hold_activations(model, hold, **heads)
        self.model, self._loss, self.accumulate, self._frees = model, loss, accumulate, frees
        self.trace = functools.cache(self._trace)

    @property
    def parameters(self) -> int:
        """How many the model has, shared ones counted once."""
        return sum(p.numel() for p in self.model.parameters())

    def held(self, shards: int = 1) -> dict[str, int]:
        """Bytes that stay from step to step, on each shard if there are several (cut along the first side).

        Each tensor is rounded up as allocated. By what they are: weights, buffers, states (moments with scales and
        counters, and the tables that kernels read), low words (with remainders and master copies), gradients.
        """
        held = {"weights": 0, "buffers": sum(rounded(b.nbytes) for b in self.model.buffers())}
        held |= {"states": 0, "low words": 0, "gradients": 0}
        trained = {id(p): plan for p, plan in self.optimizer.plans()}
        for p in self.model.parameters():
            plan = trained.get(id(p))
            cut = plan is not None and p.dim() and shards > 1
            part = -(-p.shape[0] // shards) / p.shape[0] if cut else 1.0
            held["weights"] += rounded(int(p.nbytes * part))
            if plan is None:
                continue
            moments = [slot.storage.nbytes(p.shape, slot.block_size) for slot in plan.slots]
            held["states"] += sum(rounded(int(size * part)) for size in moments)
            held["states"] += 2 * rounded(8) + _tables(plan, p.numel() * part)
            held["low words"] += rounded(int(p.numel() * plan.weight.bytes_added(p.dtype) * part))
            held["gradients"] += rounded(int(p.numel() * p.dtype.itemsize * part))
        return held

    def host(self) -> dict[str, int]:
        """Bytes on the CPU with offloaded states: copies of trained weights, room for gradients, states."""
        plans = self.optimizer.plans()
        moments = [int(slot.storage.nbytes(p.shape, slot.block_size)) for p, plan in plans for slot in plan.slots]
        return {
            "weights": sum(p.nbytes for p, _ in plans),
            "gradients": sum(p.nbytes for p, _ in plans),
            "states": sum(moments) + _COUNTERS * len(plans),
            "low words": sum(math.ceil(p.numel() * plan.weight.bytes_added(p.dtype)) for p, plan in plans),
        }

    def _trace(self, batch: int, sequence: int) -> Timeline:
        """A step of `batch` sequences of `sequence` tokens."""
        for p in self.model.parameters():
            p.grad = torch.empty_like(p) if self.accumulate and p.requires_grad else None
        known = [*self.model.parameters(), *self.model.buffers()]
        known += [p.grad for p in self.model.parameters() if p.grad is not None]
        known += [
            x for p in self.model.parameters() if isinstance(p, Float8Weight) for x in (p.codes, p.low, p.scale)
        ]
        recorder = Recorder(known, WORKSPACES)
        timeline = recorder.timeline

        def free(p: Tensor) -> None:
            assert p.grad is not None
            recorder.is_gradient(p.grad)
            p.grad = None

        trained = [p for p in self.model.parameters() if p.requires_grad] if self._frees else []
        hooks = [cast(Any, p).register_post_accumulate_grad_hook(free) for p in trained]
        with warnings.catch_warnings(), as_on_cuda(), recorder, _loss_apart(self.model, recorder):
            warnings.simplefilter("ignore")
            timeline.mark("forward")
            try:
                with recorder.during("loss"):
                    loss = self._loss(self.model, batch, sequence)
                if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                    raise ValueError(f"loss must return one element with a graph of gradients, got {shown(loss)}")
                timeline.mark("backward")
                with recorder.during("backward"):
                    torch.autograd.backward(loss)
            except RuntimeError as error:  # kernels that have no stand-in without memory, mostly
                raise ValueError(
                    f"model must run on the meta device, got a {type(self.model).__name__} whose step fails there "
                    f"(batch {batch}, sequence {sequence}): {error}"
                ) from error
            for p in self.model.parameters():
                if p.grad is not None:
                    recorder.is_gradient(p.grad)
            timeline.mark("optimizer")
        for hook in hooks:
            hook.remove()
        for p in self.model.parameters():
            p.grad = None
        return timeline


@contextmanager
def _loss_apart(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Count the model's own allocations as activations, not as the loss's."""
    run = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with recorder.during("activations"):
            return run(*args, **kwargs)

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def _recompute(*args: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


# Arguments of a checkpoint in a compiled function. Without them torch 2.11 saves what autograd functions compute.
RECOMPUTED = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _recompute)}
IN_COMPILED: dict[str, Any] = RECOMPUTED if torch.__version__.startswith("2.11.") else {}


def enable_checkpointing(model: nn.Module, compiled: bool = False) -> None:
    """Have a transformers model's blocks keep their inputs only.

    Args:
        model: of transformers.
        compiled: whether it will be compiled as a whole; its checkpoints are inside then.

    Raises:
        ValueError: for a model that has no such switch.
    """
    # The first is transformers' later name of the second.
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(
            f"checkpointing must be False for a {type(model).__name__}, got True: only models of transformers "
            "switch it on; let others checkpoint in their own code"
        )
    enable({"use_reentrant": False} | (IN_COMPILED if compiled else {}))


def _tables(plan: ParamPlan, elements: float) -> int:
    """Bytes of the optimizer's launch tables: addresses, and a number for each program of its passes."""
    each = _BLOCKS if any(slot.storage.quantized for slot in plan.slots) else _PLAIN
    return 128 + int(4 * elements / each) + int(4 * elements / _BLOCKS)
