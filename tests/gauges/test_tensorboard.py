"""Records in TensorBoard's events, read back by TensorBoard."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from watched import model, of_kind, train

from narrowgauge import gauges, optim


def test_numbers_and_histograms_are_there(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    net = model(torch.bfloat16)
    optimizer = optim.AdamW8bit(net.named_parameters(), min_quantized_size=1000)
    with gauges.watch(net, optimizer, 2, tensorboard=tmp_path, states_every=4) as watch:
        train(net, optimizer, 4, watch)
    rows = watch.rows()
    events: Any = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("update/rms/embed.weight")] == [1, 2, 3, 4]

    def read(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in events.Scalars(tag)]

    assert read("step/loss") == [(row["step"], pytest.approx(row["loss"])) for row in of_kind(rows, "step")]
    update = of_kind(rows, "update", name="embed.weight")
    assert read("update/lost/embed.weight") == [(row["step"], pytest.approx(row["lost"])) for row in update]
    whole = of_kind(rows, "update", name="")
    assert read("update/norm/model") == [(row["step"], pytest.approx(row["norm"])) for row in whole]
    assert {"gradient/mean/embed.weight", "activation/absmax/blocks.1", "activation/e4m3 underflow/embed"} <= set(
        scalars
    )
    state = of_kind(rows, "state", slot="m")[0]
    (histogram,) = events.Histograms(f"state/usage/{state['name']} [m]")
    assert histogram.step == 4
    assert histogram.histogram_value.num == sum(state["usage"])
    assert histogram.histogram_value.bucket == state["usage"]


def test_without_the_package_it_says_so_and_watches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    needs = pytest.raises(ModuleNotFoundError, match="tensorboard needs the package tensorboard")
    with needs, gauges.watch(net, optimizer, tensorboard=tmp_path):
        pass
    assert not optimizer._optimizer_step_pre_hooks
    with gauges.watch(net, optimizer):
        pass
