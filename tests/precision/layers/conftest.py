import imitated_te
import pytest

from runner.precision import te_recipes


@pytest.fixture
def imitated_library(monkeypatch):
    """TransformerEngine's layers, imitated: the library needs a GPU."""
    monkeypatch.setattr(te_recipes, "import_library", lambda: imitated_te)
