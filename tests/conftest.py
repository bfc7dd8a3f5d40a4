"""What all tests share: which run here, how random the property tests are, and what of the machine they see."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import multiprocessing
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import pairwise
from forked import START
from interpreted import quicken

if not torch.cuda.is_available():
    # Kernels run in triton's interpreter, which has to be said before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    quicken()

from narrowgauge.kernels import _c_library

# The same examples on every machine and at every run, and no clock in the verdict. A search for new examples is
# one option away: --hypothesis-profile=explore.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")
if hasattr(providers, "_get_local_constants"):
    # Examples from constants of modules that happen to be loaded differ by worker, and reading them takes seconds.
    providers._get_local_constants = lambda: providers._local_constants
# Collecting makes a million objects that stay: they are not looked through for garbage, then and later. What tests
# make is looked through less often than Python does by itself, which takes a twentieth of their time.
gc.disable()

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores already; more threads in each would only wait for one another.
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--quick", action="store_true", help="run one case of each test")


def pytest_configure(config: pytest.Config) -> None:
    pairwise.EVERYTHING = _with_slow(config)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers have the environment of the process that starts them
        _isolate(config)
    _share_server(config)
    sys.addaudithook(_refuse)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


# Or nanobind finds its objects there at the end, and says so. Pytest itself looks for garbage before that.
atexit.register(gc.unfreeze)


def _isolate(config: pytest.Config) -> None:
    """Give tests a home, a locale and a cache of their own.

    The cache is one for all workers, and stays in `.pytest_cache`: of it compiled C steps are kept, which are found
    by the hash of their source, and nothing else.
    """
    home = tempfile.mkdtemp(prefix="narrowgauge-home-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    provider = getattr(config, "cache", None)
    cache = provider.mkdir("narrowgauge") if provider is not None else Path(home) / "cache"
    (cache / "narrowgauge").mkdir(parents=True, exist_ok=True)
    for path in (cache / "narrowgauge").iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".so":
            path.unlink()
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LANGUAGE", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        os.environ.pop(name, None)
    os.environ |= {
        "HOME": home, "XDG_CACHE_HOME": str(cache), "MPLCONFIGDIR": str(cache / "fonts"), "LC_ALL": "C.UTF-8",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip
    if not list((cache / "fonts").glob("fontlist*")) and importlib.util.find_spec("matplotlib"):
        subprocess.run([sys.executable, "-c", OWN_FONTS], check=True)
    _read_headers(cache / "headers")


def _read_headers(folder: Path) -> None:
    """Have gcc read the headers of compiled steps once: that is two fifths of compiling a step.

    What gcc makes of a step is the same, byte for byte. Where its flags or version are others it reads the headers.
    """
    header, read = folder / "steps.h", folder / "steps.h.gch"
    if "CC" in os.environ or shutil.which("cc") is None:
        return
    said = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in said or platform.machine() != "x86_64":
        return
    if not read.exists():
        folder.mkdir(exist_ok=True)
        header.write_text("".join(f"#include <{name}.h>\n" for name in ("math", "stdint", "string", "immintrin")))
        flags = [*_c_library._FLAGS, *_c_library._processor_flags()[0], "-x", "c-header"]
        with tempfile.TemporaryDirectory(dir=folder) as made:
            command = ["cc", *flags, str(header), "-o", f"{made}/{read.name}"]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                return
            os.replace(f"{made}/{read.name}", read)
    os.environ["CC"] = shlex.join(["cc", "-include", str(header)])


def _share_server(config: pytest.Config) -> None:
    """One server of forked processes for all workers: its imports take seconds of the processor."""
    server = forkserver._forkserver
    if START != "forkserver" or hasattr(server, "_forkserver_authkey"):
        return  # later Pythons: each worker has its own
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ.pop(SERVER, None)
        if getattr(config.option, "numprocesses", None) and not config.option.quick:
            server.ensure_running()
            os.environ[SERVER] = server._forkserver_address
    elif SERVER in os.environ:
        server._forkserver_address = os.environ[SERVER]
        # The server lives as long as the process that started it, whatever is passed on here.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        server.ensure_running = resource_tracker.ensure_running


SERVER = "NARROWGAUGE_TESTS_FORKSERVER"
# The list of fonts that matplotlib keeps, with none but its own.
OWN_FONTS = """
from matplotlib import font_manager as fonts
find = fonts.findSystemFonts
fonts.findSystemFonts = lambda folders=None, fontext="ttf": find(folders, fontext) if folders else []
fonts._load_fontmanager(try_read_cache=False)
"""
LIBRARY = sysconfig.get_path("stdlib")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse tests the network, and a walk through Python's library, which may serve as a text."""
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else "localhost"
        if host not in ("localhost", "::1") and not str(host).startswith("127."):
            raise RuntimeError(f"a test asked for {address}: tests have no network")
    elif event == "os.scandir" and isinstance(arguments[0], str | Path) and str(arguments[0]) == LIBRARY:
        raise RuntimeError("a test reads Python's library: give it a text of its own")


@pytest.fixture(scope="session")
def cache() -> Path:
    """The tests' own cache, in which compiled steps and tokens of one test are found again by the next."""
    return Path(os.environ["XDG_CACHE_HOME"])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads wait for one another in small matrices, and with one the order of sums is the same everywhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def surroundings(cache: Path) -> Iterator[None]:
    """Those of small trainings: the tests' own cache, one thread, and a terminal that is wide enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("COLUMNS", "200")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for spawned processes is given forks of the server, with its imports."""
    plain = multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: plain(START if method == "spawn" else method)
    )


# One case in two, or in four, of these runs without `--slow`: cases are products of storages, sizes and kinds of
# numbers, whose neighbors show the same.
THINNED = {
    name: share
    for share, names in {
        2: (
            "test_first_moments_in_codebooks_with_minus_one",
            "test_low_words_become_what_a_checkpoints_would_become",
            "test_states_become_what_a_checkpoint_would_become",
            "test_what_a_rule_says_a_moment_will_still_do_it_does", "test_how_far_from_fp32_states_it_ends",
            "test_a_run_is_the_one_without_and_goes_on", "test_states_of_others",
            "test_a_trace_is_what_a_real_step_takes", "test_played_is_the_long_way", "test_torchs_scaler",
            "test_every_plan_on_kernels_is_the_papers", "test_blocks_of_any_size_and_a_short_last_one",
            "test_a_rank_that_dies_in_the_middle_is_named_by_the_other", "test_every_run_is_made_once",
            "test_damaged_pairs_are_left_out_and_named_and_the_others_are_there",
            "test_a_row_is_planned_as_it_says", "test_every_row_steps_and_moves_its_bytes",
            "test_the_resumed_run_is_the_run_that_never_stopped", "test_rows_are_taken_with_what_is_kept_of_them",
            "test_chunks_of_whole_blocks", "test_zero_gradients_move_nothing_in_100_steps_without_decay",
            "test_threads_and_repetition_change_nothing",
            "test_a_resumed_run_is_bit_for_bit_the_one_that_never_stopped",
            "test_it_is_the_training_of_an_explicit_unscale", "test_what_loses_nothing_in_the_mean_stays",
            "test_a_place_that_is_wrong_is_named", "test_in_parts", "test_gauges_say_the_same", "test_storages",
            "test_stochastic_encoding_goes_up_with_exactly_the_covered_share", "test_timms_own_models",
            "test_every_interval_is_the_spacing_there", "test_what_torch_takes_gives_what_torch_gives",
            "test_tensor", "test_strict_is_algorithm_2_bit_for_bit_over_many_steps",
            "test_measuring_changes_no_bit", "test_steps_in_between_have_what_due_steps_would_have",
            "test_the_compiled_step_gives_the_eager_words", "test_a_step_is_that_of_gradients_clipped_before",
            "test_a_step_is_that_of_gradients_unscaled_before",
            "test_sums_are_those_of_float64_and_near_the_exact_ones", "test_the_folded_model_says_the_same",
            "test_the_page_of_a_codebook_accounts_for_every_value", "test_what_is_not_finite_does_not_count",
            "test_triton_has_the_bits_of_eager_torch", "test_the_command_is_the_last_that_makes_all_of_it",
            "test_compiled_as_one_graph_it_is_the_same", "test_every_storage", "test_the_multiply_is_an_operator",
            "test_quantizers_and_what_codes_stand_for_are_operators", "test_gradients_that_are_wanted",
            "test_weight_decay_arrives", "test_nothing_in_the_loop_changes", "test_bounds_of_float8_expansions",
            "test_all_ranks_have_the_same_bits", "test_saved_on_two_resumed_on_one",
            "test_blocks_of_any_size_are_the_oracles", "test_simulating_the_librarys_states_is_running_them",
            "test_edges", "test_the_sums_of_a_step", "test_every_pair_of_words_under_any_update",
            "test_many_vectors_at_once", "test_clipping_comes_after_unscaling", "test_nothing_and_one",
            "test_svg_stands_alone_and_clashes_with_no_other",
            "test_colors_follow_the_page_and_drawing_repeats_to_the_letter_and_leaves_settings_alone", "test_rows",
            "test_columns", "test_a_product_is_the_specifications", "test_it_is_the_equation_bit_for_bit",
            "test_steps_are_those_without", "test_what_cannot_be_written_is_one_line",
            "test_it_learns", "test_a_run_that_stops_goes_on_as_if_it_had_not",
            "test_steps_are_those_of_the_eager_path",
            "test_a_graph_has_kernels_and_gives_the_numbers_of_eager_ones",
            "test_gradients_of_an_earlier_batch_are_added_to", "test_a_planted_property_is_seen",
            "test_a_run_goes_on_with_another_number_of_processes",
            "test_a_compiled_model_trains_as_it_does_uncompiled",
            "test_scales_grow_and_shrink_each_by_its_own_tensor", "test_the_scale_stays_within_its_bound",
            "test_compiled_with_dynamic_shapes_averages_move_as_they_do",
            "test_8bit_states_err_as_much_as_an_exact_implementation_of_the_map",
            "test_strict_words_never_overlap_and_hold_what_one_word_loses",
            "test_a_tar_file_with_any_header_is_read_or_named",
            "test_a_terminal_that_takes_nothing_or_only_ascii_costs_no_result",
            "test_a_step_that_is_whole_is_taken_by_all_or_none", "test_steps_that_unscale_on_the_device",
            "test_a_folder_of_any_kind_is_a_model", "test_other_dtypes_and_shapes_are_other_kinds",
            "test_everything_is_escaped",
            "test_a_resumed_run_ends_where_an_uninterrupted_one_does", "test_a_row_takes_steps",
            "test_blocks_are_the_oracles_where_the_last_is_shorter",
            "test_what_was_not_recorded_is_left_out_and_said", "test_gauges_measure_the_step_that_is_taken",
            "test_a_rule_says_what_crossed_its_threshold",
        ),
        4: (
            "test_moments", "test_block_sizes", "test_training_follows_fp32_as_far_as_the_weight_storage_can",
            "test_every_state_storage_becomes_every_other", "test_every_weight_storage_becomes_every_other",
            "test_a_picture_is_drawn", "test_weights", "test_sums_are_those_of_the_eager_path",
            "test_a_png_is_an_image_of_two_panels",
        ),
    }.items()
    for name in names
}  # fmt: skip


def _with_slow(config: pytest.Config) -> bool:
    return bool(config.getoption("--slow")) or "slow" in config.getoption("markexpr")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        kept: dict[str, pytest.Item] = {}
        for item in items:
            if not (item.get_closest_marker("slow") or item.get_closest_marker("gpu")):
                kept.setdefault(item.nodeid.partition("[")[0], item)
        chosen = set(map(id, kept.values()))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = kept.values()
    begun: set[str] = set()
    for item in items:
        name = item.nodeid.partition("[")[0]
        share = THINNED.get(name.rpartition("::")[2], 1)
        # By a hash: the order of cases alternates between the values of a parameter. The first one always runs.
        if name in begun and zlib.crc32(item.nodeid.encode()) % share:
            item.add_marker(pytest.mark.slow)
        begun.add(name)
    no_slow = pytest.mark.skip(reason="slow: takes minutes; run with --slow or -m slow")
    no_gpu = pytest.mark.skip(reason="gpu: needs a CUDA device, torch sees none")
    with_gpu: bool | None = None  # asked of the driver only if a test wants to know
    for item in items:
        if item.get_closest_marker("slow") and not _with_slow(config):
            item.add_marker(no_slow)
        if item.get_closest_marker("gpu"):
            with_gpu = torch.cuda.is_available() if with_gpu is None else with_gpu
            if not with_gpu:
                item.add_marker(no_gpu)
