"""What should be heard of while the training still runs: spikes, and numbers that are none.

Alarms come when the measurements have arrived on the host, at one of the next steps. Each is a record, a line in
the log ``narrowgauge.gauges``, and a call of whoever asked for them. A thread of their own looks at records, and
calls are made by the loop's (`call_out`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from narrowgauge.gauges._records import LOG, Record
from narrowgauge.gauges._spikes import LossSpikes, RmsSpikes, Spike

LOUD = 5  # tensors of a kind whose inf and NaN are logged by name: a training that diverges has them in all


class Alarms:
    """Looks at records as they are made.

    Args:
        call: what is called with each alarm's record, or None.
        warmup: steps that are not judged for spikes.
    """

    def __init__(self, call: Callable[[Record], None] | None, warmup: int) -> None:
        self._call, self._warmup = call, warmup
        self._loss = LossSpikes(warmup=warmup)
        self._rms: dict[str, RmsSpikes] = {}
        self._bad: set[tuple[str, str]] = set()
        self._loud: Counter[str] = Counter()
        self._raised: deque[Record] = deque()

    def call_out(self) -> None:
        """Call whoever asked with the alarms that were raised since."""
        while self._raised:
            alarm = self._raised.popleft()
            if self._call is not None:
                self._call(alarm)

    def of(self, record: Record) -> list[Record]:
        """The alarms that a record raises; they have been logged, and wait to be called out."""
        found = self._found(record)
        for alarm in found:
            self._log(alarm)
            self._raised.append(alarm)
        return found

    def _log(self, alarm: Record) -> None:
        of = alarm["of"]
        if alarm["kind"] == "nonfinite":
            self._loud[of] += 1
            if self._loud[of] > LOUD + 1:
                return
            if self._loud[of] == LOUD + 1:
                LOG.warning(
                    f"step {alarm['step']}: {of.replace('_', ' ')} of other tensors: inf or NaN, as recorded"
                )
                return
        LOG.warning(said(alarm))

    def recall(self, records: Iterable[Record]) -> None:
        """Know what was measured before a run went on; its alarms were raised then."""
        for record in records:
            if "step" in record:
                self._found(record)

    def _found(self, record: Record) -> list[Record]:
        kind, step, name = record["kind"], record["step"], record.get("name", "")
        found: list[Record] = []
        if kind == "step" and record["loss"] is not None:
            found += self._spike(self._loss.add(record["loss"], step), "loss", "")
        ratios = record.get("rms", {}) if kind == "step" else {}
        if kind == "update" and name and "rms" in record:
            ratios = {name: record["rms"]}
        for each, ratio in ratios.items():
            watch = self._rms.setdefault(each, RmsSpikes(warmup=self._warmup))
            found += self._spike(watch.add(ratio, step), "rms", each)
        if record.get("nonfinite") and (kind, name) not in self._bad:
            self._bad.add((kind, name))  # once: a tensor that has them usually has them again
            found.append(
                {"kind": "nonfinite", "step": step, "of": kind, "name": name, "value": record["nonfinite"]}
            )
        return found

    @staticmethod
    def _spike(spike: Spike | None, of: str, name: str) -> list[Record]:
        if spike is None:
            return []
        values = {"value": spike.value, "threshold": spike.threshold, "seen": spike.seen}
        return [{"kind": "spike", "step": spike.step, "of": of, "name": name, **values}]


def said(alarm: Record) -> str:
    """An alarm in words."""
    step, name, value = alarm["step"], alarm["name"], alarm["value"]
    if alarm["kind"] == "nonfinite":
        return f"step {step}: {alarm['of'].replace('_', ' ')} of {name}: {value} elements are inf or NaN"
    if alarm["of"] == "loss":
        return f"step {step}: loss spike, {value:.4g} where {alarm['threshold']:.4g} is the limit"
    return f"step {step}: RMS spike of {name}, {value:.3g} where {alarm['threshold']:.3g} is the limit"
