"""The table of Collage with float8 storage."""

from __future__ import annotations

from studies.shared.tables import Results, origin, per, percent2, table


def recipes(*runs: Results) -> str:
    """Losses by recipe, a group of columns for each run."""
    found = [{row["name"]: row for row in run["recipes"]} for run in runs]

    def loss(run: int, row: Results) -> str:
        value = found[run][row["name"]]["validation_loss"]
        return "diverged" if value is None else f"{value:.4f}"

    def behind(run: int, row: Results) -> float | None:
        value = found[run][row["name"]]["validation_loss"]
        return None if value is None else value - runs[run]["recipes"][0]["validation_loss"]

    def lost(run: int, row: Results) -> float | None:
        place = found[run][row["name"]]
        return None if place["validation_loss"] is None else place["lost_updates"]

    return table(
        runs[0]["recipes"],
        ("recipe", lambda row: f"`{row['name']}`"),
        ("what is kept", "title"),
        ("bytes / parameter", "bytes", "g"),
        *per(
            range(len(runs)), lambda run: f"loss, β2 {runs[run]['training']['beta2']:g}",
            ("", loss), ("minus D", behind, "+.4f"), ("lost", lost, percent2),
        ),
        words=2,
    )  # fmt: skip


def origins(*runs: Results) -> str:
    """What was run."""
    return "\n".join(origin(run).replace(" in fp32 on ", " on ") for run in runs)


TABLES = {"recipes": recipes, "origins": origins}
