"""One's own run is evaluated and resumed without typing anything again, whatever library its model
comes from; a stranger's file with the same config is not."""

import shutil

import pytest
import torch
from run_folders import copy_files, only_run

pytestmark = pytest.mark.slow

WARM = (
    "scheduler._target_=transformers.get_constant_schedule_with_warmup",
    "+scheduler.num_warmup_steps=2",
)
QUICK = (
    *(
        "--config-dir lab/conf data=tiny model=tiny_timm train.batch_size=20 "
        "train.max_steps=2 tracking=none"
    ).split(),
    *WARM,
)


@pytest.fixture(scope="module")
def trained(inside, tmp_path_factory):
    """A folder with code of one's own, and a run of timm's model with transformers' schedule."""
    home = copy_files("own_checkpoints", tmp_path_factory.mktemp("trained"))
    with inside(home) as main:
        main(*QUICK).check_ok()
    return home


@pytest.fixture
def folder(trained, tmp_path):
    """Return the run's folder in a copy of what was trained."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return only_run(tmp_path)


def stranger(folder):
    """As if the run were somebody else's: its signature is of another key."""
    for path in folder.glob("checkpoints/*.pt"):
        content = torch.load(path, weights_only=True)
        torch.save({**content, "signature": "0" * 64}, path)


def test_ones_own_run_needs_nothing_typed_again(folder, main):
    main("mode=evaluate", f"checkpoint={folder}", "precision=bf16-true", "tracking=none").check_ok()
    main(f"checkpoint.resume={folder}", "train.max_steps=4").check_ok("resumed at step 2 of 4")
    main(f"checkpoint.resume={folder}", "train.max_steps=6").check_ok()
    moved = folder.rename(folder.with_name("moved"))
    main("mode=evaluate", f"checkpoint={moved}", "tracking=none").check_ok()


def test_the_advice_for_a_strangers_run_works(folder, main):
    """What was typed for the training is typed again; code of one's own folder is no exception."""
    stranger(folder)
    evaluate = ("mode=evaluate", f"checkpoint={folder}", "tracking=none")
    resume = (f"checkpoint.resume={folder}", "train.max_steps=4")
    for typed in (evaluate, resume):
        main(*typed).check_refused(
            "names model._target_=timm.create_model, which is neither",
            "not signed with your key",
            "=... yourself",
            "names data._target_=lab.data.rows, which is neither",
        )
    own = ("--config-dir", "lab/conf", "model=tiny_timm", "data=tiny")
    main(*evaluate, *own).check_ok()
    main(*resume, *own, *WARM).check_ok()
    done = main(f"checkpoint.resume={folder}", "train.max_steps=6")  # a stranger's run stays one
    assert (done.rc, "names model._target_=timm.create_model" in done.stderr) == (2, True)
    main(*evaluate, *own, "model.img_size=16").check_refused(
        "The checkpoint's model has other values: type model.img_size=32, or"
    )


def test_without_a_key_the_rules_for_strangers_hold(main, tmp_path, folder, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/dev/null/nowhere")
    main(*QUICK, "train.max_steps=1").check_ok()
    newest = max(tmp_path.glob("outputs/runs/*"))
    main("mode=evaluate", f"checkpoint={newest}", "tracking=none").check_refused(
        "/dev/null/nowhere/precision-runner/key, which is not used"
    )
