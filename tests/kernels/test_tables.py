"""Tables are sent once, and are what was given."""

import numpy as np
import torch

from narrowgauge.kernels._tables import sent

CPU = torch.device("cpu")


def test_the_same_table_is_sent_once_and_another_one_is_another() -> None:
    values = np.array([[1, 2], [3, 4]], dtype=np.int64)
    first = sent(values, CPU)
    assert first.tolist() == [[1, 2], [3, 4]]
    assert sent(values.copy(), CPU) is first
    others = [values.T.copy(), values.reshape(-1), values.astype(np.int32), values.astype(np.float64), values + 1]
    for other in others:
        found = sent(other, CPU)
        assert found is not first
        assert found.tolist() == other.tolist()
        assert found.dtype == torch.from_numpy(other).dtype
    values[:] = 0  # who writes to the array afterwards changes nothing
    assert first.tolist() == [[1, 2], [3, 4]]
    with torch.inference_mode():
        table = sent(np.array([0.125, 77.0]), CPU)
    assert not table.is_inference(), "it serves outside, too"
