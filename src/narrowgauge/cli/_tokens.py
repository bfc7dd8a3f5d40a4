"""`narrowgauge tokens`: a text, prepared once for many trainings."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.cli._environment import usable_cores
from narrowgauge.cli._train import TrainDisplay
from narrowgauge.trainers import prepare_tokens


def tokens(data: Path | None, out: Path, vocabulary: int, workers: int | None) -> int:
    """Write a folder of tokens; see `prepare_tokens`.

    Raises:
        ValueError: for input that cannot work, in one line that names the option.
    """
    for name, value, least, most in (("vocabulary", vocabulary, 256, 2**20), ("workers", workers, 1, 1024)):
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name}: got {value}, takes an integer from {least} to {most}")
    with TrainDisplay() as display:
        index = prepare_tokens(
            data, out, vocabulary=vocabulary, workers=workers or usable_cores(), on_progress=display.stage
        )
        for note in index["notes"]:
            display.say(note)
    held = sum(index[side]["tokens"] for side in ("train", "validation"))
    display.say(f"{held:,} tokens, {index['bytes_per_token']:.2f} bytes a token\n{out}")
    return 0
