from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from omegaconf import DictConfig
from torch import Tensor

from runner.config.resolve import flatten, to_dict
from runner.config.schema import RunSpec, TrainSpec
from runner.config.targets import check_targets, instantiate, locate, target_nodes
from runner.utils.errors import ConfigError


def plain(text: str, count: int, rate: float = 0.1, names: list[str] | None = None) -> tuple:
    return text, count, rate, names


def lenient(kind: Literal["a", "b"], any_of: int | str, whatever: Any, **more: Any) -> dict:
    return more


def unbound(optimizer, steps: int, *, floor: float = 0.0) -> None: ...


VALUE = 3


@pytest.fixture
def spec(compose):
    return compose()


@pytest.fixture
def judged(spec):
    """The problems of a spec whose model is this node."""
    return lambda **node: check_targets(replace(spec, model=node))


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


def test_a_given_value_is_no_longer_missing(compose):
    assert compose("data=imagefolder", "data.meta.classes=3").model["classes"] == 3


def test_flatten_is_complete_and_cuts_nothing(spec):
    long = "x" * 10_000
    flat = flatten(replace(spec, model={**spec.model, "note": long, "empty": {}, "list": [1, 2]}))
    assert flat["train.batch_size"] == "64"
    assert flat["model.note"] == long
    assert flat["model.empty"] == "{}"
    assert flat["model.list"] == "[1, 2]"
    assert flat["train.max_steps"] == "None"

    def leaves(node):
        return sum(leaves(v) for v in node.values()) if isinstance(node, dict) and node else 1

    assert len(flatten(spec)) == leaves(to_dict(spec))


def test_to_dict_holds_no_config_object(spec):
    def walk(node):
        assert not isinstance(node, DictConfig)
        for item in node.values() if isinstance(node, dict) else ():
            walk(item)

    walk(to_dict(spec))


def test_locate():
    assert locate("json.decoder.JSONDecoder.decode").__name__ == "decode"
    assert locate(here("plain")) is plain


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nowhere.at.All", "no module named nowhere on the path"),
        ("json.nothing.Here", "json has no nothing"),
        ("json.JSONDecoder.nothing", "json has no nothing"),
        ("nodots", "no module named nodots"),
    ],
)
def test_locate_says_what_is_missing(path, part):
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


def test_good_targets_have_no_problem(judged):
    assert judged(_target_=here("plain"), text="a", count=1, rate=2, names=["b"]) == []
    assert judged(_target_=here("lenient"), kind="a", any_of="x", whatever="y", odd=1) == []


def typed_lists(milestones: Sequence[int], rates: list[float], scale: Tensor | None = None): ...


def test_the_items_of_a_list_are_named(judged):
    words = {"milestones": [0.5], "rates": ["a"], "scale": 3}
    assert judged(_target_=here("typed_lists"), **words) == [
        "model.milestones=[0.5] does not fit. Allowed: a list of whole numbers, as in [100,200].",
        "model.rates=['a'] does not fit. Allowed: a list of numbers, as in [0.1,0.2].",
        "model.scale=3 does not fit. Allowed: a list of numbers, as in [1.0,5.0] or null.",
    ]


def implicit(width: int = None):  # noqa: RUF013
    return width


def test_null_fits_where_it_is_the_default(judged):
    assert judged(_target_=here("implicit"), width=None) == []
    assert judged(_target_=here("implicit"), width=2) == []
    assert judged(_target_=here("implicit"), width="x") == [
        "model.width=x is text. Allowed: a whole number."
    ]


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"count": 1}, "model.text is needed by {0}. Type +model.text=<value>."),
        ({"text": "a", "count": "x"}, "model.count=x is text. Allowed: a whole number."),
        (
            {"text": "a", "count": 1, "names": "b"},
            "model.names=b is text. Allowed: a list, as in [a,b] or null.",
        ),
        (
            {"text": "a", "count": 1, "rte": 1},
            "model.rte=1: {0} takes no rte. It takes: text, count, rate, names.",
        ),
    ],
)
def test_arguments_that_do_not_bind(judged, node, problem):
    assert judged(_target_=here("plain"), **node) == [problem.format(here("plain"))]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("nowhere.Net", "model._target_=nowhere.Net does not import"),
        (here("VALUE"), f"model._target_={here('VALUE')} is a int, not a class or function."),
        (7, "model._target_=7 is no path. Write package.module.Name."),
        (None, "model._target_=None is no path"),
    ],
)
def test_targets_that_are_none(judged, path, part):
    (problem,) = judged(_target_=path)
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
