import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.messages import explain, unknown_key
from runner.config.overrides import as_typed
from runner.core.base.errors import ConfigError


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


def test_an_unknown_option_with_nothing_like_it_has_no_hint(explained):
    assert "Type" not in explained("model=qqqqqqqqqqqqqqq")


UNKNOWN = "{} is not known. Allowed: "
MEANT = "{{}} is not known. Type {}. Allowed: "


@pytest.mark.parametrize(
    ("typed", "start", "end"),
    [
        (
            "precision=bf17-mixed",
            MEANT.format("precision=bf16-mixed"),
            ", transformer-engine-nvfp4.",
        ),
        ("precision=bf16-mixd", MEANT.format("precision=bf16-mixed"), ""),
        ("precision=nf4", MEANT.format("precision=bnb-nf4 or precision=bnb-nf4-dq"), ""),
        ("precision=fp16x", MEANT.format("precision=16-mixed or precision=16-true"), ""),
        ("precision=fp16-mixed", MEANT.format("precision=16-mixed or precision=16-true"), ""),
        ("precision=BF16", MEANT.format("precision=bf16-mixed or precision=bf16-true"), ""),
        ("precision=amp", MEANT.format("precision=16-mixed or precision=bf16-mixed"), ""),
        ("precision=16_mixed", MEANT.format("precision=16-mixed"), ""),
        ("model=resnt", MEANT.format("model=resnet"), ", vit."),
        ("train.max_step=3", f"{UNKNOWN}train.epochs,", "Type train.max_steps=<value>."),
        ("sed=3", UNKNOWN, "Type seed=<value>."),
        ("+train.warmup=3", "train.warmup is not known. Allowed: train.epochs,", ""),
        ("+nosuch.key=3", "nosuch is not known. Allowed: mode,", ""),
        ("model.drop_rate=0.1", UNKNOWN, "list takes a plus: +model.drop_rate=0.1."),
        ("lr=1e-3", UNKNOWN, "Type optimizer.lr=<value>."),
        ("train.lr=1e-3", UNKNOWN, "Type optimizer.lr=<value>."),
        ("batch_size=8", UNKNOWN, "Type train.batch_size=<value>."),
        ("checkpoint.every=8", UNKNOWN, "Type checkpoint.every_steps=<value>."),
        ("task.metrics={'acc@2': {a: 1}}", "{} does not parse. Allowed as names", "digits, _ . -"),
        (
            "model.sub=1,2",
            "{} is a list of values, and a run takes one. Type python -m runner -m ",
            "model.sub=1,2.",
        ),
        ("precision=bf15", MEANT.format("precision=bf16-mixed or precision=bf16-true"), ""),
        ("modle=mlp", UNKNOWN, "Type model=<value>."),
        ("train.max_steps", "{} is not an override.", " Type key=value."),
        ("model", "{} is not an override.", " Type key=value."),
        ("doctr", "{} is not an override.", " Type doctor or key=value."),
        ("a b", "{} is not an override.", " Type key=value."),
        ("tracking.run_name=größe", "{}", "Type \"tracking.run_name='größe'\"."),
        ("tracking.run_name=<b>", "{}", "Type \"tracking.run_name='<b>'\"."),
        ("a=b)", "{}", "Type \"a='b)'\"."),
        ("model.depth=${vars.depth}", "model.depth: ", "Type vars.depth=<value>."),
        (
            "model.depth=${no.key}",
            "model.depth: Interpolation key 'no.key'",
            "model.depth=<value>.",
        ),
        ("model.depth=${twice:2}", "model.depth: no resolver is called twice. Register it in", ""),
    ],
)
def test_a_message_says_what_was_typed_and_what_to_type(explained, typed, start, end):
    text = explained(typed)
    assert text.startswith(start.format(typed))
    assert text.endswith(end)


def test_a_key_of_a_checkpoints_model_wants_the_model_beside_it(explained):
    text = explained("mode=evaluate", "checkpoint.path=outputs/runs/it", "model.drop_rate=0.1")
    assert "These are the keys of the default model. Type model=<the checkpoint's>" in text


def test_a_key_that_not_every_swept_option_has_wants_a_sweep_of_its_own():
    node = OmegaConf.create({"optimizer": {"lr": 1.0}}).optimizer
    text = unknown_key("optimizer.momentum", node, ["optimizer=sgd,adamw", "optimizer.momentum=1"])
    assert text.endswith("sweep those that have it on their own.")


def test_an_option_that_yaml_reads_as_a_number_is_to_be_written_in_full(main, tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [{override /precision: 16}]\n"
    (tmp_path / "experiment" / "a.yaml").write_text(text)
    main("--config-dir", tmp_path, "experiment=a", "--cfg", "job").check_refused(
        "as in `override /precision: 16-mixed`"
    )


def test_of_two_overrides_of_a_key_the_last_is_named(explained):
    assert explained("seed=1", "seed=x").startswith("seed=x ")


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("seed=x", "a whole number"),
        ("seed=1.5", "a whole number"),
        ("train.batch_size=null", "a whole number"),
        ("train.max_steps=x", "a whole number or null"),
        ("train.max_steps=${vars.x}", "a whole number or null"),
        ("train.clip_norm=x", "a number or null"),
        ("train.freeze=${vars.x}", "a list, as in [a,b]"),
        ("train.compile=${model.input_shape}", "true or false or text"),
        ("deterministic=maybe", "true or false"),
        ("train=3", "keys under it, train.<key>=<value>"),
    ],
)
def test_a_value_of_the_wrong_type_is_told_what_fits(explained, typed, allowed):
    key, _, value = typed.partition("=")
    given = key if "$" in value else typed
    assert explained("vars.x=ten", typed) == f"{given} does not fit. Allowed: {allowed}."


def test_the_operating_systems_refusal():
    text = explain(PermissionError(13, "Permission denied", "/ro/outputs"), [])
    assert text.startswith("/ro/outputs: Permission denied.")
    assert "hydra.run.dir=<folder>" in text


def test_any_other_error_keeps_its_own_text():
    assert explain(HydraException("  something \n"), []) == "something"


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
        ("++task.loss_weights.boxes=2", "task.loss_weights.boxes=2"),
        ("++scheduler.warmup=5", "scheduler.warmup=5"),
        ("++model.width=3", "++model.width=3"),
    ],
)
def test_jobs_are_labelled_with_the_keys_as_they_were_typed(stored, typed):
    assert as_typed(stored) == typed
