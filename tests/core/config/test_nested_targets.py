"""Arguments of nested targets are checked before anything is built, all at once."""

from dataclasses import replace

import pytest

from runner.core.config.targets import check_targets

GPT2 = "transformers.GPT2Config"


def net(config: dict[str, int], sizes: list[int] | None = None, *, name: str = "") -> None: ...


def layer(width: int, depth: int = 1, **more: int) -> None: ...


def bound(params, rate: float, decay: float = 0.0) -> None: ...


NET = f"{__name__}.net"
LAYER = f"{__name__}.layer"


@pytest.fixture(scope="module")
def spec(compose):
    return compose()


@pytest.mark.parametrize("key", ["shuffle", "meta", "match", "collate", "sampler"])
def test_a_node_below_a_group_takes_no_key_of_the_group(spec, key):
    sampler = {"_target_": "torch.utils.data.SequentialSampler", key: 1}
    problems = check_targets(replace(spec, data={**spec.data, "sampler": sampler}))
    assert [problem.partition(": ")[0] for problem in problems] == [f"data.sampler.{key}=1"]


@pytest.fixture
def judged(spec):
    """The problems of a spec whose model is this node."""
    return lambda **node: check_targets(replace(spec, model={"_target_": NET, **node}))


def test_a_nested_target_fits_any_annotation(judged):
    nested = {"_target_": LAYER, "width": 1}
    assert judged(config=nested, sizes=nested, name=nested) == []
    assert judged(config={"a": nested}, sizes=[1, nested]) == []
    assert judged(_args_=[nested, [nested]], name="x") == []


@pytest.mark.parametrize(
    ("nested", "problem"),
    [
        ({}, "{key}.width is needed by {layer}. Type +{key}.width=<value>."),
        ({"width": "x"}, "{key}.width=x is text. Allowed: a whole number."),
        ({"_args_": ["x"]}, "{key}.width=x is text. Allowed: a whole number."),
        ({"_args_": [1], "width": 2}, "{key}.width=2: _args_ gives width, too."),
        ({"_args_": [1, 2, 3]}, "{key}._args_=[1, 2, 3]: {layer} takes no more than 2 by "),
        ({"_args_": 1}, "{key}._args_=1 does not fit. Allowed: a list"),
        ({"width": 1, "_partial_": "yes"}, "{key}._partial_=yes does not fit. Allowed: true"),
        ({"width": 1, "_recursive_": None}, "{key}._recursive_=null does not fit. Allowed: true"),
        ({"width": 1, "_convert_": "list"}, "{key}._convert_=list is not known. Allowed: all"),
        ({"_target_": "no.Net"}, "{key}._target_=no.Net does not import: no module named no"),
        ({"_target_": None}, "{key}._target_=None is no path."),
        ({"_target_": f"{__name__}.NET"}, "{key}._target_={module}.NET is a str, not a class"),
    ],
)
def test_a_problem_of_a_nested_node_is_named_by_its_key(judged, nested, problem):
    node = {"_target_": LAYER, **nested}
    for arguments, key in (
        ({"config": node}, "model.config"),
        ({"config": {"a": {"b": node}}}, "model.config.a.b"),
        ({"config": {"_target_": LAYER, "width": 1, "deep": node}}, "model.config.deep"),
    ):
        (found,) = judged(**arguments)
        assert found.startswith(problem.format(key=key, layer=LAYER, module=__name__))


def test_an_item_of_a_list_cannot_be_typed(judged):
    (problem,) = judged(config={}, sizes=[{"_target_": LAYER}])
    assert problem == (
        f"model.sizes[0].width is needed by {LAYER}. Add width: <value> to that item in the yaml."
    )


def test_a_partial_call_lacks_nothing(judged):
    assert judged(config={"_target_": LAYER, "_partial_": True}) == []
    (problem,) = judged(config={"_target_": LAYER, "_partial_": True, "width": "x"})
    assert problem.startswith("model.config.width=x is text.")


def test_nodes_that_are_not_built_are_not_checked(judged):
    assert judged(config={"a": {"_target_": "no.Net"}}, _recursive_=False) == []
    nested = {"_target_": LAYER, "width": 1, "_recursive_": False, "a": {"_target_": "no.Net"}}
    assert judged(config=nested) == []


def test_every_problem_of_every_node_comes_at_once(spec):
    model = {
        "_target_": NET,
        "config": {"_target_": LAYER, "width": "x", "a": {"_target_": "no.Net"}},
        "nme": "y",
    }
    task = {**spec.task, "a": {"_target_": "no.Task"}}
    problems = check_targets(replace(spec, model=model, task=task))
    assert [problem.split()[0] for problem in problems] == [
        "model.nme=y:",
        "model.config.width=x",
        "model.config.a._target_=no.Net",
        f"task.a={task['a']}:".split()[0],
        "task.a._target_=no.Task",
    ]


def test_only_the_runner_can_complete_a_partial_call(spec):
    node = {"_target_": f"{__name__}.bound", "_partial_": True, "_args_": [0.1]}
    assert check_targets(replace(spec, optimizer=node)) == []
    (problem,) = check_targets(replace(spec, optimizer={**node, "rate": 1}))
    assert problem == "optimizer.rate=1: _args_ gives rate, too. Leave one of them out."
    (problem,) = check_targets(replace(spec, model={**node, "_args_": []}))
    assert problem == (
        f"model._partial_=true would give a function of {__name__}.bound. Leave it out."
    )


@pytest.mark.parametrize(
    ("keywords", "problems"),
    [
        # Aliases and properties, which the signature lacks.
        ({"num_hidden_layers": 1, "num_labels": 3, "attn_implementation": "eager"}, ()),
        ({"n_layers": 1}, (f"n_layers=1: {GPT2} takes no n_layers.", "Write n_layer in place of")),
        ({"n_layer": "x"}, ("n_layer=x is text. Allowed: a whole number.",)),
        ({"n_layer": 1.5, "n_embd": 2}, ("n_layer=1.5 does not fit. Allowed: a whole number.",)),
    ],
)
def test_keywords_of_a_config_of_transformers(judged, keywords, problems):
    pytest.importorskip("transformers")
    config = {"_target_": GPT2, **keywords}
    found = judged(_target_="transformers.GPT2LMHeadModel", config=config)
    assert len(found) == bool(problems)
    for part in problems:
        assert part in found[0]
    assert all(problem.startswith("model.config.") for problem in found)


def test_a_mapping_in_place_of_an_object_is_told_of_targets(judged):
    pytest.importorskip("transformers")
    (problem,) = judged(_target_="transformers.GPT2LMHeadModel", config={"n_layer": 1})
    assert problem == (
        "model.config={'n_layer': 1} does not fit. "
        "Allowed: a nested _target_ that returns a GPT2Config."
    )


def test_a_command_names_each_nested_problem_and_nothing_else(main):
    main(
        "model=mlp",
        "+model.a={_target_: no.Net}",
        "+task.b={_target_: torch.nn.Linear, in_features: 3}",
    ).check_refused(
        "model.a._target_=no.Net does not import",
        "task.b.out_features is needed by torch.nn.Linear. Type +task.b.out_features=<value>.",
    )
