"""The bench of state codecs: its gradients, its parts, the bytes of its candidates."""

import _state_candidates as candidates
import _state_gradients as gradients
import _state_recorded as recorded
import pytest
import state_codecs
import torch
from _gather import Training

import narrowgauge as ng


def test_gradients_are_what_their_cases_say() -> None:
    made = gradients.synthetic(list(gradients.CASES), 4096, 10)
    first = made.at(1)
    parts = {case: first[part] for case, part in made.segments.items()}
    assert float(parts["one scale"].std()) == pytest.approx(0.01, rel=0.1)
    decades = parts["six decades"].abs().log10()
    assert float(decades.quantile(0.9) - decades.quantile(0.1)) > 4
    assert float((parts["sparse elements"] == 0).float().mean()) > 0.6
    rows = parts["sparse rows"].view(-1, 64)
    assert bool(((rows == 0).all(1) | (rows != 0).all(1)).all())
    assert 0 < float((rows == 0).all(1).float().mean()) < 1
    for step in range(2, 10):
        last = made.at(step)
    down, up = last[made.segments["down 30"]], last[made.segments["up 30"]]
    assert float(down[1::2].std() / down[::2].std()) == pytest.approx(30, rel=0.2)
    assert float(up[::2].std() / up[1::2].std()) == pytest.approx(30, rel=0.2)
    with pytest.raises(ValueError, match="multiple of 2048"):
        gradients.synthetic(["one scale"], 100, 10)


def test_gradients_of_training_are_the_models(training: Training) -> None:
    steps = recorded.gpt(training)
    made = gradients.recorded(steps, 8192)
    before, after = made.at(1), made.at(2)
    assert made.segments.keys() == {"wte", "wpe", "h.0.attn.c_attn", "h.1.mlp.c_fc", "h.1.mlp.c_proj"}
    assert made.numel <= 5 * 8192
    assert before.isfinite().all()
    assert not torch.equal(before, after)


def test_clip_learns_its_pictures() -> None:
    images, captions = recorded.pictures(64, torch.Generator().manual_seed(0))
    assert images.shape == (64, 3, 32, 32)
    assert captions.shape == (64, 5)
    assert int(captions.max()) < 30
    # One coloured cell a picture, of 64 pixels at most.
    lit = (images > 0.6).any(1).flatten(1).sum(1)
    assert int(lit.max()) <= 64
    assert int(lit.min()) >= 16


def test_the_study_runs(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The parts that train nothing; tables and picture of the committed results are tested with the pages."""
    size = state_codecs.Size(reference=2048, numel=2048, marks=(2, 3, 4), recorded=3)
    quick = [part for part in state_codecs.PARTS if part not in state_codecs.WHOLE]
    found = state_codecs.study(size, Training(), quick)
    for part in quick:
        for name, segments in found[part].items():
            for marks in segments.values():
                assert all(len(errors) == 2 for errors in marks.values()), (part, name)
    assert set(found["all"]) >= set(candidates.PAIRS) | set(candidates.LIBRARY)
    assert set(found["all"]["log8"]["one scale"]) == {2, 3, 4}
    assert set(found["finalists"]["log8"]["up 30"]) == {4}
    assert "one scale 2048" in found["blocks"]["log8"]


def test_bytes_are_counted() -> None:
    assert candidates.PAIRS["8bit"].bytes(256) == 2 + 8 / 256
    assert candidates.PAIRS["FlashOptim"].bytes(256) == 2.125
    assert candidates.PAIRS["log8"].bytes(256) == 2 + 8 / 256
    assert candidates.PAIRS["exact ends"].bytes(256) == 2 + 12 / 256
    assert candidates.PAIRS["log4"].bytes(256) == 1 + 12 / 256
    for states in candidates.PAIRS.keys() & candidates.LIBRARY.keys():
        p = torch.zeros(4096, requires_grad=True)
        p.grad = torch.ones(4096)
        kept = candidates.LIBRARY[states].states
        optimizer = ng.optim.AdamW([p], states=kept if isinstance(kept, str) else dict(kept))
        optimizer.step()
        assert optimizer.state_bytes() == pytest.approx(candidates.PAIRS[states].bytes() * 4096, abs=16)
