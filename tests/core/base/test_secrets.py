"""What is hidden of a URI, in every form in which one is written down."""

import json
import shlex
import time

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.core.base.secrets import redact, redact_override, redact_values

QUICK = ("precision=32-true", "model=mlp", "model.hidden=[16]", "train.max_steps=3")
OVERRIDES = {
    r"u=postgresql://h/db?password\=hunter2": r"u=postgresql://h/db?password\=***",
    r"u=postgresql\://h/db?password\=hun\,ter2": r"u=postgresql\://h/db?password\=***",
    r"u=[x://h?pwd\=hunter2,3]": r"u=[x://h?pwd\=***,3]",
    r"u=choice(x://h?token\=hun\)ter2,x://i?token\=hunter2)": r"u=choice(x://h?token\=***,x://i?token\=***)",
    r"u={a:x://h?api_key\=hunter2,b:3}": r"u={a:x://h?api_key\=***,b:3}",
    "u='x://h/db?sslpassword=hun,ter2&ssl=1'": "u='x://h/db?sslpassword=***&ssl=1'",
    "u='x://h?a=1&access_token=hunter2'": "u='x://h?a=1&access_token=***'",
    'u="x://h?PASSWD=hun\'ter2"': 'u="x://h?PASSWD=***"',
    "u=HTTP://ann:hunter2@h:5": "u=HTTP://h:5",
    "u=PostgreSQL://ann:hunter2@h/db": "u=PostgreSQL://***@h/db",
    'u="http://ann:hun\'ter2@h:5"': 'u="http://h:5"',
    r"u='mysql://ann:hun\'ter2@h/db'": "u='mysql://***@h/db'",
    "u=['http://h','x@y']": "u=['http://h','x@y']",
    "u={a:'mysql://h',b:'x:y@z'}": "u={a:'mysql://h',b:'x:y@z'}",
    "u='http://h/#/e?viewStateShareKey=hers&x=1'": "u='http://h/#/e?viewStateShareKey=hers&x=1'",
    "u='http://h?max_tokens=5'": "u='http://h?max_tokens=5'",
    "u='https://h/k?X-Amz-Credential=AK&X-Amz-Security-Token=t&X-Amz-Signature=s&X-Amz-Date=1'": (
        "u='https://h/k?X-Amz-Credential=***&X-Amz-Security-Token=***&X-Amz-Signature=***"
        "&X-Amz-Date=1'"
    ),
    "u='https://h/k?X-Goog-Credential=AK&X-Goog-Signature=s&X-Goog-Expires=9'": (
        "u='https://h/k?X-Goog-Credential=***&X-Goog-Signature=***&X-Goog-Expires=9'"
    ),
}
WRITTEN = {
    "plain": (str, str),
    "json": (lambda o: json.dumps([o, "a@b"], separators=(",", ":")), lambda t: json.loads(t)[0]),
    "yaml": (lambda o: yaml.dump([o, "a@b"]), lambda t: yaml.safe_load(t)[0]),
    "shell": (lambda o: shlex.join(["run", o, "a@b"]), lambda t: shlex.split(t)[1]),
    "shell in json": (
        lambda o: json.dumps({"command": shlex.join(["run", o])}),
        lambda t: shlex.split(json.loads(t)["command"])[1],
    ),
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_what_is_hidden_in_an_override_still_parses_however_it_is_written(override):
    parser = OverridesParser.create()
    parser.parse_override(override)
    for how, (write, read) in WRITTEN.items():
        shown = read(redact(write(override)))
        assert shown == OVERRIDES[override], how
    parser.parse_override(shown)


SECRET_KEYS = (
    "password passphrase secret token credentials api_key access_key secret_key private_key"
)


@pytest.mark.parametrize("key", SECRET_KEYS.split())
def test_the_value_of_a_key_that_names_a_secret_is_hidden(key):
    for name in (key, f"hub_{key}", f"db.{key}"):
        assert redact_values({name: "hunter2"}) == {name: "***"}
        assert redact_override(f"{name}=hunter2") == f"{name}=***"
        assert redact(f"failed with {name}=hunter2, twice") == f"failed with {name}=***, twice"


@pytest.mark.parametrize("key", ["num_tokens", "pad_token", "end_token", "key"])
def test_the_value_of_another_key_is_shown(key):
    assert redact_values({key: "shown"}) == {key: "shown"}
    assert redact_override(f"{key}=shown") == f"{key}=shown"


@pytest.mark.parametrize(
    ("name", "value", "is_hidden"),
    [
        ("MY_TOKEN", "eight-ch", True),
        ("MY_TOKEN", "seven-c", False),
        ("MY_PASSWORD", "eight-ch", True),
        ("MY_CREDENTIALS", "eight-ch", True),
        ("MY_KEY", "eight-ch", True),
        ("MY_KEY", "ordinary", False),  # a word
        ("MY_TOKEN", "12345678", False),
        ("MY_TOKEN", "/usr/bin", False),
        ("MY_VALUE", "eight-ch", False),
    ],
)
def test_the_value_of_a_variable_that_names_a_secret_is_hidden(monkeypatch, name, value, is_hidden):
    monkeypatch.setenv(name, value)
    assert redact(f"a {value} b") == ("a *** b" if is_hidden else f"a {value} b")


@pytest.mark.parametrize(
    "text",
    ["model.token_count=3 u=http://h", "u=http://h data.tokens=x", "u=http://h a?token=x&key=y"],
)
def test_only_what_is_inside_a_uri_is_hidden(text):
    assert redact(text) == text


def test_a_long_text_takes_no_time():
    text = "://" + "a.b-c" * 100_000 + "'" * 1000 + " x" * 100_000
    begin = time.process_time()
    assert redact(text) == text
    # A pattern that reads each part again for each character takes hours.
    assert time.process_time() - begin < 60


@pytest.mark.slow
def test_a_sweep_leaves_a_password_in_no_file_but_its_own_journal(cli, tmp_path, empty_store):
    """Only from the journal can the writer know how to open the store."""
    empty_store(tmp_path / "outputs" / "mlflow.db")
    secrets = (
        r"tracking.uri=sqlite:///outputs/mlflow.db?password\=hunter2",
        r"+tracking.tags.mirror=postgresql://h/db?access_token\=hunter2",
    )
    done = cli("-m", *QUICK, "seed=0,1", "hydra/launcher=basic", *secrets).check_ok()
    assert "hunter2" not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"mlflow.db", "sweep.json", "result.json", "report.html", "multirun.yaml"} < names
    holding = [path for path in files if b"hunter2" in path.read_bytes()]
    assert {path.name for path in holding} == {"journal.jsonl"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in holding)
