"""Loops that do odd things while they are watched: copy the model, grow it, run out of disk."""

import copy
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import batch, loss_of, model, of_kind, train

from narrowgauge import gauges, optim

MAKERS = (torch.optim.AdamW, optim.AdamW)


def test_a_model_can_be_copied_and_saved_whole_within_the_loop(tmp_path: Path) -> None:
    """As an average of its weights or a checkpoint; copies are not watched, and work without the watch."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with gauges.watch(net, optimizer, every=1, path=tmp_path) as watch:
        train(net, optimizer, 1, watch)
        saved = io.BytesIO()
        torch.save(net, saved)
        saved.seek(0)
        copies = [copy.deepcopy(net), torch.load(saved, weights_only=False)]
        before = len(watch.rows())
        for other in copies:
            loss_of(other, *batch(1)).backward()
        optimizer.zero_grad()
        optimizer.step()
        assert not of_kind(watch.rows()[before:], "activation")
        assert [row["loss"] for row in of_kind(watch.rows()[before:], "step")] == [None]


@pytest.mark.parametrize("make", MAKERS)
def test_parameters_that_are_given_to_the_optimizer_within_the_loop_are_measured(make: Any) -> None:
    net = model()
    optimizer = make(net.parameters(), 1e-3)
    with gauges.watch(net, optimizer, every=1) as watch:
        train(net, optimizer, 1, watch)
        net.extra = nn.Linear(2, 2)
        alone = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [*net.extra.parameters(), alone]})
        for p in (*net.extra.parameters(), alone):
            p.grad = torch.ones_like(p)
        optimizer.step()
    names = [row["name"] for row in of_kind(watch.rows(), "update", step=2)]
    assert names[-3:] == ["extra.weight", "extra.bias", "param_groups.1.2"]
    assert of_kind(watch.rows(), "gradient", step=2, name="extra.bias")[0]["mean"] == 1


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_records_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with caplog.at_level(logging.ERROR, "narrowgauge.gauges"):
        with gauges.watch(net, optimizer, every=1, path=tmp_path) as watch:
            train(net, optimizer, 2, watch)
            whole = len(watch.rows())
            writer = watch._sink.writer
            assert writer is not None
            writer._file.close()
            writer._file = Full()  # type: ignore[assignment]
            train(net, optimizer, 2, watch)
        assert len(watch.rows()) == whole
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert "the training goes on" in caplog.text


def test_what_fails_on_entering_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())

    def broken(*args: Any) -> dict[str, Any]:
        raise OSError("no header")

    watch = gauges.watch(net, optimizer, path=tmp_path / "first")
    with monkeypatch.context() as patched:
        patched.setattr("narrowgauge.gauges._watch._watch.header", broken)
        with pytest.raises(OSError, match="no header"):
            watch.__enter__()
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_hooks for module in net.modules())
    with gauges.watch(net, optimizer, path=tmp_path / "second") as watch:
        train(net, optimizer, 1, watch)
    assert of_kind(watch.rows(), "step")


def test_resuming_keeps_what_stands_behind_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was damaged in its middle is kept aside; the half line of a kill is not worth it."""
    path = tmp_path / "gauges.jsonl"
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with gauges.watch(net, optimizer, every=1, path=path) as watch:
        train(net, optimizer, 4, watch)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"st')
    with gauges.watch(net, optimizer, every=1, path=path, resume_from=4):
        pass
    assert path.read_bytes().count(b"\n") == whole.count(b"\n")
    assert [p.name for p in tmp_path.iterdir()] == ["gauges.jsonl"]
    lines = whole.splitlines(keepends=True)
    damaged = b"".join([*lines[:5], b"{\n", *lines[6:]])
    for suffix in ("", "2"):
        path.write_bytes(damaged)
        with gauges.watch(net, optimizer, every=1, path=path, resume_from=4):
            pass
        assert (tmp_path / f"gauges.jsonl.damaged{suffix}").read_bytes() == damaged
        assert len(gauges.read_records(path)) == 5
    assert "line 6" in caplog.text


def test_resuming_where_steps_have_no_records_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    path = tmp_path / "gauges.jsonl"
    for resume_from, said in (
        (10, ["no records to go on with: they begin after step 10"]),
        (12, []),
        (20, ["the records end at step 14 and go on after step 20"]),
    ):
        caplog.clear()
        with gauges.watch(net, optimizer, every=1, path=path, resume_from=resume_from) as watch:
            train(net, optimizer, 2, watch)
        assert [record.getMessage() for record in caplog.records] == [f"{path}: {words}" for words in said]
    assert [row["step"] for row in of_kind(watch.rows(), "step")] == [11, 12, 13, 14, 21, 22]


def test_two_watches_of_one_process_have_a_file_each(tmp_path: Path) -> None:
    path = tmp_path / "gauges.jsonl"
    nets = [model(), model()]
    one, other = (gauges.watch(net, torch.optim.AdamW(net.parameters()), path=path) for net in nets)
    with one:
        message = r"^path must be a file of its own for each watch: another of this process writes .*gauges.jsonl$"
        with pytest.raises(FileExistsError, match=message), other:
            pass
    with pytest.raises(FileExistsError, match="path must be a new file"):
        gauges.watch(nets[1], torch.optim.AdamW(nets[1].parameters()), path=path).__enter__()


def test_a_step_that_raised_does_not_leave_the_next_ones_measured() -> None:
    net = model()
    optimizer = optim.AdamW(net.named_parameters(), nonfinite="raise")
    with gauges.watch(net, optimizer, every=2) as watch:
        train(net, optimizer, 1, watch)
        for p in net.parameters():
            p.grad = torch.full_like(p, torch.nan)
        with pytest.raises(FloatingPointError):
            optimizer.step()
        assert watch._steps.taken == 1
        train(net, optimizer, 2, watch)
    assert optimizer.gauges is False
    assert [row["step"] for row in of_kind(watch.rows(), "update", name="")] == [2]


def losses(count: int) -> list[float]:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.01
    return [3.0 + x + (1.0 if n in (130, 131) else 0.0) for n, x in enumerate(noise.tolist(), start=1)]


def watched(path: Path, first: int, last: int, called: list[dict]) -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    resume = first - 1 or None
    with gauges.watch(
        model, optimizer, path=path, warmup=10, resume_from=resume, on_alarm=called.append, activations=False,
        updates=False, gradients=False, rms_every=0,
    ) as watch:  # fmt: skip
        steps(watch, model, optimizer, losses(160)[first - 1 : last])


def steps(watch: gauges.Watch, model: nn.Module, optimizer: torch.optim.Optimizer, given: list[float]) -> None:
    for loss in given:
        model(torch.ones(2, 4)).sum().backward()
        watch.loss(loss)
        optimizer.step()
        optimizer.zero_grad()


def test_spikes_are_told_from_all_losses_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole: list[dict] = []
    watched(tmp_path / "whole.jsonl", 1, 160, whole)
    for cut in (125, 140):  # before the spike, and after it: it is not raised a second time
        first: list[dict] = []
        second: list[dict] = []
        path = tmp_path / f"{cut}.jsonl"
        watched(path, 1, cut, first)
        watched(path, cut + 1, 160, second)
        kept = [record for record in whole if record["of"] == "loss"]
        assert [record for record in first + second if record["of"] == "loss"] == kept
        assert [r for r in gauges.read_records(path) if r["kind"] == "spike" and r["of"] == "loss"] == kept
    assert [record["step"] for record in whole if record["of"] == "loss"]


def test_settled_all_steps_are_on_disk(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    path = tmp_path / "gauges.jsonl"
    with gauges.watch(model, optimizer, every=100, path=path) as watch:
        steps(watch, model, optimizer, [1.0, 2.0, 3.0])
        watch.settle()
        assert [r["loss"] for r in gauges.read_records(path) if r["kind"] == "step"] == [1.0, 2.0, 3.0]
        steps(watch, model, optimizer, [4.0])
    assert [r["loss"] for r in gauges.read_records(path) if r["kind"] == "step"] == [1.0, 2.0, 3.0, 4.0]
