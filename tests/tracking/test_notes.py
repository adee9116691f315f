"""What MLflow's pages say of a run, whatever its texts hold."""

import shlex

import pytest

from runner.core.base.terminal import quote_command
from runner.core.policy.conversion_report import ConversionReport, Fate, ModuleConversion
from runner.core.run.run_result import RunResult
from runner.output.markup import markdown_code
from runner.tracking import notes

WORDS = ["python", "-m", "runner", "precision=16-mixed", "precision.keep_fp32=[a b]"]
COMMAND = quote_command(WORDS)
DONE = RunResult(
    precision="16-mixed",
    label="16-mixed mlp digits",
    folder="/out",
    quality="val/accuracy",
    metrics={"val/loss": 0.5, "val/accuracy": 0.91},
    best=0.93,
    steps=40,
)


def test_the_note_begins_with_the_metrics():
    report = ConversionReport((ModuleConversion("head", "Linear", Fate.SKIPPED, "ignored | <b>"),))
    note = notes.finished_note(COMMAND, DONE, report)
    assert note.startswith("**val/loss 0.5, val/accuracy 0.91**\n\n`python -m runner ")
    assert "| best val/accuracy | 0.93 |" in note
    assert "- skipped head (Linear): ignored \\| &lt;b&gt;" in note


def test_the_command_can_be_copied():
    line = notes.running_note(COMMAND).splitlines()[-1]
    assert shlex.split(line.strip("`")) == WORDS


@pytest.mark.parametrize("text", ["a`b", "a``b```c", "`", "x\n# heading", "<script>x</script>"])
def test_no_text_ends_the_code(text):
    code = markdown_code(quote_command(["echo", text]))
    assert "\n" not in code
    fence = code[: len(code) - len(code.lstrip("`"))]
    inside = code.removeprefix(fence).removesuffix(fence)
    assert fence not in inside.replace(f"`{fence}", "")
    assert code.endswith(fence)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("a\n# b <img src=x>", "a # b &lt;img src=x&gt;"),
        ("__init__() [x](http://y) `z` **k", r"\_\_init\_\_() [x\](http://y) \`z\` \*\*k"),
    ],
)
def test_an_error_adds_no_lines_tags_or_markup(error, shown):
    note = notes.failed_note(COMMAND, "FAILED", error)
    assert note.startswith(f"**FAILED**: {shown}\n\n`python")
