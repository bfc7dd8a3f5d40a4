"""`narrowgauge train` on images as a user types it: a kill, the file, and what loads afterwards."""

from __future__ import annotations

import io
import tarfile
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from test_train import history, kill

from forked import Command
from narrowgauge.cli import main

pytestmark = pytest.mark.usefixtures("surroundings")

OPTIONS = (
    "--model", "clip-micro", "--vocabulary", "280", "--batch", "4", "--validation-windows", "4", "--warmup", "2",
    "--lr", "0.003", "--workers", "2",
)  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two archives of bars at places that their captions say."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(2):
        with tarfile.open(folder / f"bars-{shard:03d}.tar", "w") as archive:
            for n in range(30):
                image = Image.new("RGB", (34, 40), (20, 20, 20))
                ImageDraw.Draw(image).rectangle((n, 0, n + 4, 40), fill=(240, 200 * shard, 40))
                file = io.BytesIO()
                image.save(file, "JPEG")
                color = ("red", "yellow")[shard]
                for name, content in ((f"{n}.jpg", file.getvalue()), (f"{n}.txt", f"{color}, {n}".encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
    return folder


def records(out: Path) -> list[dict]:
    return [record for record in history(out) if "images_per_second" not in record]


def started(out: Path, shards: Path, *more: str) -> Command:
    data = str(shards / "bars-{000..001}.tar")
    return Command(["train", "--out", str(out), *OPTIONS, "--data", data, *more], out.parent)


@pytest.mark.slow  # as a text's training does, which runs
def test_killed_in_the_middle_it_ends_as_if_it_had_not_been(shards: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = (
        "--steps", "30", "--save-every", "4", "--validate-every", "15", "--gauges-every", "10", "--log-every", "1",
        "--layer-scale", "0.5", "--patch-dropout", "0.5", "--kq-norm", "--patch-norm", "after", "--flip",
    )  # fmt: skip
    process, reference = started(killed, shards, *options), started(whole, shards, *options)
    kill(process, killed)
    resumed = started(killed, shards, *options)
    told, complaints = resumed.communicate()
    assert (resumed.returncode, complaints) == (0, "")
    assert "going on from" in told
    assert "zero shot top1" in told
    assert "narrowgauge.trainers.load_model puts them back" in told
    assert reference.communicate()[1] == ""
    assert records(killed) == records(whole)
    assert [r["step"] for r in records(whole) if "loss" in r] == list(range(1, 31))
    for name in ("model.safetensors", "additions.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    loads(killed)


def loads(out: Path) -> None:
    from transformers import AutoTokenizer, CLIPModel

    from narrowgauge.trainers import load_model

    _, told = CLIPModel.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    tokens = AutoTokenizer.from_pretrained(out)(["red, 3", "yellow, 17"], padding=True, return_tensors="pt")
    said = load_model(out)(**tokens, pixel_values=torch.zeros(3, 3, 32, 32))
    assert said.logits_per_image.shape == (3, 2)


def test_the_file_of_a_run_repeats_it(shards: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    more = ("--steps", "4", "--crop-scale", "0.5", "--max-logit-scale", "20", "--validation-data", str(shards))
    assert main(["train", "--data", str(shards), "--out", str(first), *OPTIONS, *more]) == 0
    written = tomllib.loads((first / "config.toml").read_text())
    assert (written["crop-scale"], written["max-logit-scale"], written["workers"]) == (0.5, 20.0, 2)
    assert (written["validation-data"], written["columns"]) == (str(shards), "filepath,title")
    assert "additions" not in (first / "config.toml").read_text()
    assert main(["train", "--config", str(first / "config.toml"), "--out", str(second)]) == 0
    assert records(second) == records(first)
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_other_images_are_not_gone_on_with(shards: Path, tmp_path: Path, capsys) -> None:
    def asked(*more: str) -> int:
        return main(["train", "--data", str(shards), "--out", str(tmp_path), *OPTIONS, "--steps", "3", *more])

    assert asked() == 0
    for more, says in (
        (("--flip",), "--flip must be False to go on from"),
        (("--data", str(shards / "bars-000.tar")), "--data must have the content that"),
        (("--data", "nowhere.csv"), "got nowhere.csv, where nothing is"),
        (("--accumulate", "3"), "--accumulate must be a divisor of --batch 4"),
    ):
        assert asked(*more) == 2
        complaint = capsys.readouterr().err
        assert says in complaint
        assert complaint.count("\n") == 1
