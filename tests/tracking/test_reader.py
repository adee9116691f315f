"""What a reader says of a store that does not answer."""

import pytest

from runner.tracking.reader import Reader
from runner.utils.errors import TrackingError


def test_a_password_is_hidden_before_the_text_is_cut(monkeypatch):
    reader = Reader("http://127.0.0.1:9")

    def fail(*_):
        raise OSError(f"{'x' * 280} mysql://ann:hunter2@h/db")

    monkeypatch.setattr(reader.client, "get_metric_history", fail)
    with pytest.raises(TrackingError, match="cannot be read: xxx") as caught:
        reader.curve("run", "loss")
    assert "hunter2" not in str(caught.value)
