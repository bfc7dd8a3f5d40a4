"""The gauges inside Hugging Face's Trainer; needs the package transformers, which only this file imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from narrowgauge.gauges._records import FILE_NAME, Record
from narrowgauge.gauges._watch import Watch, watch


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a training by `transformers.Trainer`.

        trainer = Trainer(model, arguments, callbacks=[ng.gauges.HuggingFaceCallback(every=10)])

    The loss is the one in the model's output: with a loss function or label smoothing of the Trainer's own the
    records have none. A training resumed from a checkpoint goes on in the same file, after the checkpoint's step.

    Args:
        every: see `watch`.
        **options: of `watch`. `path` is ``gauges.jsonl`` in the Trainer's output folder by default.

    Attributes:
        gauges: the `Watch` of the training that runs, or of the last one; None before it.
    """

    def __init__(self, every: int = 10, **options: Any) -> None:
        self._every, self._options = every, options
        self.gauges: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        options = {"path": Path(args.output_dir) / FILE_NAME, **self._options}
        if state.global_step:
            options.setdefault("resume_from", state.global_step)
        self.gauges = watch(kwargs["model"], kwargs["optimizer"], self._every, **options)
        self.gauges.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching, after a training that ended by an error: the Trainer does not report it to callbacks."""
        if self.gauges is not None and self.gauges.running:
            self.gauges.__exit__(None, None, None)

    def rows(self) -> list[Record]:
        """The records of the running or the last training."""
        return self.gauges.rows() if self.gauges is not None else []
