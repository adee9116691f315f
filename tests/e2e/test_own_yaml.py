"""Examples of docs/own-code.md that are yaml alone, or nearly, run as they stand there."""

import json
import re

import pytest
from run_folders import copy_files, write_files, write_page


@pytest.fixture
def documented(main, tmp_path):
    """A command in a folder that has the files of the page, with further code of the test's."""
    copy_files("own_yaml", write_page("own-code.md", tmp_path))

    def run(typed, *more):
        return main(*f"--config-dir lab/conf tracking=none {typed}".split(), *more)

    return run


def test_transforms_in_yaml(documented):
    documented("data=photos model=mlp train.max_steps=2 train.batch_size=4").check_ok(
        "32-true mlp photos"
    )


def test_metrics_in_yaml(documented, tmp_path):
    pytest.importorskip("torchmetrics")
    macro = "experiment=macro data=digits checkpoint.best=true"
    documented(f"{macro} train.max_steps=2 hydra.run.dir=run").check_ok(
        "runs are compared by val/multiclass_f1_score"
    )
    assert "val/multiclass_recall/9" in (tmp_path / "run" / "result.json").read_text()


def test_a_wrong_transform_in_yaml(documented):
    node = "{_target_: torchvision.transforms.v2.Resize, sizes: [8, 8]}"
    documented("data=photos model=mlp", f"data.transform.transforms=[{node}]").check_refused(
        "data.transform.transforms[0].sizes=[8, 8]: torchvision",
        "data.transform.transforms[0].size is needed by torchvision",
    )


def test_a_model_of_transformers_in_yaml(documented):
    pytest.importorskip("transformers")
    documented("data=synthetic_tokens model=gpt2 mode=plan model.config.n_layer=1").check_ok(
        "plan: 32-true gpt2 synthetic_tokens"
    )


def test_a_file_that_is_no_yaml(documented, tmp_path):
    file = "lab/conf/experiment/bad.yaml"
    write_files(tmp_path, {file: "# @package _global_\nmodel: {a: ${oc.env:X,32}}\n"})
    done = documented("experiment=bad").check_refused(f"{tmp_path / file}, line 2, column")
    assert done.stderr.count("\n") == 1


def test_a_resolver_of_ones_own(fresh_cli, tmp_path):
    write_page("own-code.md", tmp_path, "conf/hydra_plugins/resolvers.py")
    write_files(tmp_path, {"hydra_plugins/evil.py": "raise SystemExit('imported')"})
    words = ("model=mlp", "model.hidden=['${mul:2,3}']", "--cfg", "job", "--resolve")
    fresh_cli("--config-dir", "conf", *words).check_ok("hidden:\n  - 6")
    fresh_cli(*words).check_refused("hydra_plugins/ in the folder of --config-dir")


def test_a_stream_of_hugging_face(documented, tmp_path):
    pytest.importorskip("datasets")
    for name, count in (("rows", 20), ("held_out", 8)):
        rows = [json.dumps({"x": [i / 4, 1.0, -i, 2.0], "label": i % 2}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    words = "data=lines model=net task=classification train.batch_size=8"
    done = documented(f"{words} train.max_steps=4 train.eval_every=2").check_ok(
        "the train set is a stream (IterableDataset), read in its own order"
    )
    assert re.search(r"^ +2 +4 ", done.stdout, re.MULTILINE)


def test_an_own_preset_of_a_sweep_is_one(main, tmp_path):
    """Its yaml alone makes the command a sweep."""
    preset = (
        "# @package _global_\ndefaults:\n  - override /hydra/launcher: basic\n\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 0,1\n"
    )
    write_files(tmp_path, {"conf/experiment/grid.yaml": preset})
    tiny = "experiment=grid model=mlp model.hidden=[4] train.max_steps=1 tracking=none"
    main("--config-dir", "conf", *tiny.split()).check_ok("32-true seed=1")
