import pytest
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.messages import explain
from runner.config.overrides import as_typed
from runner.utils.errors import ConfigError


@pytest.fixture
def explained(compose):
    """How a command's failure to compose is explained."""

    def message(*argv):
        with pytest.raises((HydraException, OmegaConfBaseException, ConfigError)) as caught:
            compose(*argv)
        if isinstance(caught.value, ConfigError):
            return str(caught.value)
        return explain(caught.value, argv)

    return message


def test_unknown_option(explained):
    text = explained("precision=bf17-mixed")
    assert text.startswith("precision=bf17-mixed is not known. Allowed: 16-mixed, 16-true,")
    assert text.endswith("Type precision=bf16-mixed.")


def test_unknown_option_with_nothing_like_it(explained):
    assert "Type" not in explained("model=qqqqqqqqqqqqqqq")


def test_unknown_key_beside_a_near_one(explained):
    text = explained("train.max_step=3")
    assert text.startswith("train.max_step=3 is not known. Allowed: train.epochs, train.max_steps,")
    assert text.endswith("Type train.max_steps=<value>.")


def test_unknown_key_at_the_top(explained):
    assert explained("sed=3").endswith("Type seed=<value>.")


def test_a_key_added_with_a_plus_is_no_loophole(explained):
    assert explained("+train.warmup=3").startswith(
        "train.warmup is not known. Allowed: train.epochs,"
    )
    assert explained("+nosuch.key=3").startswith("nosuch is not known. Allowed: mode,")


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("seed=x", "a whole number"),
        ("seed=1.5", "a whole number"),
        ("train.batch_size=null", "a whole number"),
        ("train.max_steps=x", "a whole number or null"),
        ("train.clip_norm=x", "a number or null"),
        ("deterministic=maybe", "true or false"),
        ("train=3", "keys under it, train.<key>=<value>"),
        ("model.sub=1,2", None),
    ],
)
def test_wrong_type(explained, typed, allowed):
    text = explained(typed)
    if allowed is None:
        assert typed in text
    else:
        assert text == f"{typed} does not fit. Allowed: {allowed}."


def test_an_argument_that_a_yaml_does_not_list_takes_a_plus(explained):
    text = explained("model.drop_rate=0.1")
    assert text.endswith(
        "An argument that the yaml does not list takes a plus: +model.drop_rate=0.1."
    )


def test_a_key_of_a_checkpoints_model_wants_the_model_beside_it(explained):
    text = explained("mode=evaluate", "checkpoint.path=outputs/runs/it", "model.drop_rate=0.1")
    assert "These are the keys of the default model. Type model=<the option that" in text


def test_of_two_overrides_of_a_key_the_last_is_named(explained):
    assert explained("seed=1", "seed=x").startswith("seed=x ")


def test_an_interpolation_of_nothing(explained):
    text = explained("model.depth=${nothing.here}")
    assert text.startswith("model.depth: ")
    assert "nothing.here" in text
    assert text.endswith("Give it a value: model.depth=<value>.")


@pytest.mark.parametrize("typed", ["train.max_steps", "model", "a b"])
def test_a_word_that_is_no_override(explained, typed):
    assert explained(typed).startswith(f"{typed} is not an override. Type key=value")


@pytest.mark.parametrize("typed", ["tracking.run_name=größe", "tracking.run_name=<b>", "a=b)"])
def test_a_value_that_wants_quotes(explained, typed):
    key, _, value = typed.partition("=")
    assert explained(typed).endswith(f"Type \"{key}='{value}'\".")


def test_the_operating_systems_refusal():
    text = explain(PermissionError(13, "Permission denied", "/ro/outputs"), [])
    assert text.startswith("/ro/outputs: Permission denied.")
    assert "hydra.run.dir=<folder>" in text


def test_any_other_error_keeps_its_own_text():
    assert explain(HydraException("  something \n"), []) == "something"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("lr=1e-3", "Type optimizer.lr=<value>."),
        ("train.lr=1e-3", "Type optimizer.lr=<value>."),
        ("batch_size=8", "Type train.batch_size=<value>."),
        ("model.depth=${vars.depth}", "Type vars.depth=<value>."),
    ],
)
def test_the_hint_names_the_key_that_was_meant(explained, typed, hint):
    assert explained(typed).endswith(hint)


def test_an_unknown_resolver_can_be_registered(explained):
    text = explained("model.depth=${twice:2}")
    assert text.startswith("model.depth: no resolver is called twice. Register it in a module of")
    assert "hydra_plugins/" in text


@pytest.mark.parametrize("typed", ["vars.size=3", "+vars.size=3"])
def test_vars_hold_values_of_ones_own(compose, typed):
    spec = compose(typed, "model=mlp", "model.hidden=[${vars.size}]")
    assert spec.vars == {"size": 3}
    assert spec.model["hidden"] == [3]


@pytest.mark.parametrize(
    ("stored", "typed"),
    [
        ("++vars.size=3", "vars.size=3"),
        ("++data.collate=lab.join", "data.collate=lab.join"),
        ("++scheduler.warmup=5", "scheduler.warmup=5"),
        ("++model.width=3", "++model.width=3"),
    ],
)
def test_jobs_are_labelled_with_the_keys_as_they_were_typed(stored, typed):
    assert as_typed(stored) == typed
