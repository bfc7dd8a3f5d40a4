"""The hook itself: which parameters it has seen, what it remembers, and a bucket's way through it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed._compressed_describe import SentRow, SentTable
from narrowgauge.distributed._compressed_fused import passes_of, path_of
from narrowgauge.distributed._compressed_layout import Layout, Told
from narrowgauge.distributed._compressed_memory import Memory
from narrowgauge.distributed._compressed_passes import Task
from narrowgauge.distributed._compressed_round import reduction
from narrowgauge.distributed._compressed_wire import Wire
from narrowgauge.kernels._beside import Beside

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

_COMPRESSED = (torch.float32, torch.bfloat16, torch.float16)
Exempt = Callable[[Tensor], bool]
_Waiting = tuple[Iterator[None], torch.futures.Future[Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """What is the same at every step of a bucket.

    Attributes:
        parameters: in it.
        dtype: of their gradients.
        layout: of them.
        nbytes: that a rank sends.
    """

    parameters: list[Tensor]
    dtype: torch.dtype
    layout: Layout
    nbytes: int

    def is_of(self, parameters: list[Tensor], dtype: torch.dtype, ranks: int) -> bool:
        """Whether it is the plan of these very parameters."""
        mine = self.parameters
        alike = self.dtype == dtype and self.layout.ranks == ranks and len(mine) == len(parameters)
        return alike and all(map(is_, mine, parameters))


class CompressedAllReduce:
    """The hook that `compressed_allreduce_hook` makes.

    It is what ``register_comm_hook`` takes as `hook`; unpacked it is both of the arguments, the first being
    None. Its state is its own: `state_dict` and `load_state_dict` put it into a checkpoint and back.

    Attributes:
        step: how many times all buckets were reduced.
        bytes_sent: of the last complete step, by this rank. For what is compressed they are counted from its
            messages; an all-reduce of n bytes is counted as a ring's, 2 (ranks - 1) / ranks n.

    Sources: 1-bit SGD (Seide et al., 2014), EF-SGD (Karimireddy et al., 2019), 1-bit Adam (Tang et al., 2021)
    for error feedback and its two hops; block-wise codes as in 8-bit Optimizers via Block-wise Quantization.
    """

    def __init__(
        self,
        name: str,
        wire: Wire,
        memory: Memory | None,
        exempt: Exempt,
        min_compressed_size: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._name, self._wire, self._memory, self._group = name, wire, memory, process_group
        self._exempt, self._min_size = exempt, min_compressed_size
        self.step = self.bytes_sent = 0
        self._keys: dict[Tensor, str] = {}  # of all parameters
        self._sizes: dict[str, int] = {}  # of those that are compressed
        self._counts: dict[torch.dtype, int] = {}
        self._complete = False  # whether all parameters have been seen
        self._plans: dict[int, Plan] = {}  # by the bucket's index; when buckets are built anew, so are these
        self._sending = 0
        self._pending: list[_Waiting] = []
        self._sides: dict[torch.device, Beside] = Told()
        # DistributedDataParallel asks for these, as of a function, and takes no annotations that are strings.
        self.__name__ = self.__qualname__ = "compressed_allreduce_hook"
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in ("state", "bucket")])

    def __iter__(self) -> Iterator[Any]:
        """The two arguments of ``register_comm_hook``."""
        return iter((None, self))

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket's gradients over ranks.

        Args:
            state: None; what is remembered is the hook's own.
            bucket: of gradients, as DistributedDataParallel hands it over.

        Returns:
            A future of the bucket's buffer, in which the averages will be. On a GPU all is launched at once, on
            a stream of the hook's own. On a CPU a bucket's sums are sent when the next bucket comes, and the
            last one waits for all: ranks issue collectives in one order, and no thread issues them beside.
        """
        if state is not None:
            raise ValueError(f"state: got {state!r}, takes None; a process group goes to compressed_allreduce_hook")
        buffer, last = bucket.buffer(), bucket.is_last()
        if buffer.layout is not torch.strided:
            raise ValueError(f"bucket: got gradients of layout {buffer.layout}, takes dense ones")
        ranks = dist.get_world_size(self._group)
        index = bucket.index()
        if index == 0:
            # What is left of a backward pass that was not finished has no effect.
            self._pending, self._sending = [], 0
        plan = self._plan(index, bucket.parameters(), buffer.dtype, ranks)
        self._sending += plan.nbytes
        step = self.step
        if last:
            self.step, self.bytes_sent, self._complete = step + 1, self._sending, True
        if ranks == 1:
            return _done(buffer)
        task = Task(self._wire, plan.layout, self._memory, buffer, dist.get_rank(self._group), step)
        stages = reduction(passes_of(task), plan.layout, buffer, self._group)
        return self._launch(stages, buffer) if buffer.is_cuda else self._queue(stages, buffer, last)

    def error(self, parameter: Tensor) -> Tensor | None:
        """What this rank remembers of a parameter.

        Returns:
            A tensor (numel,) of `memory_dtype`, in the order in which the gradient lies in memory and in its
            unit: what this rank's gradients have lost in all, and, for the shard that this rank sums, the sums.
            None if nothing is remembered: for a parameter that is exempt or unknown, without error feedback,
            before the first step.
        """
        key = self._keys.get(parameter)
        return None if self._memory is None or key is None else self._memory.get(key)

    def memory_bytes(self) -> int:
        """Bytes of this rank's error feedback."""
        return 0 if self._memory is None else self._memory.nbytes

    def describe(self) -> SentTable:
        """What is done with each parameter that has been seen, in the order of their buckets: a table that prints.

        Returns:
            The table. A path is ``"fused Triton"``, ``"fused C"``, ``"eager torch"`` (then it is said why), or
            ``"all-reduce"`` for what is exempt; ``"none"`` with one rank.
        """
        return SentTable(tuple(self._row(parameter, key) for parameter, key in self._keys.items()))

    def _row(self, parameter: Tensor, key: str) -> SentRow:
        wire, dtype = self._wire, parameter.dtype
        sent, path, why = str(dtype).removeprefix("torch."), "all-reduce", "exempt"
        if key in self._sizes:
            sent = f"{self._name}, {wire.bits} bits, blocks of {wire.block_size}, {wire.rounding}"
            path, why = path_of(wire, self._memory, dtype, parameter.device)
        elif dist.get_world_size(self._group) == 1:
            path, why = "none", "one rank"
        error = None if self._memory is None else self._memory.get(key)
        memory = 0 if error is None else error.nbytes
        return SentRow(key, tuple(parameter.shape), str(dtype).removeprefix("torch."), sent, memory, path, why)

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's errors: of each rank another one, so each rank has to keep its own.

        Returns:
            ``{"step": int, "ranks": int, "memory": {"rank/parameter": tensor}}``. Names of parameters are their
            dtype and their place counted from the model's end. The `memory` of several ranks has no name in
            common and may be merged into one dictionary.
        """
        memory = {} if self._memory is None else self._memory.state(dist.get_rank(self._group))
        return {"step": self.step, "ranks": dist.get_world_size(self._group), "memory": memory}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Args:
            state_dict: of this rank; or with the merged `memory` of all ranks, and then of any number of them: each
                rank takes the sums of some. With an empty `memory` it begins anew, which loses one step's rounding.

        Raises:
            ValueError: for a state that is none, that lacks what this rank takes, or of errors that a hook without
                error feedback would drop. That errors are another model's is seen at the next step.
        """
        wanted = ("step", "ranks", "memory")
        if not isinstance(state_dict, Mapping) or any(name not in state_dict for name in wanted):
            raise ValueError(
                f"state_dict: got {state_dict!r:.100}, takes a dictionary of 'step', 'ranks' and 'memory'"
            )
        step, saved, memory = (state_dict[name] for name in wanted)
        for name, number, least in (("step", step, 0), ("ranks", saved, 1)):
            if not is_integer(number) or not least <= number < 2**63:
                raise ValueError(f"state_dict: got {number!r} for {name!r}, takes an integer of at least {least}")
        if not isinstance(memory, Mapping):
            raise ValueError(f"state_dict: got {memory!r:.100} for 'memory', takes a dictionary")
        if self._memory is not None:
            self._memory.load(memory, saved, dist.get_rank(self._group), dist.get_world_size(self._group))
        elif memory:
            raise ValueError("state_dict: got a memory, takes an empty one: this hook has error_feedback=False")
        self.step = step

    def __repr__(self) -> str:
        compressed, wire = len(self._sizes), self._wire
        return (
            f"CompressedAllReduce(codebook={self._name!r}, bits={wire.bits}, block_size={wire.block_size}, "
            f"rounding={wire.rounding!r}, error_feedback={self._memory is not None}, step={self.step}; "
            f"{compressed} parameters compressed ({sum(self._sizes.values()):,} elements), "
            f"{len(self._keys) - compressed} exempt; memory {self.memory_bytes():,} bytes, "
            f"sent {self.bytes_sent:,} bytes a step)"
        )

    def _launch(self, stages: Iterator[None], buffer: Tensor) -> torch.futures.Future[Tensor]:
        """All stages on a stream beside that of the backward pass, which goes on."""
        device = buffer.device
        # Nothing waits for the side as a whole: futures do, for a bucket each.
        with torch.cuda.device(device):
            if device not in self._sides:
                self._sides[device] = Beside(device, own=True)
            with self._sides[device]:
                for _ in stages:
                    pass
                return _done(buffer)

    def _queue(self, stages: Iterator[None], buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        """The first stage now, the next ones of those before at this call and at later ones; all at the last."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        next(stages)
        self._pending = [*_advanced(self._pending), (stages, future, buffer)]
        while last and self._pending:
            self._pending = _advanced(self._pending)
        return future

    def _plan(self, index: int, parameters: list[Tensor], dtype: torch.dtype, ranks: int) -> Plan:
        """The plan of a bucket, made when it is first seen."""
        plan = self._plans.get(index)
        if plan is None or not plan.is_of(parameters, dtype, ranks):
            layout = self._layout(parameters, dtype, ranks)
            plan = self._plans[index] = Plan(parameters, dtype, layout, self._bytes(layout, dtype.itemsize))
        return plan

    def _layout(self, parameters: list[Tensor], dtype: torch.dtype, ranks: int) -> Layout:
        """The layout of parameters, which are given names if they are new."""
        # Buckets come from the model's end, and those of the first step hold parameters in the model's order:
        # counted backwards, a parameter has the same number whatever the size of the buckets.
        for parameter in reversed(parameters):
            if parameter not in self._keys:
                if self._complete:
                    raise ValueError(
                        "bucket: holds a parameter that is new; takes one DistributedDataParallel a hook"
                    )
                number = self._counts[dtype] = self._counts.get(dtype, -1) + 1
                key = self._keys[parameter] = f"{str(dtype).removeprefix('torch.')}.{number}"
                small = parameter.numel() < max(1, self._min_size)
                if dtype in _COMPRESSED and ranks > 1 and not small and not self._exempt(parameter):
                    self._sizes[key] = parameter.numel()
        keys = [self._keys[parameter] for parameter in parameters]
        sizes, exempt = [parameter.numel() for parameter in parameters], [key not in self._sizes for key in keys]
        return Layout.of(keys, sizes, exempt, ranks, self._wire.block_size)

    def _bytes(self, layout: Layout, itemsize: int) -> int:
        """What a rank sends for a bucket."""
        others = layout.ranks - 1
        exempt = sum(piece.numel for piece in layout.exempt) * itemsize
        return 2 * others * self._wire.nbytes(layout.width) + 2 * others * exempt // layout.ranks


def _advanced(waiting: list[_Waiting]) -> list[_Waiting]:
    """Those that are not done after one more stage each."""
    left = []
    for stages, future, buffer in waiting:
        try:
            next(stages)
            left.append((stages, future, buffer))
        except StopIteration:
            future.set_result(buffer)
    return left


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds a buffer; whoever waits for it waits for what the current stream has queued."""
    devices: Any = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def is_integer(number: object) -> bool:
    """Whether it is an integer and no truth value."""
    return isinstance(number, int) and not isinstance(number, bool)
