# ruff: noqa: E501, PT018
"""Any damage to what a run leaves behind: records, history, configuration, results."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from io import StringIO
from pathlib import Path

from damage import contents, damages, fuzz, places, put, reading, refusal, tried
from hypothesis import strategies as st
from rich.console import Console

from narrowgauge.cli._report._command import ReportOptions, report
from narrowgauge.cli._runs import histories, read_results
from narrowgauge.cli._watch import WatchOptions, watch
from narrowgauge.gauges import read_records
from narrowgauge.gauges._records import line_of
from narrowgauge.trainers import TrainSettings, config_values
from narrowgauge.trainers._run_folder import History, read_history
from narrowgauge.trainers._settings import config_text
from recorded import compared, sound


def lines_before(data: bytes, at: int) -> int:
    return data[:at].count(b"\n")


@tried(6, 1500)
def test_records_are_read_up_to_the_damage(tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    records = sound(50)
    (folder / "gauges.jsonl").write_text("".join(map(line_of, records)))
    whole = contents(folder)
    assert read_records(folder) == records

    def page() -> str:
        text = StringIO()
        watch(WatchOptions([folder], once=True, interval=1.0), Console(file=text, width=100))
        return text.getvalue()

    def check(data: st.DataObject) -> None:
        done = data.draw(damages(folder, whole).filter(lambda d: d.kind != "pipe"))
        page_file = tmp_path / "report.html"
        with reading(folder):
            found, why = refusal(lambda: read_records(folder), OSError)
        assert why is None or str(folder) in why, done
        if found is not None and done.at:
            intact = lines_before(whole["gauges.jsonl"], done.at)  # type: ignore[arg-type]
            assert found[:intact] == records[:intact], done
            assert found.damage is None or found.damage.startswith("line "), done
        shown, why = refusal(page, OSError)  # of which the command makes one line
        assert shown or str(folder) in str(why), done
        shown, why = refusal(lambda: report(ReportOptions([folder], page_file)), OSError)
        assert why is None or str(folder) in why, done

    fuzz(tries, check)


ODD = [None, -1, 0, 2, 1e300, 10**400, "", "A", True, [], {}, [[]], [1, 2, 3]]


def test_results_are_a_page_or_one_line_whatever_stands_at_a_place(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    whole = compared()
    row = {"settings": {"lr": 1.0}, "training_loss": 2.0, "step_ms_quartiles": [1.0, 2.0], "step_ms": 1.5}
    whole["recipes"]["A"] |= row
    accepted = 0
    for way in places(whole):
        for odd in ODD:
            damaged = copy.deepcopy(whole)
            inner = damaged
            for key in way[:-1]:
                inner = inner[key]
            inner[way[-1]] = odd
            path.write_text(json.dumps(damaged))
            found, why = refusal(lambda: histories(read_results(path)))
            assert why is None or why.startswith(
                f"RUN must have the results of a comparison, got {str(path)!r}: "
            ), way
            accepted += found is not None
            if found is not None and accepted % 300 == 0:
                report(ReportOptions([path], tmp_path / "page.html"))
    assert accepted > 200


HISTORY = [{"step": n, "loss": 7.4375 - n, "lr": 6e-05} for n in range(20, 400, 20)]


@tried(50, 5000)
def test_a_history_goes_on_from_what_stands_before_the_damage(tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in HISTORY))
    whole = contents(folder)
    assert read_history(folder / "history.jsonl") == HISTORY

    def check(data: st.DataObject) -> None:
        done = data.draw(damages(folder, whole).filter(lambda d: d.kind not in ("pipe", "folder", "loop")))
        with reading(folder):
            found = read_history(folder / "history.jsonl")
        intact = lines_before(whole["history.jsonl"], done.at)  # type: ignore[arg-type]
        assert found[:intact] == HISTORY[:intact], done
        written = History(folder, after=200)
        written.add(step=201, loss=1.0)
        written.close()
        again = read_history(folder / "history.jsonl")
        assert again[-1] == {"step": 201, "loss": 1.0}, done
        assert again[:-1] == [record for record in found if record["step"] <= 200], done

    fuzz(tries, check)


TOML = st.sampled_from(
    ["1" * 400, "1" * 5000, "-1", "0", "inf", "nan", "-0.0", "1e400", "true", '""', '"\\u0000"', '"x"', "[]", "{}",
     "[" * 5000, "{a=" * 5000, "1979-05-27", "'''", '"\x7f"', "0x7fffffffffffffffffff", '"none"', '"../.."', '"~nobody"']
)  # fmt: skip


@tried(100, 10000)
def test_a_configuration_is_settings_or_one_line_that_names_it(tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "config.toml"
    path.write_text(config_text(TrainSettings()))
    whole = contents(folder)
    keys = [field.name.replace("_", "-") for field in fields(TrainSettings)]

    def check(data: st.DataObject) -> None:
        done: object
        if data.draw(st.booleans()):
            done = data.draw(damages(folder, whole).filter(lambda d: d.kind != "pipe"))
        else:
            put(folder, whole)
            done = f"{data.draw(st.sampled_from(keys))} = {data.draw(TOML | st.text(max_size=9))}\n"
            path.write_text(done, encoding="utf-8")
        with reading(folder):
            values, why = refusal(lambda: config_values(path))
        if why is not None:
            assert why.startswith("--config: ") and str(path) in why and "\n" not in why, done
            return
        _, why = refusal(lambda: TrainSettings(**values))
        assert why is None or why.startswith("--") or "recipe" in why, (done, why)

    fuzz(tries, check)
