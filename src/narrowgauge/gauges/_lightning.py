"""The gauges inside Lightning's Trainer; needs the package lightning, which only this file imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from narrowgauge.gauges._records import FILE_NAME, Record
from narrowgauge.gauges._watch import Watch, watch


class LightningCallback(Callback):  # type: ignore[misc]
    """Watches a training by `lightning.Trainer`.

        trainer = lightning.Trainer(callbacks=[ng.gauges.LightningCallback(every=10)])

    The loss is the one that Lightning calls ``backward`` on. A training resumed from a checkpoint goes on in
    the same file, after the checkpoint's step.

    Args:
        every: see `watch`.
        optimizer: index of the optimizer that is watched.
        **options: of `watch`. `path` is ``gauges.jsonl`` in the Trainer's default root folder by default.

    Attributes:
        gauges: the `Watch` of the training that runs, or of the last one; None before it.
    """

    def __init__(self, every: int = 10, optimizer: int = 0, **options: Any) -> None:
        self._every, self._optimizer, self._options = every, optimizer, options
        self.gauges: Watch | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.close()
        if not 0 <= self._optimizer < len(trainer.optimizers):
            raise ValueError(f"optimizer must be an index below {len(trainer.optimizers)}, got {self._optimizer}")
        options = {"path": Path(trainer.default_root_dir) / FILE_NAME, **self._options}
        if trainer.global_step:
            options.setdefault("resume_from", trainer.global_step)
        options.setdefault("scaler", getattr(trainer.precision_plugin, "scaler", None))
        self.gauges = watch(pl_module, trainer.optimizers[self._optimizer], self._every, **options)
        try:
            self.gauges.__enter__()
        except FileExistsError as error:
            hint = "give LightningCallback(path=...) another, or fit(ckpt_path=...)"
            raise FileExistsError(f"{error}; {hint}") from None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.gauges is not None and self.gauges.running:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = scaler._scale if scaler is not None and scaler.is_enabled() else 1.0
            # Lightning divides by how many batches are accumulated, and scales before this is called.
            self.gauges.loss(loss.detach() / scale * trainer.accumulate_grad_batches)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close(exception)

    def close(self, error: BaseException | None = None) -> None:
        """Stop watching."""
        if self.gauges is not None and self.gauges.running:
            self.gauges.__exit__(type(error) if error is not None else None, error, None)

    def rows(self) -> list[Record]:
        """The records of the running or the last training."""
        return self.gauges.rows() if self.gauges is not None else []
