"""What a page says of results that there are not: so, and the command that makes them.

A page may be written before its study has run. Its tables, its sentences with numbers and its pictures are then
one line and a command, and come by themselves with the results file. Only the files that are listed here may be
missing; any other name that no file has is a mistake on a page.
"""

from __future__ import annotations

SAID = "Not measured yet."
# Options of the study that makes a results file; `--seconds` and `--resume` divide each over several calls.
OPTIONS = {
    "adam_variants_h200.json": "--device cuda --jobs 8",
    "clip_precision_h200.json": "--device cuda --jobs 8",
    "collage_throughput_h200.json": "--device cuda",
    "collage_training_h200.json": "--device cuda --jobs 2",
    "collage_training_bert_h200.json": "--device cuda --jobs 2 --model bert",
    "compressed_training_h200.json": "--device cuda",
    "stability_h200.json": "--device cuda --jobs 8",
}


def command(study: str, name: str) -> str:
    """What makes a results file of a study.

    Raises:
        FileNotFoundError: if it is none of those that may be missing.
    """
    if name not in OPTIONS:
        known = ", ".join(sorted(OPTIONS))
        raise FileNotFoundError(f"there is no {name} in the results; those that may be missing are {known}")
    return f"python -m studies.{study}.run {OPTIONS[name]} --out studies/{study}/results/{name}"


def section(study: str, name: str) -> str:
    """What stands in a table's or a picture's place.

    Raises:
        FileNotFoundError: as of `command`.
    """
    return f"{SAID}\n\n`{command(study, name)}`\n"
