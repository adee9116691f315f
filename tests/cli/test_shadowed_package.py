"""A folder with a runner.py of its own: the console script says what -m would run there."""

import pytest

from runner.__main__ import warn_of_shadow


@pytest.mark.parametrize("name", ["runner.py", "runner/__init__.py"])
def test_a_module_of_the_same_name_is_named(tmp_path, capsys, name):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    warn_of_shadow(tmp_path)
    assert capsys.readouterr().err == (
        f"warning: {name} hides this package: `python -m runner` would run it in this folder. "
        "Type runner in place of python -m runner here.\n"
    )


def test_a_checkout_hides_nothing(root, tmp_path, capsys):
    warn_of_shadow(root)
    warn_of_shadow(tmp_path)
    assert capsys.readouterr().err == ""
