"""The linear layers' launches: no two calls that Triton would compile differently share a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: there are no kernels")

import triton

from narrowgauge.kernels import _launches
from narrowgauge.kernels._launches import BoundLaunch, CachedKernel
from narrowgauge.kernels._linear import _autotune, _multiply, _rows, _tiles
from narrowgauge.kernels._linear._configs import MatmulConfig

FORMS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CACHES = (_rows._launch, _tiles._launch_look, _tiles._launch_tiles, _tiles._launch_sums, _multiply.prepared)
CACHES = (*CACHES, _autotune._product)
WAYS = (None, MatmulConfig("pointers", 64, 64, 128, warps=4), MatmulConfig("descriptors", 128, 128, halves=True))


def dependencies(arguments: tuple[Any, ...], constants: Any, options: Any) -> tuple[Any, ...]:
    """All that the code of a kernel depends on."""
    return (*(_launches._kind(each)[1] for each in arguments), tuple(constants.items()), tuple(options.items()))


class Made:
    """A compiled kernel, which is launched with what it was compiled for or fails."""

    function = packed_metadata = None

    def __init__(self, kernel: Kernel, of: tuple[Any, ...]) -> None:
        self.kernel, self.of = kernel, of

    def run(self, *given: Any) -> None:
        wanted, arguments = self.kernel.wanted[-1]
        assert self.of == wanted
        for got, should in zip(given[9:], arguments, strict=False):
            if isinstance(should, Tensor):
                assert got == should.data_ptr()
            elif isinstance(should, int):
                assert got == should
            elif should is None:
                assert not got
            else:  # a descriptor
                assert (got.base.data_ptr(), got.shape) == (should.base.data_ptr(), should.shape)
                assert (got.strides, got.block_shape) == (should.strides, should.block_shape)
        self.kernel.runs += 1


class Kernel:
    wanted: list[tuple[Any, ...]]
    runs = 0

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.__name__ = kernel.arg_names, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Made]:
        def launch(*arguments: Any, **rest: Any) -> Made:
            names = self.arg_names[len(arguments) :]
            constants = {name: rest.pop(name) for name in names}
            return Made(self, dependencies(arguments, constants, rest))

        return launch


@pytest.fixture
def kernels() -> Iterator[list[Kernel]]:
    """Kernels that check what they are launched with, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        made: list[Kernel] = []
        wanted: list[tuple[Any, ...]] = []
        for module in (_rows, _tiles, _multiply):
            for launches in list(vars(module).values()):
                if isinstance(launches, CachedKernel):
                    made.append(Kernel(launches.kernel))
                    made[-1].wanted = wanted
                    patch.setattr(launches, "kernel", made[-1])
                    patch.setattr(launches, "interpreted", False)
                    patch.setattr(launches, "_known", {})
        plain = BoundLaunch.__call__

        def call(self: BoundLaunch, device: int, addresses: Any, arguments: Callable[[], Any], *rest: Any) -> None:
            these = (*arguments(), *self.sizes)
            wanted.append((dependencies(these, self.constants, self.options), these))
            plain(self, device, addresses, arguments, *rest)

        class Driver:
            def get_current_stream(self, device: int) -> int:
                return 0

        patch.setattr(BoundLaunch, "__call__", call)
        patch.setattr(_launches, "current_device", lambda: -1)
        patch.setattr(triton.runtime.driver, "_active", Driver())
        patch.setattr(_multiply, "_multiprocessors", lambda device: 132)
        for cache in CACHES:
            cache.cache_clear()
        yield made
    for cache in CACHES:
        cache.cache_clear()


def placed(shape: tuple[int, ...], dtype: torch.dtype, off: int) -> Tensor:
    """A contiguous tensor so many elements after an address that is a multiple of 16."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + off, dtype=torch.float32).to(dtype)[off:].view(shape)


SIDES = st.sampled_from((1, 2, 15, 16, 17, 128, 144, 256, 257))
DTYPES = st.sampled_from((torch.bfloat16, torch.float16, torch.float32))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            SIDES, SIDES, DTYPES, st.sampled_from(sorted(FORMS)), st.booleans(), st.sampled_from((0, 1, 8)),
            st.sampled_from((None, torch.float32, torch.float16)), st.sampled_from("rtcs"),
        ),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_quantizers_take_the_kernel_for_what_they_are_given(kernels: list[Kernel], calls: list[Any]) -> None:
    for rows, columns, dtype, form, sums, off, average, which in 2 * calls:
        x, codes = placed((rows, columns), dtype, off), placed((rows, columns), FORMS[form], 2 * off % 5)
        turned = placed((columns, rows), FORMS[form], 0)
        known = None if average is None else placed((1,), average, off % 3)
        if which == "r":
            _rows.quantize_rows(x, form, codes, sums, dtype)
        elif which == "c":
            _tiles.quantize_columns(x, form, turned, sums)
        elif which == "t":
            _tiles.quantize_tensor(x, form, known, codes, turned if sums else None, sums, dtype)
        else:
            _tiles.add_up(placed((rows, columns), torch.float32, off), dtype)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            SIDES, SIDES, SIDES, DTYPES, st.sampled_from(("int8", "e4m3", "e5m2")), st.booleans(), st.booleans(),
            st.sampled_from((None, torch.bfloat16, torch.float32)), st.sampled_from((0, 1, 16)), st.booleans(),
            st.sampled_from(WAYS),
        ),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_multiplies_take_the_kernel_for_what_they_are_given(kernels: list[Kernel], calls: list[Any]) -> None:
    for m, n, k, dtype, form, one, other, bias, off, full, config in 2 * calls:
        left = placed((m, k), FORMS[form], off)
        right = placed((n, k), FORMS["int8" if form == "int8" else "e4m3"], 0)
        descriptors = config is not None and config.kernel == "descriptors"
        if descriptors and not _multiply.fits_descriptors(left, right, dtype):
            continue
        scales = placed((m if one else 1,), torch.float32, off % 5), placed((n if other else 1,), torch.float32, 0)
        added = None if bias is None else placed((n,), bias, off % 3)
        product = _autotune.multiply_codes(left, right, *scales, added, dtype, "full" if full else "fast", config)
        assert (product.shape, product.dtype) == ((m, n), dtype)
