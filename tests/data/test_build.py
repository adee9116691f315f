"""data.meta of another type than its config states, as a damaged checkpoint may hold it."""

from types import SimpleNamespace

import pytest

from runner.data.build import build_splits
from runner.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (5, "data.meta=5: it is a mapping"),
        ({"input": 5}, r"data.meta.input=5, but an example has the shape \[1, 8, 8\]"),
        ({"classes": "ten"}, "data.meta.classes=ten: type a whole number"),
    ],
)
def test_meta_of_a_wrong_type_is_refused(meta, message):
    data = {"_target_": "runner.data.datasets.digits.digits", "meta": meta}
    spec = SimpleNamespace(data=data, debug=SimpleNamespace(overfit=None), seed=0)
    with pytest.raises(ConfigError, match=message):
        build_splits(spec)
