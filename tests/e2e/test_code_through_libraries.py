"""Code that a library would run or import because a stranger's file or folder names it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from run_folders import read_json
from torch import nn

from runner.config.hydra_plugins import set_plugin_folders
from runner.core.base.errors import ConfigError
from runner.core.base.files import read_as_data
from runner.data.datasets.imagefolder import decoded_image
from runner.precision.mixed import MixedPrecision
from runner.training.formats.export import ExportError, export
from runner.training.model import safe_loading

NODE = {"_target_": "runner.models.huggingface.huggingface"}
SOURCE = """__class__") and open("touched", "w") or (lambda x: self)("z"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    # A test that fails leaves the library's half of a module here.
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("aqlm", "megatron"):
            del sys.modules[name]


class Scaled(nn.Module):
    """Multiply by a tensor with a name of its own."""

    def __init__(self, name, kind):
        super().__init__()
        getattr(self, f"register_{kind}")(name, nn.Parameter(torch.ones(3)))
        self.name = name

    def forward(self, x):
        return x * getattr(self, self.name)


NAMED = {
    "a module": lambda name: nn.Sequential().append(nn.ModuleDict({name: nn.Linear(3, 3)})),
    "a parameter": lambda name: Scaled(name, "parameter"),
    "a buffer": lambda name: Scaled(name, "buffer"),
    "a shared module": lambda name: nn.ModuleDict({"a": (part := nn.Linear(3, 3)), name: part}),
}


@pytest.mark.parametrize("name", [SOURCE, "a-b", 'a"', "a\nb", "²"])
@pytest.mark.parametrize("kind", NAMED)
def test_names_that_torch_fx_would_run_are_not_exported(tmp_path, kind, name):
    model = NAMED[kind](name)
    precision = MixedPrecision("bf16-mixed", "bfloat16")
    with pytest.raises(ExportError, match="takes names of letters, digits and _, not "):
        export(model, precision, torch.randn(6, 3), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_names_of_numbers_and_letters_are_exported(tmp_path):
    model = nn.Sequential(Scaled("größe_2", "parameter"), nn.Sequential(nn.Linear(3, 2)))
    export(model, MixedPrecision("bf16-mixed", "bfloat16"), torch.randn(6, 3), tmp_path)


def test_hydra_finds_plugins_where_they_are_installed_or_typed(tmp_path, monkeypatch):
    import hydra_plugins

    monkeypatch.setattr(hydra_plugins, "__path__", [*hydra_plugins.__path__])
    # A package that is installed as its source folder, in a line of a .pth file.
    source = tmp_path.parent / f"{tmp_path.name}-source"
    for folder in (tmp_path, tmp_path / "conf", source):
        (folder / "hydra_plugins").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(source)])
    set_plugin_folders(Path("conf"))
    *installed, own = hydra_plugins.__path__
    assert own == str(tmp_path / "conf" / "hydra_plugins")
    assert installed[-1] == str(source / "hydra_plugins")
    assert not any(Path(folder).is_relative_to(tmp_path) for folder in installed)
    set_plugin_folders(None)
    assert [*hydra_plugins.__path__] == installed


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 9}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0))
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    model.save_pretrained(folder)
    return folder


def test_a_model_folder_named_like_a_package_that_its_config_asks_for(pretrained, tmp_path):
    from runner.models.huggingface import huggingface

    shutil.copytree(pretrained, tmp_path / "aqlm")
    (tmp_path / "aqlm" / "__init__.py").write_text("open('touched', 'w')\n__version__ = '9.9'\n")
    config = read_json(tmp_path / "aqlm" / "config.json")
    config["quantization_config"] = {"quant_method": "aqlm"}
    (tmp_path / "aqlm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="path=aqlm cannot be loaded"), safe_loading(NODE):
        huggingface("causal_lm", "aqlm")
    assert not Path("touched").exists()


def test_an_adapter_beside_the_weights_is_refused(pretrained, tmp_path):
    from runner.models.huggingface import huggingface

    shutil.copytree(pretrained, tmp_path / "megatron")
    adapter = {"peft_type": "LORA", "megatron_config": {"x": 1}, "megatron_core": "megatron.core"}
    (tmp_path / "megatron" / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "megatron" / "core.py").write_text("open('touched', 'w')")
    with pytest.raises(ValueError, match="path=megatron has an adapter beside its weights"):
        huggingface("causal_lm", "megatron")
    assert not Path("touched").exists()


def test_imports_of_a_library_that_reads_a_file_find_nothing_new_here(tmp_path):
    (tmp_path / "mine.py").write_text("")
    before = [*sys.path]
    sys.path.append("")
    with read_as_data():
        sys.path.append("/a/library's/own")
        with pytest.raises(ModuleNotFoundError):
            __import__("mine")
    assert sys.path == [*before, "", "/a/library's/own"]


@pytest.mark.parametrize("name", ["yaml", "omegaconf", "hydra", "rich"])
def test_a_folder_named_like_a_library_is_not_imported_at_the_start(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("open('touched', 'w')")
    command = [sys.executable, "-m", "runner", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, Path("touched").exists()) == (0, False), done.stderr


def test_no_program_runs_an_image(tmp_path, monkeypatch):
    """Pillow starts Ghostscript for EPS, whatever the suffix of the file."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: Path("touched").touch())
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png", format="EPS")
    with pytest.raises(ConfigError, match="in no format that Pillow knows"):
        decoded_image(tmp_path / "a.png", "it")
    assert not Path("touched").exists()
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "b.webp")
    assert decoded_image(tmp_path / "b.webp", "it").size == (4, 4)
