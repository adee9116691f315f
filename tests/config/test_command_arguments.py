"""The arguments of the commands other than a run: what each takes, and what it says to others."""

import pytest

from runner.core import ConfigError, Room

COMMANDS = Room.all_commands()


@pytest.mark.parametrize(
    ("command", "words", "values"),
    [
        ("doctor", [], {}),
        ("doctor --config-dir lab", [], {"--config-dir": "lab"}),
        ("doctor --config-dir=lab", [], {"--config-dir": "lab"}),
        ("doctor -cd lab", [], {"--config-dir": "lab"}),
        ("remove --yes a", ["a"], {"--yes": "--yes"}),
        ("list precision=a --json b", ["b"], {"precision": "a", "--json": "--json"}),
        ("report a --out b c", ["a", "c"], {"--out": "b"}),
        ("report tracking.uri=a b", ["b"], {"tracking.uri": "a"}),
        ("report run=1", ["run=1"], {}),
        ("sync run=1 .", ["run=1", "."], {}),
        ("sync tracking.uri=a=b", [], {"tracking.uri": "a=b"}),
        ("ui port=1 tracking.uri=", [], {"port": "1", "tracking.uri": ""}),
    ],
)
def test_arguments(command, words, values, tmp_path, monkeypatch):
    (tmp_path / "run=1").mkdir()
    monkeypatch.chdir(tmp_path)
    name, *argv = command.split()
    assert COMMANDS[name].parse(argv) == (words, values)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "doctor x",
            "doctor does not take x. Allowed: --config-dir=..., --measure; type doctor --help.",
        ),
        ("remove --yes=no", "remove does not take --yes=no. Allowed: folders or ids of"),
        ("list --josn", "list does not take --josn. Allowed: folders and words, precision=..., "),
        ("doctor --config-dir", "doctor does not take --config-dir. Allowed: "),
        (
            "report port=5",
            "report does not take port=5. Allowed: one or two sweeps, tracking.uri=..., "
            "tracking.experiment=..., --out=...; type report --help.",
        ),
        ("report a b c", "report takes one or two sweeps, and was given: a b c."),
        (
            "sync nowhere",
            "sync does not take nowhere: there is no such folder. Allowed: folders of runs or "
            "sweeps, tracking.uri=..., tracking.experiment=...; type sync --help.",
        ),
        ("sync " + 300 * "x", "sync does not take xxx"),
        ("report a=" + 300 * "x", "report does not take a=xxx"),
        (
            "sync tracking.uri=a tracking.uri=b",
            "sync does not take tracking.uri=b: it is typed twice",
        ),
        ("ui =5", "ui does not take =5."),
        ("ui port", "ui does not take port. Allowed: tracking.uri=..., "),
    ],
)
def test_arguments_that_a_command_does_not_take(command, message):
    name, *argv = command.split()
    with pytest.raises(ConfigError) as caught:
        COMMANDS[name].parse(argv)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_help_names_every_argument(command):
    text = command.help()
    assert text.startswith(f"python -m runner {command.name} [")
    for argument, meaning in command.options.items():
        assert text.count(argument) == 2
        assert meaning in text
