"""The gauges inside Hugging Face's Trainer; needs the package transformers, which only this file imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from narrowgauge.gauges._records import FILE_NAME, Record
from narrowgauge.gauges._watch import Watch, watch
from narrowgauge.gauges._watch._features import Hook, loss_in


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a training by `transformers.Trainer`.

        trainer = Trainer(model, arguments, callbacks=[ng.gauges.HuggingFaceCallback(every=10)])

    The loss is the Trainer's, from the model's output: with a loss function or label smoothing of the Trainer's own
    the records have none. A training resumed from a checkpoint goes on in the same file, after the checkpoint's
    step.

    Args:
        every: see `watch`.
        **options: of `watch`. `path` is ``gauges.jsonl`` in the Trainer's output folder by default.

    Attributes:
        gauges: the `Watch` of the training that runs, or of the last one; None before it.
    """

    def __init__(self, every: int = 10, **options: Any) -> None:
        self._every, self._options = every, options
        self.gauges: Watch | None = None
        self._shares: list[Tensor] = []
        self._hook: RemovableHandle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        options = {"path": Path(args.output_dir) / FILE_NAME, **self._options}
        if state.global_step:
            options.setdefault("resume_from", state.global_step)
        self.gauges = watch(kwargs["model"], kwargs["optimizer"], self._every, **options)
        try:
            self.gauges.__enter__()
        except FileExistsError as error:
            hint = "give HuggingFaceCallback(path=...) another, or train(resume_from_checkpoint=True)"
            raise FileExistsError(f"{error}; {hint}") from None
        self._shares = []
        self._hook = kwargs["model"].register_forward_hook(Hook(self._returned), with_kwargs=True)

    def _returned(self, model: Any, inputs: Any, named: Any, output: Any) -> None:
        # The Trainer says how many items an accumulated batch has, and each loss is its share of their mean.
        shared = named.get("num_items_in_batch") is not None and model.training and torch.is_grad_enabled()
        if shared and (loss := loss_in(output)) is not None:
            self._shares.append(loss.detach().clone())

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._shares and self.gauges is not None:
            # Over all ranks if the Trainer counts the items of all; the watch takes the mean over ranks.
            ranks = args.world_size if args.average_tokens_across_devices else 1
            self.gauges.loss(torch.stack(self._shares).sum() * ranks)
            self._shares = []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, after a training that ended by an error: the Trainer does not report it to callbacks."""
        if self._hook is not None:
            self._hook.remove()
        if self.gauges is not None and self.gauges.running:
            self.gauges.__exit__(None, None, None)

    def rows(self) -> list[Record]:
        """The records of the running or the last training."""
        return self.gauges.rows() if self.gauges is not None else []
