"""The table of Collage with float8 storage."""

from __future__ import annotations

from studies.shared.tables import Results, markdown, origin, percent


def recipes(*runs: Results) -> str:
    """Losses by recipe, a pair of columns for each run."""
    head = ["recipe", "what is kept", "bytes / parameter"]
    for run in runs:
        head += [f"loss, β2 {run['training']['beta2']:g}", "minus D", "lost"]
    rows = []
    for places in zip(*(run["recipes"] for run in runs), strict=True):
        first = places[0]
        row = [f"`{first['name']}`", first["title"], f"{first['bytes']:g}"]
        for place, run in zip(places, runs, strict=True):
            loss, reference = place["validation_loss"], run["recipes"][0]["validation_loss"]
            if loss is None:
                row += ["diverged", "", ""]
            else:
                row += [f"{loss:.4f}", f"{loss - reference:+.4f}", percent(place["lost_updates"], 2)]
        rows.append(row)
    return markdown(head, rows, words=2)


def origins(*runs: Results) -> str:
    """What was run."""
    return "\n".join(origin(run).replace(" in fp32 on ", " on ") for run in runs)


TABLES = {"recipes": recipes, "origins": origins}
