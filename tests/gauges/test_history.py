"""A history gives back every number put in, takes whatever stands in a file, and follows one that grows."""

from __future__ import annotations

import base64
import json
import math
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.gauges import advise, read_records
from narrowgauge.gauges._history import History, LiveReader, is_embedding
from narrowgauge.gauges._records import line_of, packed, unpacked
from recorded import BLOCKS, NAMES, STRANGE, header, sound, state, step, tensor, update


def test_a_parameter_converted_on_its_own_has_its_own_weight_storage() -> None:
    own = {"a": {"weights": "stochastic", "m": "log8"}, "b": {"m": "log8"}, "c": 3}
    group = {"weights": "split8", "parameters": ["a", "b", "c", 5], "storages": own}
    history = History([header() | {"groups": [group, {"parameters": ["d"]}, {"weights": "split"}, 7]}])
    assert history.weights == {"a": "stochastic", "b": "split8", "c": "split8"}
    assert [history.low_word_storage(name) for name in "abcde"] == [None, "split8", "split8", None, None]


def test_storages_that_were_changed_count_from_then_on() -> None:
    first, resumed = {"weights": "plain", "parameters": ["a", "b"]}, {"b": {"weights": "split8"}}
    changed: Any = {"a": {"weights": "split", "v": "log8"}, "b": 7, "c": {"weights": 3}}
    records: list[Any] = [{"kind": "storages", "step": 20, "parameters": changed}]
    history = History([header() | {"groups": [first]}, *records])
    assert (history.weights, history.second_moments) == ({"a": "split", "b": "plain"}, {"a": "log8"})
    assert [history.changed(name) for name in ("a", "a [m]", "b", "")] == [20, 20, 0, 20]
    history.add(header() | {"groups": [first | {"storages": resumed}]})  # a resumed run says what is now
    assert history.weights == {"a": "plain", "b": "split8"}
    history.add({"kind": "storages", "step": 30, "parameters": None})


@pytest.mark.parametrize("states", ["bf16", {"m": "fp32", "v": "bf16"}])
def test_a_second_moment_has_its_own_storage_or_its_group_s(states: Any) -> None:
    kept, own = {"b": {"v": "fp32"}, "c": {"v": "fp32"}}, {"c": {"v": "log8"}, "d": {"m": "log8"}}
    group = {"states": states, "parameters": ["a", "b", "c", "d"], "kept": kept, "storages": own}
    history = History([header() | {"groups": [group, {"states": {"m": "bf16"}, "parameters": ["e"]}]}])
    assert history.second_moments == {"a": "bf16", "b": "fp32", "c": "log8", "d": "bf16"}


def test_numbers_come_back_by_tensor_and_step() -> None:
    history = History([header(), update(5, "a", rms=2.0), update(10, "a", rms=3.0), update(5, "b", rms=7.0)])
    steps, values = history.series("update", "rms", "a")
    assert steps.tolist() == [5, 10]
    assert values.tolist() == [2.0, 3.0]
    assert history.series("update", "rms", "b").values.tolist() == [7.0]
    assert not len(history.series("update", "rms", "c").steps)
    assert not len(history.series("gradient", "rms", "a").steps)
    assert history.last_step == 10
    history = History([tensor("gradient", 5, "a", formats={"e4m3 scaled": {"underflow": 0.25}})])
    assert history.series("gradient", "formats.e4m3 scaled.underflow", "a").values.tolist() == [0.25]
    unknown = History([header(), {"kind": "weather", "step": 4, "name": "a", "rain": 1.0}])
    assert (unknown.ignored, unknown.series("weather", "rain", "a").values.tolist()) == (0, [1.0])


def test_of_a_step_that_was_taken_twice_the_later_record_counts() -> None:
    history = History([step(1, 5.0), step(2, 4.0), step(3, 3.0), step(2, 2.5), step(3, 2.0)])
    assert history.loss.steps.tolist() == [1, 2, 3]
    assert history.loss.values.tolist() == [5.0, 2.5, 2.0]


def test_what_is_not_finite_is_a_value_and_what_is_no_number_is_none() -> None:
    values: list[Any] = [math.nan, "inf", "-inf", None, True, "fast", [1], 10**400]
    history = History([step(i, value) for i, value in enumerate(values, 1)])
    assert history.loss.steps.tolist() == [1, 2, 3, 8]
    assert np.isnan(history.loss.values[0])
    assert history.loss.values[1:].tolist() == [math.inf, -math.inf, math.inf]
    assert len(history.loss.finite.steps) == 0


@pytest.mark.parametrize(
    "record",
    [{}, {"kind": "step"}, {"kind": "step", "step": "1"}, {"kind": "step", "step": -1},
     {"kind": "step", "step": 0}, {"kind": 3, "step": 1},
     {"kind": "step", "step": True}, {"kind": "update", "step": 1, "name": 7}, {"kind": "step", "step": 1.0}],
)  # fmt: skip
def test_a_record_without_step_or_name_is_counted_and_left_out(record: dict[str, Any]) -> None:
    history = History([header(), record])
    assert (history.count, history.ignored) == (2, 1)
    assert history.last_step == 0


def test_tensors_come_in_the_models_order() -> None:
    history = History([header(), *(update(5, name) for name in reversed(NAMES)), update(5, ""), update(5, "new")])
    assert history.names("update") == [*NAMES, "new"]


def test_a_matrix_has_nan_where_nothing_was_measured() -> None:
    names, steps, values = History([update(5, "a", rms=1.0), update(10, "b", rms=2.0)]).matrix("update", "rms")
    assert names == ["a", "b"]
    assert steps.tolist() == [5, 10]
    np.testing.assert_array_equal(values, [[1.0, np.nan], [np.nan, 2.0]])


def test_codes_and_maps_are_added_up() -> None:
    history = History([state(50, "a", "m", usage=[1, 2, 0]), state(100, "a", "m", usage=[0, 2, 4])])
    assert history.usage["a", "m"].tolist() == [1, 4, 4]
    assert history.series("state", "relative_norm", "a [m]").values.tolist() == [0.02, 0.02]
    usage, sums = np.zeros((256, 256), "<u4"), np.zeros((256, 256), "<f4")
    usage[1, 2], usage[255, 255], sums[1, 2] = 3, 1, 0.5
    record = {"kind": "adam_error", "step": 50, "name": "", "usage": packed(usage), "error": packed(sums)}
    history = History([record, record])
    use, error = history.maps[""]
    assert (use[1, 2], use[255, 255], use.sum()) == (6, 2, 8)
    assert (error[1, 2], error.sum()) == (1.0, 1.0)
    # As the module's docstring says, for readers in other languages.
    value = json.loads(json.dumps(record["usage"]))
    read = np.frombuffer(zlib.decompress(base64.b64decode(value["zlib"])), value["type"]).reshape(value["shape"])
    np.testing.assert_array_equal(read, usage)
    assert unpacked(value, (256, 255)) is None


@pytest.mark.parametrize(
    "change",
    [{"type": "<f8"}, {"type": ["<f4"]}, {"shape": [1 << 40, 1]}, {"shape": None}, {"zlib": "no base64"},
     {"zlib": "é"}, {"zlib": "AAAA"}, {"zlib": 7}, {"zlib": packed(np.zeros(100_000_000, "u1"))["zlib"]},
     {"zlib": packed(np.zeros(9, "<u4"))["zlib"]}, {"zlib": packed(np.full((256, 256), np.nan, "<f4"))["zlib"]}],
)  # fmt: skip
def test_what_is_no_map_is_left_out(change: dict[str, Any]) -> None:
    cells = packed(np.ones((256, 256), "<f4"))
    history = History(
        [{"kind": "adam_error", "step": 1, "name": "", "usage": cells | change, "error": [[1, 2, 3]]}]
    )
    assert not history.maps
    assert history.ignored == 1


def test_a_map_is_taken_with_both_of_its_halves_and_of_few_names() -> None:
    cells = packed(np.ones((256, 256), "<f4"))
    whole = {"kind": "adam_error", "step": 1, "name": "", "usage": cells, "error": cells}
    history = History([whole, whole | {"error": None}, whole | {"usage": None}])
    assert [half.sum() for half in history.maps[""]] == [65536, 65536]
    assert history.ignored == 2
    many = History(whole | {"name": f"{number}"} for number in range(99))
    assert len(many.maps) < 20
    assert many.ignored == 99 - len(many.maps)


def test_the_start_is_a_twentieth_of_the_run_and_1000_steps_at_most() -> None:
    assert [History([step(last)]).settled for last in (10, 200, 20_000, 1_000_000)] == [1, 11, 1001, 1001]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("transformer.wte.weight", True), ("model.embed_tokens.weight", True), ("visual.conv1.weight", True),
     ("bert.embeddings.word_embeddings.weight", True), ("patch_embed.proj.weight", True), ("pos_emb", True),
     ("vit.conv_proj.weight", True), ("layer1.0.conv1.weight", False), ("embeddings.LayerNorm.weight", False),
     ("embeddings.norm.weight", False), ("patch_embed.proj.bias", False), ("h.0.attn.c_attn.weight", False),
     ("member.weight", False)],
)  # fmt: skip
def test_embeddings_are_known_by_name(name: str, expected: bool) -> None:
    assert is_embedding(name) is expected


def test_blocks_are_what_repeats_with_one_number_in_the_order_of_it() -> None:
    names = ["h.10.mlp", "h.10", "h.2", "h.2.mlp", "ln_f", "h.2.experts.0", "h.2.experts.1"]
    history = History([tensor("activation", 5, name) for name in names])
    assert history.blocks() == {"h.#": ["h.2", "h.10"], "h.#.mlp": ["h.2.mlp", "h.10.mlp"]}
    assert list(History(sound()).blocks()) == ["h.#"]
    assert History(sound()).blocks()["h.#"] == list(BLOCKS)


@settings(max_examples=40)
@given(st.lists(STRANGE, max_size=30))
def test_no_record_can_make_reading_or_advice_fail(records: list[dict[str, Any]]) -> None:
    history = History(records)
    assert history.count == len(records)
    assert 0 <= history.ignored <= len(records)
    for piece in advise(history):
        assert piece.finding.endswith(".")
        assert piece.source


def test_text_that_cannot_be_shown_is_replaced_and_shapes_that_are_none_are_empty() -> None:
    header = {
        "kind": "run", "version": 1, "optimizer": "A\x1b[31m",
        "parameters": {"a\x00": [2, 3], "b\ud800": 1.5, "c": [None], "d": {"x": 1}},
    }  # fmt: skip
    history = History([header, {"kind": "update", "step": 1, "name": "a\x00", "rms": 1.0, "\ud800": 1}])
    assert history.parameters == {"a\ufffd": [2, 3], "b\ufffd": [], "c": [], "d": []}
    assert history.names("update") == ["a\ufffd"]
    assert history.fields("update", "a\ufffd") == ["rms", "\ufffd"]
    assert history.header["optimizer"] == "A\ufffd[31m"
    history.add({"kind": "spike", "step": 2, "of": "rms", "name": "a\x07"})
    assert history.alarms[0]["name"] == "a\ufffd"


def test_numbers_in_numbers_end_somewhere() -> None:
    nested: dict[str, object] = {"x": 1.0}
    for _ in range(10_000):
        nested = {"a": nested}
    history = History([{"kind": "gradient", "step": 1, "name": "w", "mean": 2.0, "formats": nested}])
    assert history.series("gradient", "mean", "w").values.tolist() == [2.0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gauges.jsonl"


def test_a_file_that_is_not_there_yet_is_waited_for(path: Path) -> None:
    reader = LiveReader(path.parent)
    assert not reader.read()
    assert not reader.exists
    path.write_text(line_of(header()))
    assert reader.read()
    assert reader.exists
    assert reader.history.header["optimizer"] == "AdamW8bit"
    assert not reader.read()


@pytest.mark.parametrize("seed", range(2))
def test_in_pieces_of_any_size_it_is_the_same_as_whole(path: Path, seed: int) -> None:
    data = "".join(map(line_of, sound(60))).encode()
    reader, generator, written = LiveReader(path), random.Random(seed), 0
    while written < len(data):
        size = generator.choice([1, 7, 100, 5000])
        with path.open("ab") as file:
            file.write(data[written : written + size])
        written += size
        reader.read()
    whole = History(read_records(path))
    assert reader.history.count == whole.count == len(sound(60))
    for kind, field in (("step", "loss"), ("update", "rms"), ("gradient", "mean")):
        for one, other in zip(reader.history.matrix(kind, field), whole.matrix(kind, field), strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(reader.history.loss, whole.loss)
    assert reader.history.damage is None


def test_half_a_line_is_no_damage_until_its_end_is_there(path: Path) -> None:
    path.write_text(line_of(header()) + '{"kind": "step", "st')
    reader = LiveReader(path)
    reader.read()
    assert (reader.history.count, reader.history.damage) == (1, None)
    with path.open("a") as file:
        file.write('ep": 1, "loss": 2.5}\n')
    assert reader.read()
    assert reader.history.loss.values.tolist() == [2.5]
    with path.open("a") as file:  # a damage ends reading, as it does for the whole file
        file.write("\0\0\0\n" + line_of(step(2)))
    assert reader.read()
    assert reader.history.damage == read_records(path).damage is not None
    assert reader.history.count == len(read_records(path)) == 2
    assert not reader.read()


def test_a_shorter_file_and_another_file_are_read_from_their_beginning(path: Path) -> None:
    path.write_text("".join(map(line_of, sound(50))))
    reader = LiveReader(path)
    reader.read()
    assert reader.history.last_step == 50
    path.write_text(line_of(header()) + line_of(step(3)))
    assert reader.read()
    assert (reader.history.last_step, reader.history.count) == (3, 2)
    other = path.with_name("other")
    other.write_text("".join(map(line_of, sound(70))))
    other.replace(path)
    assert reader.read()
    assert reader.history.last_step == 70


def test_a_file_that_goes_is_said_and_what_was_read_stays(path: Path) -> None:
    path.write_text("".join(map(line_of, sound(50))))
    reader = LiveReader(path)
    reader.read()
    path.unlink()
    assert reader.read()
    assert not reader.exists
    assert reader.history.last_step == 50
    assert not reader.read()
