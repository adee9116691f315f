"""Hydra composes a command once where nothing can set hydra.mode, else twice, and is the same."""

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra

from runner.cli import main as command_line
from runner.config.hydra_mode import single_composition


@pytest.fixture
def composed(monkeypatch):
    """The overrides of each composition."""
    seen = []
    compose = ConfigLoaderImpl.load_configuration

    def count(self, config_name, overrides, *args, **options):
        seen.append([*overrides])
        return compose(self, config_name, overrides, *args, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)
    return seen


def test_a_run_composes_its_config_once(main, composed, monkeypatch):
    jobs = []
    monkeypatch.setattr(command_line, "run_job", lambda config: jobs.append(config.seed))
    assert main("model=mlp", "seed=3", "tracking=none").rc == 0
    assert composed == [["model=mlp", "seed=3", "tracking=none", "hydra.mode=RUN"]]
    assert jobs == [3]


@pytest.mark.parametrize("skipped", [True, False])
def test_the_config_is_that_of_two_compositions(main, monkeypatch, skipped):
    if not skipped:
        monkeypatch.setattr("runner.config.hydra_mode._may_set_mode", lambda argv: True)
    seen = []

    def job(config):
        settings = command_line.HydraConfig.get()
        seen.append((config, settings.mode.name, settings.overrides, settings.runtime.choices))

    monkeypatch.setattr(command_line, "run_job", job)
    assert main("model=mlp", "tracking=none", "debug=smoke").rc == 0
    ((config, mode, overrides, choices),) = seen
    assert config.train.max_steps == 4
    assert mode == "RUN"
    assert overrides.task == ["model=mlp", "tracking=none", "debug=smoke"]
    assert overrides.hydra == ["hydra.mode=RUN"]
    assert choices["debug"] == "smoke"


@pytest.mark.parametrize(
    ("words", "twice"),
    [
        ([], False),
        (["-m", "seed=0,1"], False),
        (["--config-dir", "plain"], False),
        (["hydra.run.dir=x", "+model.width=3"], False),
        (["sweep=precisions"], True),
        (["+sweep=precisions"], True),
        (["hydra.mode=MULTIRUN"], True),
        (["hydra.mode=RUN", "hydra/launcher=basic", "--config-dir", "presets"], False),
        (["+hydra={mode: MULTIRUN}"], True),
        (["hydra/launcher=basic"], True),
        (["hydra.searchpath=[file://x]"], True),
        (["+mine=grid"], True),
        (["--config-dir", "presets"], True),
        (["--config-dir=presets"], True),
        (["--config-path", "presets"], True),
    ],
)
def test_a_command_whose_config_may_set_the_mode_is_composed_twice(
    words, twice, tmp_path, monkeypatch
):
    for name, text in (("plain", "seed: 1\n"), ("presets", "hydra:\n  mode: MULTIRUN\n")):
        (tmp_path / name / "experiment").mkdir(parents=True)
        (tmp_path / name / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    monkeypatch.chdir(tmp_path)
    own = Hydra.get_mode
    with single_composition(words):
        assert (Hydra.get_mode is own) == twice
    assert Hydra.get_mode is own


def test_an_own_preset_of_a_sweep_is_one(main, composed, tmp_path):
    """Its yaml alone makes the command a sweep."""
    preset = tmp_path / "conf" / "experiment" / "grid.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  launcher:\n    n_jobs: 1\n"
        "  sweeper:\n    params:\n      seed: 0,1\n"
    )
    tiny = ["model=mlp", "model.hidden=[4]", "train.max_steps=1", "tracking=none"]
    done = main("--config-dir", str(preset.parents[1]), "experiment=grid", *tiny)
    assert done.rc == 0, done.stderr
    assert "job 1" in done.stdout
