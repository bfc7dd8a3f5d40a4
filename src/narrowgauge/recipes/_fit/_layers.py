"""placeholder until merged"""


class LayerRecords: ...


def fit_layers(*a, **k): ...
