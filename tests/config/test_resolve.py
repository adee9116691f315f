import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest
from torch import Tensor

from runner.core.base.errors import ConfigError
from runner.core.config.schema import RunSpec, TrainSpec
from runner.core.config.targets import check_targets, instantiate, locate, target_nodes


def plain(text: str, count: int, rate: float = 0.1, names: list[str] | None = None) -> tuple:
    return text, count, rate, names


def lenient(kind: Literal["a", "b"], any_of: int | str, whatever: Any, **more: Any) -> dict:
    return more


def typed_lists(milestones: Sequence[int], rates: list[float], scale: Tensor | None = None): ...


def implicit(width: int = None):  # noqa: RUF013
    return width


def unbound(optimizer, steps: int, *, floor: float = 0.0) -> None: ...


VALUE = 3


@pytest.fixture
def spec(compose):
    return compose()


def here(name):
    return f"{__name__}.{name}"


def test_the_default_config_is_a_spec_of_plain_values(spec):
    assert isinstance(spec, RunSpec)
    assert isinstance(spec.train, TrainSpec)
    assert type(spec.model) is dict
    assert spec.model["classes"] == 10  # resolved from ${data.meta.classes}
    assert type(spec.data["meta"]["input"]) is list


def test_data_chooses_its_task(compose):
    assert compose("data=text").task["_target_"].endswith("Language")
    assert compose("data=text", "task=regression").task["_target_"].endswith("Regression")


def test_each_missing_value_is_named(compose):
    with pytest.raises(ConfigError) as caught:
        compose("data=imagefolder", "model.depth=???")
    assert caught.value.problems == (
        "data.meta.classes has no value. Type data.meta.classes=<value>.",
        "model.depth has no value. Type model.depth=<value>.",
    )
    assert compose("data=imagefolder", "data.meta.classes=3").model["classes"] == 3


def test_flatten_is_complete_and_cuts_nothing(spec):
    long = "x" * 10_000
    flat = replace(spec, model={**spec.model, "note": long, "empty": {}, "list": [1, 2]}).flat()
    assert flat["train.batch_size"] == "64"
    assert flat["model.note"] == long
    assert flat["model.empty"] == "{}"
    assert flat["model.list"] == "[1, 2]"
    assert flat["train.max_steps"] == "None"

    def leaves(node):
        return sum(leaves(v) for v in node.values()) if isinstance(node, dict) and node else 1

    assert len(spec.flat()) == leaves(asdict(spec))


def test_to_dict_holds_no_config_object(spec):
    plain = asdict(spec)
    assert json.loads(json.dumps(plain)) == plain


def test_locate():
    assert locate("json.decoder.JSONDecoder.decode").__name__ == "decode"
    assert locate(here("plain")) is plain
    for path, part in {
        "nowhere.at.All": "no module named nowhere on the path",
        "json.nothing.Here": "json has no nothing",
        "json.JSONDecoder.nothing": "json has no nothing",
        "nodots": "no module named nodots",
    }.items():
        with pytest.raises(ConfigError, match=f"^{path} does not import: {part}"):
            locate(path)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("import not_installed_at_all", "No module named 'not_installed_at_all'"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("def (", "SyntaxError"),
    ],
)
def test_a_module_that_fails_says_why(tmp_path, monkeypatch, body, part):
    name = f"failing_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=part):
        locate(f"{name}.Thing")


def test_instantiate_leaves_out_what_only_describes():
    node = {"_target_": here("plain"), "count": 2, "meta": {"a": 1}, "match": None, "shuffle": True}
    assert instantiate(node, "first") == ("first", 2, 0.1, None)


def test_targets_finds_each_of_several_optimizers(compose):
    keys = [key for key, _, _ in target_nodes(compose("optimizer=muon"))]
    assert "optimizer.matrices" in keys
    assert "optimizer.rest" in keys


@pytest.mark.parametrize(
    ("target", "node", "problems"),
    [
        ("plain", {"text": "a", "count": 1, "rate": 2, "names": ["b"]}, []),
        ("lenient", {"kind": "a", "any_of": "x", "whatever": "y", "odd": 1}, []),
        # null fits where it is the default.
        ("implicit", {"width": None}, []),
        ("implicit", {"width": 2}, []),
        ("implicit", {"width": "x"}, ["model.width=x is text. Allowed: a whole number."]),
        ("plain", {"count": 1}, ["model.text is needed by {0}. Type +model.text=<value>."]),
        (
            "plain",
            {"text": "a", "count": "x", "names": "b"},
            [
                "model.count=x is text. Allowed: a whole number.",
                "model.names=b is text. Allowed: a list, as in [a,b] or null.",
            ],
        ),
        (
            "plain",
            {"text": "a", "count": 1, "rte": 1},
            ["model.rte=1: {0} takes no rte. It takes: text, count, rate, names."],
        ),
        (
            "typed_lists",
            {"milestones": [0.5], "rates": ["a"], "scale": 3},
            [
                "model.milestones=[0.5] does not fit. Allowed: a list of whole numbers, as in "
                "[100,200].",
                "model.rates=[a] does not fit. Allowed: a list of numbers, as in [0.1,0.2].",
                "model.scale=3 does not fit. Allowed: a list of numbers, as in [1.0,5.0] or null.",
            ],
        ),
        ("VALUE", {}, ["model._target_={0} is a int, not a class or function."]),
    ],
)
def test_each_argument_that_does_not_fit_is_named(spec, target, node, problems):
    node = {"_target_": here(target), **node}
    expected = [problem.format(here(target)) for problem in problems]
    assert check_targets(replace(spec, model=node)) == expected


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nowhere.Net", "model._target_=nowhere.Net does not import"),
        (7, "model._target_=7 is no path. Write package.module.Name."),
        (None, "model._target_=None is no path"),
    ],
)
def test_a_target_that_is_none_is_named(spec, path, part):
    (problem,) = check_targets(replace(spec, model={"_target_": path}))
    assert problem.startswith(part)


def test_a_group_that_was_taken_away(spec):
    problems = check_targets(replace(spec, model={}, optimizer={}, scheduler={}))
    assert problems == [
        "model has no _target_. Type model=<option>.",
        "optimizer has no _target_. Type optimizer=<option>.",
    ]


def test_what_the_runner_passes_first_is_not_asked_of_the_config(spec):
    node = {"_target_": here("unbound"), "steps": 3}
    assert check_targets(replace(spec, scheduler=node)) == []
    (problem,) = check_targets(replace(spec, scheduler={**node, "optimizer": 1}))
    assert "the runner passes optimizer of" in problem


def test_every_problem_comes_in_one_list(spec):
    broken = replace(spec, model={"_target_": "no.Net"}, task={"_target_": "no.Task"})
    assert len(check_targets(broken)) == 2
