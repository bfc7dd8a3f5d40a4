"""Compressed gradients: a communication hook for DistributedDataParallel that sends codes.

An all-reduce is a reduce-scatter (every rank sums one shard) and an all-gather (every rank gets the sums). In bf16
each element travels twice in two bytes; here it travels twice in one byte or half a byte, plus a scale a block.
Codes go to the rank that sums them, are decoded and added in float32, and the sum is encoded again for the way
back, so both hops are narrow whatever the number of ranks.

Rounding codes to nearest is biased: an element far below its block's largest is rounded to zero at every step and
is never learned. There are two remedies, each an argument. Stochastic rounding makes the expected gradient the true
one and adds noise. Error feedback remembers what was lost and adds it to the next gradient, for one number an
element.

See `_compressed_passes` for the equation and the bytes, and `_compressed_layout` for which rank sums what.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge._arguments import Count, Size, check, check_choice
from narrowgauge.distributed._compressed_layout import ErrorFeedback, Layout, ScratchDict
from narrowgauge.distributed._compressed_passes import AllreducePasses, BlockCodec, Reduction, passes_of, path_of
from narrowgauge.formats import codebook as named_codebook
from narrowgauge.formats._codebooks import checked, known
from narrowgauge.formats._rounding import Rounding
from narrowgauge.kernels._allreduce_key import GRADIENTS
from narrowgauge.optim._describe import as_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Exempt = Callable[[Tensor], bool]
_Pending = tuple[Iterator[None], torch.futures.Future[Tensor], Tensor]


def compressed_allreduce_hook(
    codebook: str | Tensor = "dynamic",
    error_feedback: bool = True,
    rounding: Rounding = "nearest",
    *,
    bits: int | None = None,
    block_size: int = 256,
    min_compressed_size: int = 4096,
    exempt: Exempt | None = None,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    memory_dtype: torch.dtype = torch.float32,
) -> CompressedAllReduce:
    """A communication hook that averages gradients over ranks by way of block-wise codes.

    Register it before the first backward pass, one hook for each DistributedDataParallel, with the same
    arguments on all ranks. Two ways to type the same thing::

        ddp.register_comm_hook(*compressed_allreduce_hook())
        ddp.register_comm_hook(state=None, hook=compressed_allreduce_hook())

    Args:
        codebook: what codes mean, by name (see `formats.codebook_names`; ``"linear"`` is int8), or ascending
            values such as ``formats.codebook("dynamic", bits=4)``. With at most 16 values a code takes half a byte
            on the wire, else one.
        error_feedback: whether each rank remembers what its messages lost, and adds it to its next gradients.
        rounding: ``"nearest"``, or ``"stochastic"``: unbiased with codebooks that have a -1 (``"linear"``). The
            dynamic map has none; what lies below its first value (mirrored where a block's extremum is negative)
            is rounded to that value.
        bits: width of the named codebook, 8 if None; it must be None beside values.
        block_size: elements that share a scale, along each parameter; a multiple of 4.
        min_compressed_size: parameters with fewer elements are exempt: all-reduced as they are, in their own dtype.
        exempt: a function that says of a parameter whether it is exempt as well; if None, those of one dimension
            or none are (norms and biases).
        process_group: that of the DistributedDataParallel; the default group if None.
        seed: of stochastic rounding.
        memory_dtype: of error feedback: float32, or bfloat16 for half of the bytes (its rounding is lost).

    Returns:
        The hook.

    Raises:
        ValueError: for a value that is not allowed, by name.

    Gradients are those of float32, bfloat16 and float16; of other dtypes they are exempt. All ranks get the
    same bits. With one rank nothing is compressed. A block that holds an infinity or NaN on any rank comes back
    as NaN on all, so that optimizers and scalers that skip such steps do so.

    Source: see `CompressedAllReduce`.
    """
    values = _values(codebook, bits)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    if block_size < 4 or block_size % 4:
        raise ValueError(f"block_size must be a multiple of 4, got {block_size!r}")
    for name, number in (("min_compressed_size", min_compressed_size), ("seed", seed)):
        if number < 0:
            raise ValueError(f"{name} must be at least 0, got {number!r}")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group must be one that this rank is in, or None, got {process_group!r}")
    check_choice("memory_dtype", memory_dtype, (torch.float32, torch.bfloat16))
    codec = BlockCodec(values, block_size, rounding, seed)
    feedback = ErrorFeedback(memory_dtype) if error_feedback else None
    name = codebook if isinstance(codebook, str) else f"{len(values)} values"
    return CompressedAllReduce(name, codec, feedback, exempt or _is_vector, min_compressed_size, process_group)


def _values(codebook: str | Tensor, bits: int | None) -> Tensor:
    """The values of the argument `codebook`, checked, on the host."""
    if isinstance(codebook, str):
        return named_codebook(known(codebook), signed=True, bits=8 if bits is None else bits)
    if bits is not None:
        raise ValueError(f"bits must be None beside a codebook of values, got {bits!r}")
    values = checked(codebook.detach()).cpu()
    if values[0] >= 0:
        raise ValueError("codebook must be signed, got no negative value")
    return values


def _is_vector(parameter: Tensor) -> bool:
    return parameter.dim() <= 1


@dataclass(frozen=True)
class BucketPlan:
    """What is the same at every step of a bucket; `nbytes` is what a rank sends."""

    parameters: list[Tensor]
    dtype: torch.dtype
    layout: Layout
    nbytes: int

    def matches(self, parameters: list[Tensor], dtype: torch.dtype, ranks: int) -> bool:
        """Whether it is the plan of these very parameters."""
        mine = self.parameters
        alike = self.dtype == dtype and self.layout.ranks == ranks and len(mine) == len(parameters)
        return alike and all(map(is_, mine, parameters))


class Beside:
    """Within, work goes to a stream beside the current one, after what was launched before.

    Torch's own `wait_stream` makes an event each time, which costs the host more than using one again.

    Args:
        device: a CUDA device, the current one within.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._main: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        self._main = torch.cuda.current_stream()
        self._before.record(self._main)
        self._before.wait(self._stream)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        assert self._main is not None
        torch.cuda.set_stream(self._main)


class CompressedRow(NamedTuple):
    """One parameter: the hook's name for it, shape, dtype, how its gradient travels, bytes of error feedback on
    this rank, the path, and why no faster path or why it is exempt."""

    parameter: str
    shape: str
    dtype: str
    sent: str
    memory: int
    path: str
    why: str


@dataclass(frozen=True)
class CompressedTable:
    """A table of rows that prints as text."""

    rows: tuple[CompressedRow, ...]

    def __str__(self) -> str:
        cells = ((*row[:4], f"{row.memory:,}", *row[5:]) for row in self.rows)
        return as_text(CompressedRow._fields, cells)


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
        codec: BlockCodec,
        feedback: ErrorFeedback | None,
        exempt: Exempt,
        min_compressed_size: int,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._name, self._codec, self._feedback, self._group = name, codec, feedback, process_group
        self._exempt, self._min_size = exempt, min_compressed_size
        self.step = self.bytes_sent = 0
        self._keys: dict[Tensor, str] = {}  # of all parameters
        self._sizes: dict[str, int] = {}  # of compressed parameters
        self._counts: dict[torch.dtype, int] = {}
        self._complete = False  # whether all parameters have been seen
        self._plans: dict[int, BucketPlan] = {}  # by the bucket's index
        self._sending = 0
        self._pending: list[_Pending] = []
        self._sides: dict[torch.device, Beside] = ScratchDict()
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
            state: None; the hook keeps its own.
            bucket: of gradients, as DistributedDataParallel passes it.

        Returns:
            A future of the bucket's buffer, in which the averages will be. On a GPU everything is launched at once,
            on a stream of the hook's own. On a CPU a bucket's sums are sent when the next bucket comes, and the
            last one waits for all: ranks issue collectives in one order, and no thread issues them beside.
        """
        if state is not None:
            raise ValueError(
                f"state must be None, got {state!r}; pass a process group to compressed_allreduce_hook"
            )
        buffer, last = bucket.buffer(), bucket.is_last()
        if buffer.layout is not torch.strided:
            raise ValueError(f"bucket: gradients must be dense, got layout {buffer.layout}")
        ranks = dist.get_world_size(self._group)
        index = bucket.index()
        if index == 0:  # of a backward pass that was not finished nothing is applied
            self._pending, self._sending = [], 0
        plan = self._plan(index, bucket.parameters(), buffer.dtype, ranks)
        self._sending += plan.nbytes
        step = self.step
        if last:
            self.step, self.bytes_sent, self._complete = step + 1, self._sending, True
        if ranks == 1:
            return _done(buffer)
        reduction = Reduction(self._codec, plan.layout, self._feedback, buffer, dist.get_rank(self._group), step)
        stages = _stages(passes_of(reduction), plan.layout, buffer, self._group)
        return self._launch(stages, buffer) if buffer.is_cuda else self._queue(stages, buffer, last)

    def error(self, parameter: Tensor) -> Tensor | None:
        """This rank's residual of a parameter.

        Returns:
            A tensor (numel,) of `memory_dtype`, in the order in which the gradient lies in memory and in its
            unit: what this rank's gradients have lost in all, and, for the shard that this rank sums, the sums.
            None for a parameter that is exempt or unknown, without error feedback, and before the first step.
        """
        key = self._keys.get(parameter)
        return None if self._feedback is None or key is None else self._feedback.get(key)

    def memory_bytes(self) -> int:
        """Bytes of this rank's error feedback."""
        return 0 if self._feedback is None else self._feedback.nbytes

    def describe(self) -> CompressedTable:
        """What is done with each parameter seen so far, in the order of their buckets: a table that prints.

        A path is ``"fused Triton"``, ``"fused C"``, ``"eager torch"`` (with the reason), ``"all-reduce"`` for
        exempt parameters, or ``"none"`` with one rank.
        """
        return CompressedTable(tuple(self._row(parameter, key) for parameter, key in self._keys.items()))

    def _row(self, parameter: Tensor, key: str) -> CompressedRow:
        codec, dtype = self._codec, parameter.dtype
        sent = short = str(dtype).removeprefix("torch.")
        path, why = "all-reduce", "exempt"
        if key in self._sizes:
            sent = f"{self._name}, {codec.bits} bits, blocks of {codec.block_size}, {codec.rounding}"
            path, why = path_of(codec, self._feedback, dtype, parameter.device)
        elif dist.get_world_size(self._group) == 1:
            path, why = "none", "one rank"
        residual = None if self._feedback is None else self._feedback.get(key)
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        memory = 0 if residual is None else residual.nbytes
        return CompressedRow(key, shape, short, sent, memory, path, why)

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's residuals. They differ between ranks, so each rank has to save its own.

        Returns:
            ``{"step": int, "ranks": int, "memory": {"rank/parameter": tensor}}``. Names of parameters are their
            dtype and their place counted from the model's end. The `memory` of several ranks has no name in
            common and may be merged into one dictionary.
        """
        memory = {} if self._feedback is None else self._feedback.state(dist.get_rank(self._group))
        return {"step": self.step, "ranks": dist.get_world_size(self._group), "memory": memory}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Args:
            state_dict: of this rank, or with the merged `memory` of all ranks; of as many ranks as there are now.
                With an empty `memory` the residuals begin anew, which loses one step's rounding.

        Raises:
            ValueError: for another form, for residuals of another number of ranks or of none of this rank, or for
                residuals that a hook without error feedback would drop. Residuals of another model are refused at
                the next step.
        """
        wanted = ("step", "ranks", "memory")
        if not isinstance(state_dict, Mapping) or any(name not in state_dict for name in wanted):
            raise ValueError(f"state_dict must have 'step', 'ranks' and 'memory', got {state_dict!r:.100}")
        step, saved, memory = (state_dict[name] for name in wanted)
        check("state_dict: 'step'", step, Count)
        check("state_dict: 'ranks'", saved, Size)
        if not isinstance(memory, Mapping):
            raise ValueError(f"state_dict: 'memory' must be a dictionary, got {memory!r:.100}")
        if memory and self._feedback is None:
            raise ValueError("state_dict: 'memory' must be empty for a hook with error_feedback=False")
        ranks = dist.get_world_size(self._group)
        if memory and saved != ranks:
            raise ValueError(
                f"state_dict: 'memory' must be that of {ranks} ranks, got that of {saved}; an empty 'memory' "
                "begins anew, which loses one step's rounding"
            )
        if self._feedback is not None:
            self._feedback.load(memory, dist.get_rank(self._group))
        self.step = step

    def _launch(self, stages: Iterator[None], buffer: Tensor) -> torch.futures.Future[Tensor]:
        """All stages on a stream beside that of the backward pass, which goes on."""
        device = buffer.device
        # Nothing waits for the stream as a whole: futures do, each for one bucket.
        with torch.cuda.device(device):
            if device not in self._sides:
                self._sides[device] = Beside(device)
            with self._sides[device]:
                for _ in stages:
                    pass
                return _done(buffer)

    def _queue(self, stages: Iterator[None], buffer: Tensor, last: bool) -> torch.futures.Future[Tensor]:
        """The first stage now, the next stages of earlier buckets at this call and later ones; all at the last."""
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        next(stages)
        self._pending = [*_advanced(self._pending), (stages, future, buffer)]
        while last and self._pending:
            self._pending = _advanced(self._pending)
        return future

    def _plan(self, index: int, parameters: list[Tensor], dtype: torch.dtype, ranks: int) -> BucketPlan:
        """The plan of a bucket, made when it is first seen."""
        plan = self._plans.get(index)
        if plan is None or not plan.matches(parameters, dtype, ranks):
            layout = self._layout(parameters, dtype, ranks)
            plan = self._plans[index] = BucketPlan(parameters, dtype, layout, self._bytes(layout, dtype.itemsize))
        return plan

    def _layout(self, parameters: list[Tensor], dtype: torch.dtype, ranks: int) -> Layout:
        """The layout of parameters; new ones get names."""
        # Buckets come from the model's end, and those of the first step hold parameters in the model's order:
        # counted backwards, a parameter has the same number whatever the size of the buckets.
        for parameter in reversed(parameters):
            if parameter not in self._keys:
                if self._complete:
                    raise ValueError("bucket: got a new parameter; each DistributedDataParallel needs its own hook")
                number = self._counts[dtype] = self._counts.get(dtype, -1) + 1
                key = self._keys[parameter] = f"{str(dtype).removeprefix('torch.')}.{number}"
                small = parameter.numel() < max(1, self._min_size)
                if dtype in GRADIENTS and ranks > 1 and not small and not self._exempt(parameter):
                    self._sizes[key] = parameter.numel()
        keys = [self._keys[parameter] for parameter in parameters]
        sizes, exempt = [parameter.numel() for parameter in parameters], [key not in self._sizes for key in keys]
        return Layout.of(keys, sizes, exempt, ranks, self._codec.block_size)

    def _bytes(self, layout: Layout, itemsize: int) -> int:
        """What a rank sends for a bucket."""
        others = layout.ranks - 1
        exempt = sum(entry.numel for entry in layout.exempt) * itemsize
        return 2 * others * self._codec.nbytes(layout.width) + 2 * others * exempt // layout.ranks


def _stages(passes: AllreducePasses, layout: Layout, buffer: Tensor, group: Any) -> Iterator[None]:
    """A bucket's reduction: yields after the first and the second pass, with a collective under way.

    The buffer has the bucket's gradients, at the end the means. All ranks run the stages in one order.
    """
    spans, small, small_work = _start_exempt(layout, buffer, group)
    if layout.compressed:
        sent = passes.encode()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        yield

        work.wait()
        summed = passes.add(received)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13
        # Into the memory of the messages that were summed.
        work = gather(received, summed, group=group, async_op=True)
        yield

        work.wait()
        passes.finish(received)
    else:
        yield
        yield
    if small_work is not None:
        small_work.wait()
        torch._foreach_copy_(spans, small.split_with_sizes([end - begin for begin, end in layout.spans]))


def _start_exempt(layout: Layout, buffer: Tensor, group: Any) -> tuple[list[Tensor], Tensor, Any]:
    """The exempt gradients, their copy, and the work that sums it; None where there are none."""
    spans = [buffer[begin:end] for begin, end in layout.spans]
    if not spans:
        return spans, buffer, None
    # Divided before the sum, as torch does: in float16 the sum could overflow where the mean does not.
    small = (spans[0] if len(spans) == 1 else torch.cat(spans)).div(layout.ranks)
    return spans, small, dist.all_reduce(small, group=group, async_op=True)


def _advanced(pending: list[_Pending]) -> list[_Pending]:
    """The reductions that are not finished after one more stage each."""
    left = []
    for stages, future, buffer in pending:
        try:
            next(stages)
            left.append((stages, future, buffer))
        except StopIteration:
            future.set_result(buffer)
    return left


def _done(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """A future that holds a buffer; waiting for it waits for what the current stream has queued."""
    devices: Any = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
