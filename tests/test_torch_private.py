"""Private attributes of torch are read in one file, and are there in the installed torch."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgauge._torch_private import (
    accumulate_hooks,
    hooks_of_all_optimizers,
    is_flattened,
    local,
    operators_observed,
    optimizer_hooks,
    packs,
    tensor_interface,
    without_modes,
)

SOURCE = Path(__file__).resolve().parents[1] / "src" / "narrowgauge"
# Of FSDP, DTensor, tensors' and optimizers' hooks, and the dispatcher.
NAMES = {
    "_local_tensor", "_fsdp_flattened", "_fsdp_param_group", "_fsdp_param_groups", "_module_state_mapping",
    "_sharded_local_tensor", "_orig_size", "_module_info", "_get_default_store", "_post_accumulate_grad_hooks",
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks", "_optimizer_step_pre_hooks", "_global_optimizer_pre_hooks",
    "_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_get_tracing_state",
    "_saved_tensors_hooks_is_enabled", "_top_saved_tensors_default_hooks",
    "_delay_all_reduce_params", "_disable_current_modes", "_functorch", "_higher_order_ops", "FunctionalTensorMode",
    "triton_kernel_wrapper_functional", "get_eval_frame_callback",
}  # fmt: skip


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_other_file_reads_them() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "_torch_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(name, str) and name in NAMES:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {name}")
    assert found == []


@pytest.mark.usefixtures("alone")
def test_the_local_tensor_of_a_dtensor_is_one_object() -> None:
    layer = nn.Linear(4, 3)
    assert local(layer.weight) is layer.weight
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    inner = local(layer.weight)
    assert type(inner) is torch.Tensor
    assert local(layer.weight) is inner  # by `to_local` it would be another one each time
    assert torch.equal(inner, layer.weight.to_local())


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("original", [False, True])
def test_parameters_of_fsdp1_are_known(original: bool) -> None:
    wrapped = FullyShardedDataParallel(nn.Linear(4, 3), use_orig_params=original, device_id=torch.device("cpu"))
    assert all(map(is_flattened, wrapped.parameters()))
    assert not any(map(is_flattened, nn.Linear(4, 3).parameters()))


def test_hooks_are_found() -> None:
    p = nn.Parameter(torch.zeros(3))
    assert list(accumulate_hooks(p)) == []
    hook = p.register_post_accumulate_grad_hook(print)
    assert list(accumulate_hooks(p)) == [print]
    hook.remove()
    optimizer = torch.optim.SGD([p])
    for kind in ("step_pre", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        assert list(optimizer_hooks(optimizer, kind)) == []
        getattr(optimizer, f"register_{kind}_hook")(print)
        assert list(optimizer_hooks(optimizer, kind)) == [print]
    hook = register_optimizer_step_pre_hook(print)
    assert list(hooks_of_all_optimizers()) == [print]
    hook.remove()
    assert list(hooks_of_all_optimizers()) == []


def test_modes_and_transforms_are_seen() -> None:
    assert not operators_observed()
    with TorchDispatchMode():
        assert operators_observed()
        with without_modes():
            assert not operators_observed()
    assert torch.vmap(lambda x: x + operators_observed())(torch.zeros(2)).tolist() == [1, 1]


def test_torch_has_a_c_interface_and_handles_are_found() -> None:
    found = tensor_interface()
    assert found is not None
    *functions, offset = found
    numel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))(functions[1])
    for x in (torch.zeros(7), nn.Parameter(torch.zeros(2, 3)), torch.zeros(5, 4).t()):
        count = ctypes.c_int64()
        assert numel(id(x) + offset, ctypes.byref(count)) == 0
        assert count.value == x.numel()


def test_an_attribute_that_torch_has_no_more_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"torch .* has no object\._optimizer_state_dict_pre_hooks"):
        optimizer_hooks(object(), "state_dict_pre")  # type: ignore[arg-type]


def test_hooks_of_saved_tensors_are_found() -> None:
    def pack(x: torch.Tensor) -> torch.Tensor:
        return x

    assert packs() is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert packs() is pack
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        assert packs() is False
    assert packs() is None
