"""The storage that docs/add_a_storage.md adds: its C, and its interpreted Triton, are its torch to the bit."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from codec_functions import codec_source
from narrowgauge import optim
from narrowgauge.kernels._c_library import Unavailable, load
from narrowgauge.kernels._codec import text_of
from narrowgauge.storage import StateContext, StateStorage, _states, state_storage

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add_a_storage.md"


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> StateStorage:
    monkeypatch.setattr(_states, "_STORAGES", dict(_states._STORAGES))
    torch.manual_seed(0)
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), space)
    return state_storage("linear8")


def moments(size: int) -> Tensor:
    """Ordinary blocks, mixed scales, zeros, the ends of float32, infinities, NaN, halves of a step."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(9, size, generator=generator)
    x[1] *= 10 ** (torch.rand(size, generator=generator) * 60 - 30)
    x[2] = 0.0
    x[3] *= 2.0**-125
    x[4] = x[4].clamp(-1, 1) * 3e38
    x[5, 3], x[5, 4], x[5, 5] = torch.inf, -torch.inf, torch.nan
    x[6] = torch.nan
    x[7] = torch.arange(size) / 2 - size / 4
    x[8, : size // 2] *= 1e-30
    return x.reshape(-1)


@pytest.mark.parametrize("size", [16, 256])
def test_its_c_is_its_torch(storage: StateStorage, size: int) -> None:
    codec = storage.codec(signed=True)
    assert codec is not None
    library, x = load(codec_source(codec, size)), moments(size)
    context = StateContext(x.shape, True, size)
    wanted = storage.encode(x, context)
    found = {name: torch.full_like(tensor, 77) for name, tensor in wanted.items()}
    values = torch.empty_like(x)
    for function, of, tensors in ((library.encode, x, found), (library.decode, values, wanted)):
        addresses = [tensors[word.name].data_ptr() for word in codec.words]
        function(
            ctypes.c_long(x.numel() // size), ctypes.c_void_p(of.data_ptr()), (ctypes.c_void_p * 2)(*addresses),
            None, None, None,
        )  # fmt: skip
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert torch.equal(values.view(torch.int32), storage.decode(wanted, context).view(torch.int32))


def test_c_that_takes_its_words_in_another_order_is_refused(storage: StateStorage) -> None:
    """It would write codes over scales, and beyond them."""
    codec = storage.codec(signed=True)
    assert codec is not None
    with pytest.raises(Unavailable, match="incompatible pointer type"):
        load(codec_source(replace(codec, words=codec.words[::-1]), 64))


@pytest.mark.parametrize("second", ["fp32", "log8"])
def test_its_triton_is_its_torch(storage: StateStorage, second: str, device: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")
    from fused_runs import Keep, kept

    grads = [moments(256).to(device), torch.randn(700, device=device)[: 256 + 100]]
    weights = [torch.rand_like(grad) for grad in grads]
    eager, fused = kept(Keep("mv", "m"), {"m": "linear8", "v": second}, 256, weights, grads)
    for (p, state), (q, other) in zip(eager, fused, strict=True):
        for name in ("m.codes", "m.scales"):
            assert torch.equal(state[name], other[name])
        torch.testing.assert_close(q, p, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["text", "path", "str"])
def test_c_and_triton_are_texts_or_files(storage: StateStorage, way: str, tmp_path: Path) -> None:
    codec = storage.codec(signed=True)
    assert codec is not None
    assert isinstance(codec.triton, str)
    ((text,), triton) = codec.c_parts, codec.triton
    files = tmp_path / "linear8.h", tmp_path / "linear8.py"
    for file, content in zip(files, (text, triton), strict=True):
        file.write_text(str(content))
    c, triton = {"text": (text, triton), "path": files, "str": tuple(map(str, files))}[way]
    one = replace(codec, c=c, triton=triton)
    assert codec_source(one, 64) == codec_source(codec, 64)
    assert text_of(triton) == text_of(codec.triton)


def test_a_name_that_is_taken_is_refused(storage: StateStorage) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from narrowgauge.kernels._step._compile import functions

    codec = storage.codec(signed=True)
    assert codec is not None
    text = text_of(codec.triton)  # type: ignore[arg-type]
    assert "linear8_decode" in functions((text,))
    with pytest.raises(NotImplementedError, match="brings float8_decode, a name that the library or another codec"):
        functions((text.replace("linear8", "float8"),))
    with pytest.raises(NotImplementedError, match="brings linear8_decode"):
        functions((text, text + "\n"))
    assert "linear8_encode" in functions((text, text.replace("linear8", "linear9")))


def test_it_is_fused_on_a_cpu(storage: StateStorage) -> None:
    p = torch.nn.Parameter(torch.randn(5000))
    optimizer = optim.AdamW([p], states={"m": "linear8", "v": "log8"})
    p.grad = torch.randn_like(p)
    optimizer.step()
    (row,) = optimizer.describe().rows
    assert row.states == "m:linear8 v:log8"
    assert row.path.startswith("fused C"), row.why
    assert int(optimizer.state[p]["m.codes"].view(torch.int8).abs().max()) == 127


def test_a_class_that_replaces_a_function_has_no_kernels_until_it_says_so(storage: StateStorage) -> None:
    class Other(type(storage)):  # type: ignore[misc]
        def decode(self, tensors: Any, context: Any) -> Tensor:
            return super().decode(tensors, context) * 2  # type: ignore[no-any-return]

    assert storage.codec(signed=True) is not None
    assert Other("other", torch.uint8).codec(signed=True) is None
