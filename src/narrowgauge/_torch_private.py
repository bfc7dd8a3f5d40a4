"""The private attributes of torch that the library reads, a function each: of sharding, hooks, dispatcher, tensors.

A release of torch may rename any of them. Where a public way exists it is the fallback; where none does, the
function raises and names the attribute and the torch version, so that nothing goes wrong silently.
`tests/test_torch_private.py` checks each on the installed torch, and that no other file reads them.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_PLAIN = (Tensor, torch.nn.Parameter)

Method = TypeVar("Method", bound=Callable[..., Any])
_disabled: dict[Callable[..., Any], Callable[..., Any]] = {}
_compiling = torch._C._dynamo.eval_frame.get_eval_frame_callback


def uncompiled(method: Method) -> Method:
    """A function that `torch.compile` leaves as it is, even inside one that it compiles.

    torch's compiler would trace every operation of an eager step, which takes it minutes, and does not round
    between operations in bf16. This does what `torch.compiler.disable` does, but imports the compiler, which takes
    a second, only where it is in use.
    """

    @functools.wraps(method)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() and _compiling() is None:
            return method(*args, **kwargs)
        if method not in _disabled:
            _disabled[method] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
        return _disabled[method](*args, **kwargs)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # for a trace that comes to the call
    return cast(Method, outside)


def local(x: Any) -> Tensor:
    """The local tensor of a DTensor, or a tensor itself: the object, never a copy.

    The public `to_local` makes a new Parameter at every call, and a step makes hundreds of calls.
    """
    inner: Any = getattr(x, "_local_tensor", x)
    if inner is x and type(x) not in _PLAIN and hasattr(x, "to_local"):
        inner = x.to_local()
    if type(inner) is Tensor:
        return inner
    if hasattr(inner, "wait"):  # the result of a collective that is still running
        return inner.wait()  # type: ignore[no-any-return]
    return inner  # type: ignore[no-any-return]


def is_flattened(p: Tensor) -> bool:
    """Whether a parameter is one that FullyShardedDataParallel (FSDP1) has flattened, or a view of one."""
    return bool(getattr(p, "_fsdp_flattened", False))


def accumulate_hooks(p: Tensor) -> Collection[Any]:
    """The hooks that `register_post_accumulate_grad_hook` has added to a parameter."""
    hooks = _attribute(p, "_post_accumulate_grad_hooks")
    return () if hooks is None else hooks.values()


def operators_observed() -> bool:
    """Whether something observes every operation: a mode, `torch.func`'s transforms, `torch.jit.trace`."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


def packs() -> Any:
    """The innermost hook that packs saved tensors now; None if there is none, False where none may be."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def when_traced(operator: str, rule: Callable[..., Any], library: Any) -> None:
    """Have a rule say what a compiler sees in place of an operator, once it knows shapes and gradients.

    If the operator is called again with the same arguments, the graph uses the first call's results.

    Args:
        operator: its name, with the namespace.
        rule: takes the operator's arguments and returns its results, or None to leave it as it is.
        library: of the operator.
    """
    from torch._functorch import config
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def decompose(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = None
        # A program that is exported keeps operators, as it keeps those of `torch.library.triton_op`.
        if getattr(config, "decompose_custom_triton_ops", True):
            known, key = _known_calls(op, args, kwargs or {})
            made = known.get(key)
            if made is None:
                with mode:
                    made = rule(*args, **(kwargs or {}))
                if made is not None:
                    known[key] = made
        return mode.__torch_dispatch__(op, types, args, kwargs) if made is None else made

    torch.library.register_torch_dispatch(operator, FunctionalTensorMode, decompose, lib=library)


def _known_calls(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[Any, Any], Any]:
    """The results of a graph's calls so far, and the key of this call.

    Compilers merge equal operations later. They do not merge launches, because each writes to tensors of its own.
    """
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return {}, None

    def named(value: Any) -> Any:
        if not isinstance(value, FunctionalTensor):
            return value
        torch._sync(value)  # type: ignore[attr-defined,no-untyped-call]
        slot = get_proxy_slot(torch._from_functional_tensor(value.elem), mode.tracer, None)
        return value if slot is None else _origin(slot.proxy.node)

    known: dict[Any, Any] = mode.tracer.__dict__.setdefault("narrowgauge_calls", {})
    return known, (op, *map(named, args), *((name, named(value)) for name, value in sorted(kwargs.items())))


def _origin(node: Any) -> Any:
    """The key of a node's tensor: nodes that reshape one tensor in the same way have one key."""
    if str(node.target) not in ("aten.view.default", "aten._unsafe_view.default", "aten.t.default"):
        return node
    first, *shape = node.args
    return node.target, _origin(first), *(tuple(one) for one in shape)


def without_modes() -> AbstractContextManager[Any]:
    """A context that no mode sees into."""
    from torch.utils._python_dispatch import _disable_current_modes

    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


def kernel_node(
    kernel: Any,
    grid: tuple[int, ...],
    given: Mapping[str, Any],
    written: list[str],
    blocks: Mapping[str, list[int]],
) -> dict[str, Tensor]:
    """A Triton kernel as a node of the graph that is being traced: it returns what the kernel would write.

    `torch.library.wrap_triton` does the same, without descriptors, and compiles a kernel at each call to find out
    what it writes.

    Args:
        kernel: as `triton.autotune` returns it, of one configuration.
        grid: programs along three sides.
        given: all of its arguments, by name.
        written: the names of tensors that it writes.
        blocks: of each tensor that it takes as a descriptor, the sides of what is copied at once.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    _analyze_once()
    _in_graphs.add(kernel)
    graphed = {name: value for name, value in given.items() if value is not None}
    absent = {name: None for name, value in given.items() if value is None}
    made: dict[str, Tensor] = wrap.triton_kernel_wrapper_functional(
        kernel_idx=wrap.kernel_side_table.add_kernel(kernel),
        constant_args_idx=wrap.kernel_side_table.add_constant_args(absent),
        grid=[grid],
        tma_descriptor_metadata={name: wrap.create_tma_stable_metadata([*sides]) for name, sides in blocks.items()},
        kwargs=graphed,
        tensors_to_clone=written,
    )
    return made


_in_graphs: set[Any] = set()  # the kernels of `kernel_node`


@functools.cache
def _analyze_once() -> None:
    """Have torch find out once what a kernel of `kernel_node` reads and writes with arguments of the same kinds.

    It compiles the kernel for that at each node of a graph, and a model has hundreds of equal nodes. This replaces
    a function of torch by one that remembers its answers, for these kernels alone. A torch without that function
    stays as it is.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    # The second in torch 2.11.
    names = ("identify_accessed_tensors", "identify_mutated_tensors")
    name = next((one for one in names if hasattr(wrap, one)), None)
    if name is None:
        return
    analyze: Any = getattr(wrap, name)
    known: dict[Any, Any] = {}

    def kind(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return type(value), value
        return type(value), getattr(value, "dtype", None)

    @functools.wraps(analyze)
    def analyzed(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Mapping[str, Any]) -> Any:
        if kernel not in _in_graphs:
            return analyze(kernel, kwargs, tma_descriptor_metadata)
        key = kernel, repr(tma_descriptor_metadata), *((each, kind(kwargs[each])) for each in sorted(kwargs))
        if key not in known:
            known[key] = analyze(kernel, kwargs, tma_descriptor_metadata)
        return copy.copy(known[key])

    setattr(wrap, name, analyzed)


# What a tensor subclass has for `__torch_function__` if `__torch_dispatch__` is all that it changes.
unsubclassed = torch._C._disabled_torch_function_impl


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator of torch writes to, those in lists among them."""
    found: list[Any] = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        found += given if isinstance(given, list | tuple) else [given]
    return found


@functools.lru_cache(maxsize=1)
def tensor_interface() -> tuple[int, ...] | None:
    """What code in C needs of torch to look at tensors.

    Returns:
        The addresses of four functions of torch's C interface for compiled models: of a tensor's address, elements,
        dtype, and whether it is contiguous; and how many bytes after the beginning of a tensor's Python object the
        handle is that they take. None if this torch has no such functions, or keeps the handle elsewhere.
    """
    probes = [torch.zeros(2), torch.nn.Parameter(torch.zeros(3))]
    folder, (start, end) = Path(torch.__file__).parent, (object.__basicsize__, torch.Tensor.__basicsize__)
    try:
        library = ctypes.CDLL(str(folder / "lib" / "libtorch_cpu.so"))
        names = "get_data_ptr", "get_numel", "get_dtype", "is_contiguous"
        functions = [ctypes.cast(getattr(library, f"aoti_torch_{name}"), ctypes.c_void_p).value for name in names]
        handles = [
            [ctypes.c_size_t.from_address(id(x) + at).value == x._cdata for x in probes]
            for at in range(start, end, 8)
        ]
    except (OSError, AttributeError):
        return None
    if sys.implementation.name != "cpython" or [True, True] not in handles or None in functions:
        return None
    return *map(int, functions), start + 8 * handles.index([True, True])  # type: ignore[arg-type]


Hooks = Literal["step_pre", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


def optimizer_hooks(optimizer: torch.optim.Optimizer, kind: Hooks) -> Collection[Any]:
    """The hooks that `register_<kind>_hook` has added to an optimizer."""
    found: Collection[Any] = _attribute(optimizer, f"_optimizer_{kind}_hooks").values()
    return found


def hooks_of_all_optimizers() -> Collection[Any]:
    """The hooks that `torch.optim.optimizer.register_optimizer_step_pre_hook` has added."""
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    return _global_optimizer_pre_hooks.values()


def averaged(wrapper: DistributedDataParallel) -> Iterator[Tensor]:
    """The parameters whose gradients a wrapper may average, those that are frozen at present too."""
    yield from _attribute(wrapper, "_delay_all_reduce_params")
    for place, module in wrapper.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if f"{place}.{name}" not in wrapper.parameters_to_ignore:  # as DDP itself names them
                yield p


def _attribute(x: object, name: str) -> Any:
    try:
        return getattr(x, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {type(x).__name__}.{name}, which this release of narrowgauge reads"
        ) from None
