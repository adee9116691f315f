from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from runner.core.base.errors import ConfigError
from runner.modes.training_outputs import check_model_folders, draw_loss_scale


def test_a_dtype_that_safetensors_lacks_is_refused_before_training():
    asked = SimpleNamespace(safetensors=True, pretrained=False)
    run = SimpleNamespace(spec=SimpleNamespace(checkpoint=asked))
    check_model_folders(run, nn.ParameterDict({"z": torch.ones(2, dtype=torch.complex64)}))
    with pytest.raises(ConfigError, match="holds no complex128, and z is one"):
        check_model_folders(run, nn.ParameterDict({"z": torch.ones(2, dtype=torch.complex128)}))
    kind = type("Counting", (nn.Identity,), {"get_extra_state": lambda _: np.zeros(2)})
    with pytest.raises(ConfigError, match="holds no ndarray, and _extra_state is one"):
        check_model_folders(run, kind())


@pytest.mark.parametrize(
    ("scales", "overflows"),
    [
        ([(1, 65536.0)], []),
        ([(1, 65536.0), (4, 32768.0), (9, 65536.0)], [3]),
        ([(1, 2.0**-14), (2, 2.0**-15)], [1]),
    ],
)
def test_the_picture_of_the_loss_scale(tmp_path, monkeypatch, scales, overflows):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    draw_loss_scale(tmp_path / "loss_scale.png", scales, overflows, last=20)
    (axes,) = drawn[0].axes
    line, *marks = axes.lines
    steps, values = [step for step, _ in scales], [value for _, value in scales]
    assert line.get_xdata().tolist() == [*steps, 20]
    assert line.get_ydata().tolist() == [*values, values[-1]]
    assert [mark.get_xdata()[0] for mark in marks] == overflows
    low, high = axes.get_ylim()
    assert low < min(values) <= max(values) < high


def test_the_picture_is_a_png(tmp_path):
    path = draw_loss_scale(tmp_path / "loss_scale.png", [(1, 8.0), (2, 4.0)], [1], 3)
    assert path.read_bytes().startswith(b"\x89PNG")
