# ruff: noqa: E501
"""What `load_state_dict` is given: it loads, and goes on, or an error says what is wrong and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from damage import tried
from saved_states import SUBJECTS, Case, Subject, all_cases, some, spoil, whole

from narrowgauge.optim._engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hooks ask for their process group."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "backends", ())  # states are the same, and nothing is compiled
        yield
    dist.destroy_process_group()


class Tried:
    """One subject, made anew where a state has changed it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._anew()

    def _anew(self) -> None:
        self._made = self._subject.made()
        self._before = whole(self._made)

    def complaint(self, given: Any) -> str | None:
        """What is wrong with how it takes a state; None if it loads it, or refuses it as it should."""
        try:
            self._made.load_state_dict(given)
        except (ValueError, TypeError, RuntimeError) as error:
            return self._refused(str(error))
        except Exception as error:
            self._anew()
            return f"{type(error).__name__}: {str(error)[:150]}"
        try:
            self._subject.used(self._made)
            self._made.state_dict()
        except Exception as error:
            return f"loaded, then {type(error).__name__}: {str(error)[:150]}"
        finally:
            self._anew()
        return None

    def _refused(self, said: str) -> str | None:
        # torch has its words for groups of other sizes, and for the state of a scaler that is off.
        if not any(words in said for words in ("state_dict", "state dict")):
            return f"unnamed: {said[:150]}"
        try:
            unchanged = whole(self._made) == self._before
        except Exception as error:
            self._anew()
            return f"refused, and broken: {type(error).__name__}: {str(error)[:150]}"
        if not unchanged:
            self._anew()
            return f"refused, and changed: {said[:150]}"
        return None


def complaints(name: str, pick: Callable[[list[Case]], list[Case]]) -> list[str]:
    subject = SUBJECTS[name]
    one, found = Tried(subject), []
    for number, state in enumerate([subject.made().state_dict(), *subject.others()]):
        for case in pick(all_cases(subject, state)):
            why = one.complaint(spoil(copy.deepcopy(state), case))
            if why is not None:
                found.append(f"state {number}, {'.'.join(map(str, case[1] or ('itself',)))} {case[0]}: {why}")
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_states_as_they_are_load(name: str) -> None:
    subject = SUBJECTS[name]
    for state in [subject.made().state_dict(), *subject.others()]:
        made = subject.made()
        made.load_state_dict(copy.deepcopy(state))
        subject.used(made)


@tried(30, 10**6)
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_place_that_is_wrong_is_named(name: str, tries: int) -> None:
    found = complaints(name, lambda cases: some(cases, tries, seed=len(name)))
    assert not found, "\n" + "\n".join(found)


# What was not refused, or not in words, by subject: the place, and what was there.
FOUND: dict[str, list[tuple[str, str]]] = {
    "AdamW": [
        ("param_groups.0.params.0", "empty list"), ("param_groups.0.params.1", "scalar"),
        ("param_groups.0.param_names.0", "list of dicts"), ("param_groups.0.clip_updates", "empty"),
        ("param_groups.0.state_version", "tensor"), ("param_groups.0.betas.0", "a number in meta"),
        ("param_groups.0.lr", "a number in meta"), ("param_groups.0.amsgrad", "sparse"), ("state.0.step", "by 7"),
        ("state.0.step", "10^30"), ("state.0.step", "complex"), ("state.0.step", "sparse"), ("state.0.m", "sparse"),
        ("state.0.step", "bools"), ("state.0.exp_avg", "by None"), ("state.0.exp_avg", "ints"),
        ("state.1.state1", "zero"), ("state.1.qmap1", "None"), ("state.1.qmap1", "shorter"),
        ("state.1.qmap2", "of nan"), ("state.1.absmax1", "list"),
    ],
    "StableAdamW": [("param_groups.0.eps", "a count beyond")],
    "SGD": [("param_groups.0.dampening", "nan")],
    "Muon": [("state.0.step", "a count beyond")],
    "QuantizedGradients of AdamW8bit": [
        ("param_groups.0.gradients_quantized", "2^63"), ("param_groups.0.gradients_quantized", "dropped"),
        ("state.0.gradient_residual", "of nan"), ("state.0.gradient_residual", "ints"),
        ("state.0.gradient_residual", "sparse"), ("state.0.gradient_residual", "None"),
    ],
    "CPUOffload": [("itself", "None"), ("itself", "bytes"), ("itself", "scalar")],
    "DynamicLossScaler": [
        ("scale", "10^30"), ("_growth_tracker", "2^63"), ("_growth_tracker", "1.5"), ("growth_interval", "1.5"),
        ("growth_interval", "2^63"), ("backoff_factor", "minus one"), ("skipped", "None"), ("skipped", "dict of dicts"),
        ("skipped_steps", "nan"), ("skipped_steps", "a negative tensor"), ("skipped_steps", "list"),
    ],
    "StaticLossScaler": [("skipped", "scalar"), ("skipped_steps", "minus one")],
    # So many ranks were written down in a list.
    "hook with error feedback": [("ranks", "2^63"), ("ranks", "10^30"), ("step", "10^400"),
                                 ("memory.0/float32.0", "of nan"), ("memory.0/float32.0", "meta"),
                                 ("memory.0/float32.0", "sparse")],
    "hook": [("itself", "scalar"), ("itself", "a NaN of numpy")],
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    wanted, seen = set(FOUND[name]), set()

    def pick(cases: list[Case]) -> list[Case]:
        known = [(".".join(map(str, case[1] or ("itself",))), case[0]) for case in cases]
        seen.update(known)
        return [case for case, at in zip(cases, known, strict=True) if at in wanted]

    assert complaints(name, pick) == []
    assert wanted <= seen, wanted - seen


@pytest.mark.parametrize("name", SUBJECTS)
def test_states_of_others(name: str) -> None:
    """Those of every other subject."""
    one, found = Tried(SUBJECTS[name]), {}
    # torch's own optimizers look at no group; what ours wrote there is theirs to take.
    kept = {
        other: subject
        for other, subject in SUBJECTS.items()
        if not SUBJECTS[name].theirs or "of AdamW" not in other
    }
    given = {other: subject.made().state_dict() for other, subject in kept.items()}
    for other, state in given.items():
        why = one.complaint(copy.deepcopy(state))
        if why is not None:
            found[other] = why
    assert not found
