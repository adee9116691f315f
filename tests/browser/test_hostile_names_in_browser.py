"""Names that are HTML, in a real sweep's report, in a browser: they are shown, and nothing runs."""

import subprocess

import pytest
from run_folders import read_json

pytestmark = pytest.mark.slow
COMMAND = (
    "-m precision=32-true,bf16-true tracking=none accelerator=cpu model=mlp model.hidden=[4] "
    "train.max_steps=3 hydra/launcher=basic"
)
EVIL = "<script>window.__pwned=1</script><img src=http://127.0.0.1:9/x onerror=window.__pwned=1>"
NAMES = (
    f"{EVIL}\"'><svg onload=window.__pwned=1>",
    "]]></style><style>*{display:none}</style><base href=//x>\x1b[31m\u202e😀 [red] ../../.. \n# h",
    "$(touch pwned)`touch pwned`; touch pwned & " + "y" * 400,
)


def quoted(value):
    """Quote a value for Hydra's grammar."""
    return "'" + value.replace("'", "\\'") + "'"


@pytest.fixture(scope="module")
def swept(tmp_path_factory, inside):
    """(the sweep's folder, what it printed)."""
    home = tmp_path_factory.mktemp("evil")
    with inside(home) as main:
        done = main(
            *COMMAND.split(),
            "+data.meta.note=" + ",".join(map(quoted, NAMES)),
            "hydra.sweep.dir=" + quoted(f"out/{EVIL[:60]}"),
        ).check_ok()
    (manifest,) = home.rglob("sweep.json")
    return manifest.parent, done.stdout + done.stderr


@pytest.fixture
def opened(swept, page):
    """The page, and what it asked for or said."""
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((swept[0] / "report.html").as_uri())
    page.wait_for_load_state("networkidle")
    return page, asked


def test_hostile_names_run_no_script_and_request_nothing(opened):
    page, asked = opened
    assert page.evaluate("window.__pwned") is None
    assert len(asked) == 1, asked
    assert page.locator("script, img, iframe, base, object, [onload], [onerror]").count() == 0
    assert page.locator("style").count() == 1


def test_the_names_are_shown(opened):
    page, _ = opened
    text = page.locator("body").inner_text()
    assert EVIL in text
    assert "]]></style><style>*{display:none}</style><base href=//x>" in text
    assert "😀 [red] ../../.." in text
    assert "$(touch pwned)`touch pwned`; touch pwned & yyy" in text
    assert page.locator("table").first.is_visible()


def test_an_injected_script_would_not_run(swept, page, tmp_path):
    """The page's own policy blocks scripts."""
    html = (swept[0] / "report.html").read_text()
    path = tmp_path / "more.html"
    path.write_text(html.replace("</main>", f"{EVIL}</main>"))
    page.goto(path.as_uri())
    assert page.locator("main script").count() == 1
    assert page.evaluate("window.__pwned") is None


def test_the_terminal_and_the_files_show_names_without_control_codes(swept):
    folder, printed = swept
    assert not set(printed) & set("\x1b\u202e\r")
    assert "[red]" in printed
    results = [read_json(p) for p in sorted(folder.glob("*/result.json"))]
    assert len(results) == 6
    for name in NAMES:
        assert sum(any(name[:40] in text for text in r["overrides"]) for r in results) == 2
    assert not [p for p in folder.parents[2].rglob("*") if p.name == "pwned"]


def test_the_command_to_copy_is_the_one_that_ran(opened, swept, tmp_path):
    page, _ = opened
    line = page.locator("pre").first.inner_text()
    done = subprocess.run(
        ["bash", "-c", rf"printf '%s\0' {line}"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        env={"LC_ALL": "C.UTF-8"},
    )
    words = read_json(swept[0] / "sweep.json")["command"]
    # -m stands first, as it was typed.
    assert sorted(done.stdout.decode().split("\0")[:-1]) == sorted(words)
    assert not list(tmp_path.iterdir())
