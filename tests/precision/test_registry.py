from pathlib import Path

import pytest
from omegaconf import OmegaConf
from states import CPU

from runner.core.base.errors import ConfigError, Unavailable
from runner.precision import registry
from runner.precision.true import TruePrecision

CONF = Path(__file__).parents[2] / "conf" / "precision"


def test_every_yaml_is_listed_by_width():
    assert set(registry.precision_names()) == {path.stem for path in CONF.glob("*.yaml")}
    assert len(registry.precision_names()) == len(set(registry.precision_names()))
    assert (
        registry.precision_names()[:7]
        == "64-true 32-true tf32 bf16-mixed 16-mixed bf16-true 16-true".split()
    )


def test_a_new_yaml_is_picked_up_after_the_known_ones(tmp_path, monkeypatch):
    for name in ("b-new", "a-new", "16-true"):
        (tmp_path / f"{name}.yaml").write_text(f"# what {name} is\n# Why: because\nname: x\n")
    monkeypatch.setattr(registry, "PRECISION_CONFIGS", tmp_path)
    assert registry.precision_names() == ["16-true", "a-new", "b-new"]
    assert registry.yaml_header("a-new") == ("what a-new is", "because")


def test_keywords_change_what_the_yaml_says():
    precision = registry.load_precision("bf16-true", autocast_loss=True)
    assert isinstance(precision, TruePrecision)
    assert (precision.name, precision.autocast_loss) == ("bf16-true", True)
    assert not registry.load_precision("bf16-true").autocast_loss


def test_unknown_keywords_and_targets_fail():
    with pytest.raises(TypeError):
        registry.load_precision("32-true", loss_scale={})
    with pytest.raises(ConfigError, match="does not import"):
        registry.load_precision("32-true", _target_="runner.precision.none.None")


def test_a_row_for_every_precision():
    rows = registry.supported_precisions(CPU)
    assert [row.name for row in rows] == registry.precision_names()
    by_name = {row.name: row for row in rows}
    assert by_name["32-true"].runs
    assert (by_name["32-true"].why, by_name["32-true"].remedy) == ("", "")
    assert not by_name["tf32"].runs
    assert "needs an NVIDIA GPU" in by_name["tf32"].why
    assert "precision=32-true" in by_name["tf32"].remedy


def test_a_precision_that_require_refuses_is_listed_with_the_reason(monkeypatch):
    def refuse(self, device):
        if self.name == "bf16-true":
            raise Unavailable(f"not on {device}", "type another")

    monkeypatch.setattr(TruePrecision, "require", refuse)
    plain = ("64-true", "32-true", "tf32", "16-true", "bf16-true")
    refused = [
        row for row in registry.supported_precisions(CPU) if not row.runs and row.name in plain
    ]
    assert refused == [registry.PrecisionSupport("bf16-true", "not on cpu", "type another")]


def test_a_preset_sweeps_over_all_that_train():
    node = OmegaConf.load(CONF.parent / "sweep" / "every_precision.yaml")
    names = registry.precision_names()
    trained = [name for name in names if not registry.load_precision(name).trained_in]
    assert node.hydra.sweeper.params.precision.split(",") == trained
