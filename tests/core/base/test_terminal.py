"""What reaches a terminal, and what is pasted back into a shell."""

import logging
import shutil
import subprocess

import pytest
from rich.table import Table

from runner.cli.main import PlainFormatter
from runner.core.base.terminal import one_line, print_error, quote_command, sanitize
from runner.output.console import PlainConsole

STEERS = "\x1b[31m\x07\x08\r\x7f\x9b1m\u202e\u2066\u2028"
WORDS = (
    "a b",
    "a  b",
    " x",
    "x ",
    "a\nb",
    "t\tt",
    "it's \x1b[31m",
    "\\n\x07'\\",
    "$(touch pwned)`id`",
    "\u202eabc 😀 \u2028",
    "",
    "*",
    "~",
    "\x80",
    "a;b&c|d>e",
    "$'x'",
    '"',
    "!!",
    "#",
    "-n",
    "\x01'",
)


def test_nothing_steers_the_terminal(capsys):
    shown = sanitize(f"a{STEERS}b\tc\nd 😀")
    assert not set(shown) & set(STEERS) - set("[31m")
    assert shown.startswith("a\\x1b[31m\\x07\\x08\\r\\x7f\\x9b1m\\u202e\\u2066\\u2028b\tc\nd 😀")
    assert one_line("a\n\tb") == "a b"
    print_error(f"x{STEERS}\ny")
    assert capsys.readouterr().err == f"error: {sanitize('x' + STEERS)}\nerror: y\n"


def test_tables_and_warnings_do_not_steer_the_terminal(capsys):
    table = Table(title=f"t{STEERS}")
    table.add_column(f"h{STEERS}")
    table.add_row(f"c{STEERS} [red]x[/red] :smile:")
    PlainConsole(width=200).print(table)
    shown = capsys.readouterr().out
    assert not set(shown) & set("\x1b\x07\r\u202e")
    assert "[red]x[/red] :smile:" in shown
    record = logging.LogRecord("x", 30, "", 1, "w %s", (STEERS,), None)
    assert PlainFormatter().format(record) == sanitize(f"w {STEERS}")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_quoted_command_pasted_into_a_shell_has_the_same_words(shell, tmp_path):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    lines = [quote_command(["printf", "%s|", word, "end"]) for word in WORDS]
    for line in lines:
        assert "\n" not in line
        assert sanitize(line) == line
        assert " ".join(line.split()) == line, "a page shows it as it is"
    environment = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    command = [shell, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, env=environment)
    assert done.stdout.decode() == "".join(f"{word}|end|" for word in WORDS)
    assert list(tmp_path.iterdir()) == []


def test_no_secret_is_in_a_command():
    assert (
        quote_command(["run", "+data.api_key=a b", "u=http://ann:pw@h"])
        == "run '+data.api_key=***' u=http://h"
    )
