"""Alarms while the training runs: spikes, inf and NaN, skipped steps, and tensors all of whose updates are lost.

An alarm is raised when its measurement has arrived on the host, at one of the next steps. It is a record, a line in
the log ``narrowgauge.gauges``, and a call of the user's function.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

from narrowgauge._update_sums import Longest
from narrowgauge.gauges._history import STOCHASTIC, storages_by_slot
from narrowgauge.gauges._records import LOG, Record
from narrowgauge.gauges._rules import ALL_LOST, MIN_MEASUREMENTS, SKIPPED
from narrowgauge.gauges._spikes import LossSpikes, RmsSpikes, Spike

MOST_LOGGED = 5  # tensors of a kind that are logged by name: when a training diverges all have inf or NaN


class Alarms:
    """Raises alarms by records.

    Args:
        call: is called with each alarm's record, or None.
        warmup: steps that are not searched for spikes.
    """

    def __init__(self, call: Callable[[Record], None] | None, warmup: int) -> None:
        self._call, self._warmup = call, warmup
        self._loss = LossSpikes(warmup=warmup)
        self._rms: dict[str, RmsSpikes] = {}
        self._once: set[tuple[str, str]] = set()
        self._lost: Counter[str] = Counter()
        self._longest = Longest()
        self._random: set[str] = set()
        self._logged: Counter[str] = Counter()
        self._raised: deque[Record] = deque()

    def begin(self, header: Record) -> None:
        """Take in a run's first record. Weights that are rounded stochastically may lose every update of a step."""
        kept = storages_by_slot(header)
        self._random = {name for name, own in kept.items() if own.get("weights") == STOCHASTIC}

    def notify(self) -> None:
        """Call the user's function with the alarms raised since."""
        while self._raised:
            alarm = self._raised.popleft()
            if self._call is not None:
                self._call(alarm)

    def raised_by(self, record: Record) -> list[Record]:
        """The alarms that a record raises. They are logged, and wait for `notify`."""
        found = self._found(record)
        for alarm in found:
            self._log(alarm)
            self._raised.append(alarm)
        return found

    def replay(self, records: Iterable[Record]) -> None:
        """Take in the records of a run that is resumed, without raising their alarms again."""
        for record in records:
            if "step" in record:
                self._found(record)

    def _log(self, alarm: Record) -> None:
        of = alarm["of"]
        if alarm["kind"] in ("nonfinite", "lost"):
            self._logged[of] += 1
            if self._logged[of] > MOST_LOGGED + 1:
                return
            if self._logged[of] == MOST_LOGGED + 1:
                more = f"inf or NaN in {of.replace('_', ' ')}s of more tensors"
                if alarm["kind"] == "lost":
                    more = "every update of more tensors is lost"
                LOG.warning(f"step {alarm['step']}: {more}: see the records")
                return
        LOG.warning(sentence(alarm))

    def _found(self, record: Record) -> list[Record]:
        kind, step, name = record["kind"], record["step"], record.get("name", "")
        found: list[Record] = []
        if kind == "storages":
            for changed, own in record["parameters"].items():
                self._lost.pop(changed, None)
                self._once.discard(("lost", changed))
                (self._random.add if own.get("weights") == STOCHASTIC else self._random.discard)(changed)
        if kind == "skips":
            found.append({**record, "kind": "nonfinite", "of": SKIPPED, "name": ""})
        if kind == "step" and record["loss"] is not None:
            found += self._spike(self._loss.add(record["loss"], step), "loss", "")
            if math.isfinite(record["loss"]):
                self._once.discard(("step", ""))
            elif self._first("step", ""):
                found.append({"kind": "nonfinite", "step": step, "of": "loss", "name": "", "value": record["loss"]})
        ratios = record.get("rms", {}) if kind == "step" else {}
        if kind == "update" and name and "rms" in record:
            ratios = {name: record["rms"]}
        for each, ratio in ratios.items():
            watch = self._rms.setdefault(each, RmsSpikes(warmup=self._warmup))
            found += self._spike(watch.add(ratio, step), "rms", each)
        if kind == "update" and name and name not in self._random:
            short = self._longest.is_short(name, record["norm"])
            lost = record.get("lost", 0.0) >= ALL_LOST and not short
            self._lost[name] = self._lost[name] + 1 if lost else 0
            if self._lost[name] >= MIN_MEASUREMENTS and self._first("lost", name):
                values = {"value": record["lost"], "threshold": ALL_LOST}
                found.append({"kind": "lost", "step": step, "of": "lost updates", "name": name, **values})
        if record.get("nonfinite") and self._first(kind, name):
            found.append(
                {"kind": "nonfinite", "step": step, "of": kind, "name": name, "value": record["nonfinite"]}
            )
        return found

    def _first(self, kind: str, name: str) -> bool:
        """Whether an alarm that is raised once a tensor has not been raised yet."""
        new = (kind, name) not in self._once
        self._once.add((kind, name))
        return new

    @staticmethod
    def _spike(spike: Spike | None, of: str, name: str) -> list[Record]:
        if spike is None:
            return []
        values = {"value": spike.value, "threshold": spike.threshold, "seen": spike.seen}
        return [{"kind": "spike", "step": spike.step, "of": of, "name": name, **values}]


def sentence(alarm: Record) -> str:
    """An alarm as the log has it."""
    step, name, value = alarm["step"], alarm["name"], alarm["value"]
    if alarm["of"] == SKIPPED:
        skipped = f"the scaler skipped {value} steps in a row, with inf or NaN in the gradients"
        return f"after {alarm['taken']} steps: {skipped}"
    if (alarm["kind"], alarm["of"]) == ("nonfinite", "loss"):
        return f"step {step}: the loss is {value}"
    if alarm["kind"] == "nonfinite":
        return f"step {step}: {value} elements of the {alarm['of'].replace('_', ' ')} of {name} are inf or NaN"
    if alarm["kind"] == "lost":
        lost = f"step {step}: every update of {name} is lost, as in the two measurements before"
        return f"{lost}; see narrowgauge.gauges.advise(watch.rows())"
    if alarm["of"] == "loss":
        return f"step {step}: loss spike, {value:.4g} is above {alarm['threshold']:.4g}"
    return f"step {step}: RMS spike of {name}, {value:.3g} is at least {alarm['threshold']:.3g}"
