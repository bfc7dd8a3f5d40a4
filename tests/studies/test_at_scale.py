"""The proof at scale: copies leave the text, parts arrive while a run waits, and a run goes on where it stopped."""

from __future__ import annotations

import copy
import io
import json
import math
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from narrowgauge.trainers._tokens import open_tokens
from studies.at_scale import page, run, tasks, training
from studies.at_scale import text as collected
from studies.at_scale.parts import Parts, ids, pack
from studies.shared.language import start_of

LINES = [f"a line of its own, which is number {number}" for number in range(60)]


def module(first: int, last: int) -> str:
    return "\n".join(LINES[first:last]) + "\n"


def test_repeated_lines_leave_and_with_most_of_them_the_file() -> None:
    once = module(0, 20)
    longer = module(20, 40) + "}\n\n" + module(3, 12) + "}\n" + module(40, 60)
    most = module(0, 19) + "the only line that is new here, of twenty\n"
    indented = once.replace("a line", "   a line")
    short = module(50, 54)  # four lines are fewer than a window: alike they are by chance
    kept = collected.without_copies([once, longer, most, indented, short])
    assert kept == [once, module(20, 40) + "}\n\n" + module(40, 60), "", "", short]


def test_a_text_is_for_people() -> None:
    code = module(0, 20)
    assert collected.readable(code.replace("\n", "\r\n").encode(), "Python") == code
    page = f"<html><head><title>no</title></head><body><p>a &lt; b</p>{code}<script>no</script></body></html>"
    assert collected.readable(page.encode(), "HTML") == f"a < b\n{code}"
    bad = {"too short": b"a", "binary": code.encode() + b"\0", "not UTF-8": code.encode() + b"\xff"}
    bad |= {"long lines": b"word " * 900, "few letters": b"1, 2, 3, 4, 5\n" * 40, "too long": b"a\n" * 600_000}
    for reason, data in bad.items():
        with pytest.raises(ValueError, match=reason):
            collected.readable(data, "Python")


def archive(path: Path, files: dict[str, str]) -> None:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path, "w") as made:
            for name, content in files.items():
                made.writestr(name, content)
        return
    with tarfile.open(path, "w:xz") as made:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content.encode()))


def test_packages_are_read_once_held_out_whole_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collected, "SMALL", 0.2)
    monkeypatch.setattr(collected, "SHARE", 0.5)
    for number in range(10):
        name = f"p{number}-1.{number}-py3-none-any.whl"
        archive(tmp_path / name, {"a/one.py": module(6 * number, 6 * number + 6), "a/two.json": module(0, 9)})
    archive(tmp_path / "p3-1.12-py3-none-any.whl", {"a/one.py": module(0, 6), "b/x.tar.xz": "no archive"})
    pages = "".join(f"a sentence of the documentation, the {number}th\n" for number in range(30))
    archive(tmp_path / "s.tar.xz", {"doc/one.rst": pages + module(0, 30), "doc/t.txt": "short"})
    found = collected.collect([tmp_path], tmp_path / "out", 1)
    rows = {row["name"]: row for row in found["packages"]}
    assert len(rows) == 11
    assert "p3 1.12" in rows
    held = {name for name, row in rows.items() if row["held_out"]}
    assert held
    assert "s" not in held
    files = {side: sorted((tmp_path / "out" / side).rglob("*.*")) for side in ("train", "validation")}
    lines = {side: {line for f in of for line in f.read_text().splitlines()} for side, of in files.items()}
    assert not lines["train"] & lines["validation"]
    assert rows["s"]["left_out"]["too short"] == 1
    assert sum(row["bytes"] for row in rows.values()) == sum(f.stat().st_size for of in files.values() for f in of)
    assert found["kinds"]["Python"]["files"] + found["kinds"]["documentation"]["files"] == sum(
        map(len, files.values())
    )


def test_packages_are_known_by_their_files() -> None:
    assert collected.package_name("mysql_connector-26.7.0-cp311-cp311-linux.whl") == "mysql_connector 26.7.0"
    assert collected.package_name("sbcl-source_2%3a2.2.9-1_all.deb") == "sbcl-source 2:2.2.9-1"
    assert collected.package_name("django-5.2.tar.gz") == "django-5.2"


def test_a_sample_is_the_files_that_come_first_by_the_hash_that_names_them() -> None:
    packages = [collected.Package(f"p{n}", {f"{k}.py": module(0, 3) for k in range(20)}) for n in range(3)]
    one = packages[0].size / 20
    whole = sorted(collected.order(f"{p.name}/{name}") for p in packages for name in p.texts)
    collected._sampled(packages, int(12.5 * one))
    assert sorted(collected.order(f"{p.name}/{name}") for p in packages for name in p.texts) == whole[:12]
    assert sum(p.left_out["beyond the bytes asked for"] for p in packages) == 48


def test_a_package_has_its_share_at_most() -> None:
    assert collected._bound([10, 10, 10], 0.5) >= 10
    bound = collected._bound([1000, 30, 30, 40], 0.5)
    assert bound == pytest.approx(100)
    assert bound == 0.5 * (bound + 100)


@pytest.fixture(scope="module")
def parts(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "text.txt").write_text(text.read_text()[:40_000])
    return run.toy(folder / "text.txt", folder)


SETTING = replace(
    training.Setting(), model="micro", sequence=32, batch=4, micro=2, tokens=4 * 32 * 6, warmup=2, windows=4,
    validations=3, gauge_every=2, questions=8, compile=False, device="cpu",
)  # fmt: skip


def test_every_window_is_drawn_once_in_the_seeds_order_from_any_step(parts: Path) -> None:
    text, setting = Parts(parts), replace(SETTING, batch=32)
    every = [list(training.batches(text, setting, seed, 0, math.inf, "cpu")) for seed in (0, 1)]
    steps = sum(map(setting.steps_of, text.sizes))
    assert [len(of) for of in every] == [steps, steps]
    assert setting.steps_of(text.sizes[0]) < steps - 1
    assert not torch.equal(every[0][0], every[1][0])
    for step in (1, setting.steps_of(text.sizes[0]), steps - 1):
        again = next(training.batches(text, setting, 0, step, math.inf, "cpu"))
        assert torch.equal(again, every[0][step])
    whole = ids(next(text.train(0, math.inf))).unfold(0, 33, 32)
    seen = torch.cat(every[0][: setting.steps_of(text.sizes[0])])
    assert len(seen.unique(dim=0)) <= len(seen) <= len(whole)
    assert {tuple(w) for w in seen.tolist()} <= {tuple(w) for w in whole.tolist()}


@pytest.mark.parametrize("name", ["adamw8bit-split8", "A, adapted"])
def test_a_part_that_does_not_come_ends_a_run_which_then_goes_on(
    name: str, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LOOK_EVERY", 1000)
    here, text = tmp_path / "parts", open_tokens(parts.parent / "tokens", None)
    pack(replace(text, train=text.train[:3000], validation=text.validation[:1200]), here, 2, {})
    sizes = {"batch": 16, "micro": 8, "windows": 8, "validations": 1, "questions": 2}
    setting = replace(SETTING, tokens=1 << 30, gauge_every=1, **sizes)
    row = next(row for row in run.rows() if row.name == name)
    first = setting.steps_of(Parts(here).sizes[0])

    def trained(work: str, end: float) -> training.Result:
        return training.train(row, setting, 1e-3, 0, Parts(here), tmp_path / work, end, "cpu")

    whole = trained("one", math.inf)
    late = here / "part-01.xz"
    late.rename(tmp_path / "late")
    stopped = trained("two", time.monotonic())
    assert stopped["failed"] == f"ended after step {stopped['steps']} of {whole['steps']} for want of time"
    assert [step for step, _ in stopped["validation"]] == [stopped["steps"]]
    assert stopped["steps"] == first < whole["steps"]
    (tmp_path / "late").rename(late)
    again = trained("two", math.inf)
    for key in ("validation_loss", "validation", "curve", "tasks", "gauges", "all_lost"):
        assert again[key] == whole[key], key
    assert again.get("widened") == whole.get("widened")
    assert bool(whole.get("widened")) == (name == "A, adapted")
    assert {tuple(each[2:]) for each in whole.get("widened", ())} <= {("plain", "split8")}


def test_norms_alone_are_in_fp32() -> None:
    model = copy.deepcopy(start_of("micro", 512, 32, 0))
    next(row for row in run.rows() if row.name == "A, norms in fp32").optimizer(model, {"lr": 1e-3}, 0)
    assert {p.dtype for name, p in model.named_parameters() if ".ln_" in name} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if ".ln_" not in name} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["adamw8bit-split8", "A, norms in fp32"])  # gradients of one format, and of two
def test_two_processes_share_a_run(row: str, parts: Path, tmp_path: Path) -> None:
    task = run.Task(row, 1e-3, 0)
    alone, both = (
        run.one(task, replace(SETTING, micro=4 // ranks, ranks=ranks), parts, tmp_path / str(ranks), 1, math.inf)
        for ranks in (1, 2)
    )
    assert both["steps"] == alone["steps"] == 6
    assert both["validation_loss"] == pytest.approx(alone["validation_loss"], abs=1e-3)
    assert len(both["gauges"]["step"]) == 3


def made(row: str, lr: float, seed: int, loss: float | None, device: str = "one") -> dict[str, Any]:
    return {
        "row": row, "lr": lr, "seed": seed, "validation_loss": loss, "diverged": loss is None, "device": device,
        "bytes": {"total": 7.0}, "tokens_per_second": 1.0,
    }  # fmt: skip


def test_the_rate_is_that_of_the_references_best_run(tmp_path: Path) -> None:
    runs = [made("D", lr, 0, loss) for lr, loss in ((1.0, 3.0), (2.0, 2.5), (4.0, None))]
    (tmp_path / "runs.json").write_text(
        json.dumps({"runs": [*runs, made("A", 8.0, 0, 1.0), made("D", 1.0, 1, 0.1)]})
    )
    assert run._rates(tmp_path / "runs.json", None) == [2.0]
    (tmp_path / "runs.json").write_text(json.dumps({"runs": runs[2:]}))
    for path, why in ((tmp_path / "runs.json", "that ended, got none"), (tmp_path / "none.json", "No such file")):
        with pytest.raises(typer.BadParameter, match=why):
            run._rates(path, None)


def test_rows_are_compared_at_the_references_rate_and_others_in_the_table_of_rates() -> None:
    rows = [{"name": name, "title": "what", "family": "ours"} for name in ("D", "A", "B")]
    results = {"rows": rows, "training": {"seeds": 2, "lr": [1.0, 2.0]}, "unfinished": [], "runs": [
        made("D", 1.0, 0, 3.0), made("D", 2.0, 0, 2.5), made("D", 2.0, 1, 2.6),
        made("A", 1.0, 0, 3.25), made("A", 2.0, 0, 2.625), made("A", 2.0, 1, 2.85), made("B", 2.0, 0, 9.0),
    ]}  # fmt: skip
    lines = page.rows(results).splitlines()
    assert [line.removesuffix(" |").split(" | ")[3:] for line in lines[2:4]] == [
        ["2", "2.5500", "–"], ["2", "2.7375", "+0.1875 (+0.1250 … +0.2500)"],
    ]  # fmt: skip
    assert page.rates(results).splitlines()[2:] == ["| 1 | 3.0000 | +0.2500 |", "| 2 | 2.5000 | +0.1250 |"]


def test_runs_of_a_row_of_which_one_got_stuck_have_rows_of_their_own() -> None:
    names, steps = ("lost", "edq", "rms"), range(0, 1000, 50)
    seen = {"gauges": {"step": list(steps), **{name: [0.5] * len(steps) for name in names}}}
    curves = [[[step, abs(step - turn)] for step in steps] for turn in (950, 500)]
    results = {"rows": [{"name": name, "title": "what", "family": "ours"} for name in ("D", "A")], "runs": [
        made("D", 1.0, 0, 2.5), made("D", 1.0, 1, 2.5),
        *(made("A", 1.0, seed, loss) | {"curve": curves[seed]} | seen for seed, loss in ((0, 3.4), (1, 3.6))),
    ]}  # fmt: skip
    lines = page.rows(results).splitlines()[3:]
    assert [line[:11] for line in lines] == ["| A, seed 0", "| A, seed 1"]
    lines = page.turns(results).splitlines()[2:]
    assert lines[:2] == [
        "| 500 | A, seed 0 | 450.00 | 50.0 % | 0.5000 | 0.50 |",
        "| 500 | A, seed 1 | 0.00 | 50.0 % | 0.5000 | 0.50 |",
    ]  # fmt: skip
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 600", "| 600", "| 700", "| 700"]
    walked = [run | {"validation": [[1, run["validation_loss"]]]} for run in results["runs"]]
    (axis,) = page.differences(results | {"runs": walked, "training": {"batch": 1, "sequence": 1}}).axes
    assert axis.get_legend_handles_labels()[1] == ["A, each seed"]
    assert len({line.get_color() for line in axis.get_lines()[1:]}) == 1


def test_a_share_of_the_tokens_is_that_of_the_validation_made_for_it() -> None:
    steps = [7629 * part // 20 for part in range(1, 21)]
    run = {"validation": [[step, float(number)] for number, step in enumerate(steps, 1)]}
    assert [page.at(run, share) for share in page.TENTHS] == [20 * share for share in page.TENTHS]


def test_the_page_names_runs_of_another_device() -> None:
    committed = json.loads((Path(run.__file__).parent / "results" / "at_scale_gpt2.json").read_text())
    device = committed["environment"]["device"]
    here = committed | {"runs": [run for run in committed["runs"] if run.get("device", device) == device]}
    assert "; on " not in page.origin(here)
    row, seed = (here["runs"][0][key] for key in ("row", "seed"))
    elsewhere = {**here["runs"][0], "device": "NVIDIA X"}
    moved = here | {"runs": [elsewhere, *here["runs"][1:]]}
    assert f"; on NVIDIA X: {row} with seed {seed}. " in page.origin(moved)
    assert len(page.speeds(moved, row)) == len(page.speeds(here, row)) - 1


def test_runs_that_the_time_ended_show_what_they_have() -> None:
    """README and page say of the committed ones how far apart they stay."""
    committed = json.loads((Path(run.__file__).parent / "results" / "at_scale_llama_350m.json").read_text())
    loss = {of["row"]: dict(map(tuple, of["validation"])) for of in committed["runs"]}
    steps, name = committed["training"]["steps"], "adamw8bit-split8"
    apart = {step / steps: mine - loss["D"][step] for step, mine in loss[name].items()}
    assert max(abs(by) for at, by in apart.items() if at > 0.64) < 0.002
    assert all(by < 0 for at, by in apart.items() if at <= 0.25)
    assert min(by for at, by in apart.items() if 0.25 < at <= 0.6) > 0
    assert 0.005 < max(by for at, by in apart.items() if 0.25 < at <= 0.6) < 0.006
    assert -0.026 < apart[381 / steps] < -0.025
    lost, spikes = ([of.get(key) for of in committed["runs"]] for key in ("all_lost", "advice"))
    assert ([len(each) for each in lost], min(lost[0])[0]) == ([49, 0], 7100)
    assert all(
        any(rule[2].startswith("3 loss spikes") and "at step 2113." in rule[2] for rule in of) for of in spikes
    )
    shown = page.stopped(committed).splitlines()[-1]
    late = [[value for step, value in of["curve"] if step > 0.9 * steps] for of in committed["runs"]]
    difference = sum(late[0]) / len(late[0]) - sum(late[1]) / len(late[1])
    assert f"| 7,600 of 7,629 | {apart[381 / steps]:+.4f} | {apart[762 / steps]:+.4f} |" in shown
    assert shown.endswith(f"| {apart[7247 / steps]:+.4f} | {difference:+.4f} |")


def test_questions_have_one_right_answer_and_are_the_same_again(parts: Path) -> None:
    asked, again = (tasks.questions(Parts(parts), 512, 8) for _ in range(2))
    assert asked["cloze"].prompts
    assert len(asked["copying"].prompts) == len(asked["brackets"].prompts) == 8
    for name, of in asked.items():
        assert all(map(torch.equal, of.prompts, again[name].prompts))
        for prompt, choices, right in zip(of.prompts, of.choices, of.right, strict=True):
            assert len(prompt) <= 512
            assert not len(choices) or (choices[0] == right and len(choices.unique()) == len(choices))
    assert [asked[name].chance for name in ("cloze", "copying", "brackets")] == [1 / 4, 0.0, 1 / 3]
    copying = asked["copying"]
    assert all(right in prompt for prompt, right in zip(copying.prompts, copying.right, strict=True))
