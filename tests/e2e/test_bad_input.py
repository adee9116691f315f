"""What a user can get wrong: exit status 2, and a message with what was given, what is allowed
and what to type, never a traceback."""

from pathlib import Path

import pytest
from refusals import message_table
from tiers import crossed

from runner.cli import main as command_line
from runner.core.base.files import folder_lock
from runner.core.base.layout import MANIFEST

MISTAKES = message_table("""
precision=17 => precision=17 is not known | 32-true
model=null => model=null is not known | mlp, resnet
nosuch=3 => nosuch=3 is not known | mode, seed
train.compile=3 => train.compile=3
train.compile=regional => train.compile=regional | this one has none
accelerator=cpu train.compile=reduce-overhead => CUDA graphs | on cpu | Type train
train.activation_checkpointing=[nowhere] => nowhere matches no module | layers
train.data_on_device=maybe => data_on_device=maybe is not known | true, false, auto
train.data_on_device=true debug.overfit=4 => this is a Subset | data_on_device=auto
data.meta.input=[3,3] => data.meta.input=[3, 3] | [1, 8, 8] | Type data.meta.input=[1,8,8]
data.meta.classes=3 => data.meta.classes=3 | Type data.meta.classes=10
precision.keep_fp32=[zzz] => zzz matches no module | layers, layers.0
precision.keep_fp32=head => precision.keep_fp32=head is text | a list, as in [a,b]
precision.dtype=float8 => precision.dtype=float8 is not known | float64, float32
model._target_=torch.nn.Nothing => torch.nn has no Nothing
model.hidden=3 => model.hidden=3 does not fit | a list
precision.keep_fp32=true => precision.keep_fp32=true does not fit | a list
precision.keep_fp32=[3] => precision.keep_fp32: 3 matches no module
adapter=lora adapter.rank=null => adapter.rank=null does not fit | whole number
adapter=lora adapter.rank=2.5 => adapter.rank=2.5 does not fit | whole number
adapter=lora adapter.modules=[1] => adapter.modules: 1 matches no module
adapter=lora adapter.use_dora=1 => adapter.use_dora=1 does not fit | true or false
adapter=lora adapter.init=pissa precision=bnb-nf4 => adapter.init=pissa | precision=bnb-nf4 packs
    Type adapter.init=loftq
adapter.use_dora=true => adapter.use_dora=true is not known
checkpoint=some => mode=train does not load checkpoint=some | init.weights=
init.weights=/no/such.pt => init.weights=/no/such.pt: no checkpoint is there
mode=evaluate checkpoint=x init.weights=y => Leave init.weights= out
optimizer.lr=abc => optimizer.lr=abc is text | a number
optimizer.lr=inf => optimizer.lr=inf is out of range | a finite number
optimizer=muon optimizer.rest.lr=nan => optimizer.rest.lr=nan is out of range | a finite number
optimizer.betas=[0.9] => optimizer.betas=[0.9] does not fit | a list, as in [a,b]
optimizer.betas=[0.9,0.9,0.9] => does not fit | a list, as in [a,b]
seed=99999999999999999999999 => is out of range | 0 to 8796093022207
train.clip_norm=choice(null,1.0) -m => never null | Type the values without it | clip_norm=null,1.0
optimizer=lbfgs precision=16-mixed => optimizer=lbfgs | a loss scale | Type precision=32-true
optimizer=lbfgs precision=16-true => optimizer=lbfgs divides | precision=16-true
    Type precision=32-true
optimizer=muon scheduler=onecycle => scheduler.max_lr: this optimizer is several
    Type scheduler.max_lr=
learning_rate=0.1 => Type optimizer.lr=<value>.
data=imagefolder data.path=x => Type data.root=<value>.
epochs=3 => Type train.epochs=<value>.
model.lr=3 => model.lr=3 is not known | Type optimizer.lr=<value>.
optimizer=muon lr=3 => Type optimizer.matrices.lr=<value> or optimizer.rest.lr=<valu
precision=16-true => optimizer.eps=1e-08 | Type optimizer.eps=1e-4
precision=16-mixed precision.loss_scale.fixed=-1 => fixed=-1 | above 0, or null
scheduler=cosine scheduler.T_max=x => scheduler.T_max=x is text | a whole number
data=text => model=mlp fails on the first batch of data=text | task=language
    Type a model that takes tokens (model=gpt) | error.txt
task=regression => regression needs float output and target of one shape
accelerator=tpu => accelerator=tpu | Type  | accelerator=cpu
accelerator=cpu precision=tf32 => precision=tf32 needs | precision=32-true
tracking=mlflow tracking.uri=mysql://u@127.0.0.1:1/db => mysql://***@127.0.0.1:1/db cannot be opened
    No module named 'MySQLdb'. Install the package
mode=evaluate checkpoint=/no/such.pt => checkpoint=/no/such.pt | outputs/runs/<time>
mode=evaluate checkpoint=0123abcd => checkpoint=0123abcd is neither a file
precision=32-true, -m => precision=32-true, ends with a comma | precision=32-true,<value>
mode=advice => mode=advice is not known | Type mode=advise.
mode=advise precision=bf15 -m => Type precision=bf16-mixed or precision=bf16-true.
--config-dir /no/such => --config-dir=/no/such is no folder
--config-dir => --config-dir | expected one argument
adapter=lora +adapter.r=4 => adapter.r=4: | Write rank in place of r.
hydra.run.dir=/proc/nothing => /proc/nothing | hydra.run.dir=<folder>
hydra.run.dir= => hydra.run.dir= is empty | Type hydra.run.dir=<folder>
-m seed=0,1 hydra.sweep.dir= => hydra.sweep.dir= is empty | Type hydra.sweep.dir=<folder>
hydra.job.chdir=true => hydra.job.chdir=true | Leave hydra.job.chdir out
-m seed=0,1 hydra.job.chdir=true => hydra.job.chdir=true | Leave hydra.job.chdir out
-m seed=0,1 hydra.sweep.subdir=${hydra.job.override_dirname} => hydra.sweep.subdir=${hydra.job.over
    Leave hydra.sweep.subdir= out
precision=[32-true,16-mixed] => precision=[32-true,16-mixed]: type precision= once
-m precision=bf16-mixed,[32-true,16-mixed] => type precision= once, with one value
-m seed=0,0 => seed=0,0: type seed= once, with one value, or after -m with different ones
-m precision=32,32-true => precision=32-true,32-true: type precision= once
-m optimizer.lr=0.1,1e-1 => optimizer.lr=0.1,1e-1: type optimizer.lr= once
-m seed=range(0,0) => seed=range(0,0): type seed= once, with one value
-m scheduler=glob(zzz*) => scheduler=glob(zzz*): type scheduler= once, with one value
tracking=mlflow tracking.uri= => tracking.uri= is empty | leave it out
--lr 0.1 => lr=0.1 is not known | Type optimizer.lr=<value>.
-lr => lr= is not known | Type optimizer.lr=<value>.
--learning-rate=0.01 => learning_rate=0.01 is not known | Type optimizer.lr=<value>.
--batch-size 32 => batch_size=32 is not known | Type train.batch_size=<value>.
--resume x => resume=x is not known | Type checkpoint.resume=<value>.
--config x => config=x is not known | Type --config-dir <folder of your yamls>.
--fp16 model=mlp => fp16= is not known | Type precision=16-mixed or 16-true.
--gpus 2 => gpus=2 is not known | Type torchrun --nproc-per-node=<n> -m runner strategy=ddp.
--device cuda:0 => --device is no option here. Type device=cuda:0.
device=cuda => device=cuda is not known | Type accelerator=cuda accelerator.index=<n>.
--precision bf16 => --precision is no option here. Type precision=bf16.
--optimizer.lr 0.1 => --optimizer.lr is no option here. Type optimizer.lr=0.1.
--seed => --seed is no option here. Type seed=<value>.
-c => c= is not known | Type --config-dir
--cfg nosuch => cfg=nosuch is not known | Type --config-dir
-x => x= is not known | Allowed: | optimizer
""")


@pytest.mark.parametrize(("typed", "parts"), MISTAKES)
def test_a_mistake_gets_one_message(quick, typed, parts):
    if typed.startswith("accelerator=") and " " not in typed:
        from runner.core.base.accelerators import available_kinds

        if (kind := typed.removeprefix("accelerator=")) in available_kinds():
            pytest.skip(f"this machine has a {kind} device")
    quick(*typed.split(" ")).check_refused(*parts)
    assert not list(Path().glob("outputs/runs/*/result.json"))
    folders = Path().glob("outputs/runs/*")
    assert not [each for each in folders if [*each.iterdir()] == [each / ".hydra"]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "_target_: lab.Net\nhidden: [1, 2\nmore: 3\n",
            ["bad.yaml, line 3, column 5: this is", "expected ',' or ']'", "bracket"],
        ),
        ("_target_: lab.Net\n\thidden: 1\n", ["line 2, column 1", "spaces, not tabs"]),
        ("a: 1\na: 2\n", ["line 2, column 1", "found duplicate key a"]),
        ("- a\n", ["model/bad.yaml holds a list", "keys with values"]),
        ("a: '\udcff'\n", ["is not UTF-8 text"]),
        (f"a: {'[' * 5000}{']' * 5000}\n", ["nested too deeply"]),
    ],
)
def test_a_config_that_is_no_yaml(quick, tmp_path, text, parts):
    folder = tmp_path / "conf" / "model"
    folder.mkdir(parents=True)
    (folder / "bad.yaml").write_bytes(text.encode(errors="surrogateescape"))
    quick("--config-dir", "conf", "model=bad").check_refused(*parts)


SUBCOMMANDS = message_table("""
doctor precision=tf32 => doctor does not take precision=tf32 | --config-dir=...
ui precision=tf32 => ui does not take precision=tf32 | tracking.uri=... | port=...
ui port=many => port=many is no port | port=5000
ui port=0 => port=0
ui port=99999 => port=99999
ui tracking.uri=foo://x => tracking.uri=foo://x
report nowhere/at/all => nowhere/at/all
report => no sweep in outputs/sweeps
""")


@pytest.mark.parametrize(("command", "parts"), SUBCOMMANDS)
def test_subcommands_too(main, command, parts):
    done = main(*command.split()).check_refused(*parts)
    assert done.stderr.startswith("error: ")


STORES = {
    "http://host:port": ["names no server"],
    "sqlite:///letter.txt/mlflow.db": ["letter.txt/mlflow.db: "],
    "sqlite:///folder": ["folder: Is a directory"],
    "sqlite:////proc/nothing/mlflow.db": ["/proc/nothing/mlflow.db: "],
    "sqlite:///a%00b.db": ["embedded null"],
    f"sqlite:///{300 * 'x'}/mlflow.db": ["File name too long"],
    "postgresql+nosuch://host/db": ["postgresql.nosuch", "postgresql+psycopg2://"],
    "postgresql+nosuch://ann:hunter2@host:many/db": ["its port is no number"],
}


@pytest.mark.parametrize(("sweep", "uri"), crossed(["", "-m seed=0,1"], STORES))
def test_a_store_that_can_never_be_opened_is_refused_before_training(quick, tmp_path, uri, sweep):
    (tmp_path / "letter.txt").write_text("")
    (tmp_path / "folder").mkdir()
    done = quick("tracking=mlflow", *sweep.split(), f"tracking.uri={uri}").check_refused()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in STORES[uri]:
        assert part in line
    assert "Type " in line or "Install " in line
    assert "hunter2" not in done.stderr + done.stdout
    assert not list(tmp_path.glob("outputs/**/journal*"))


def test_several_problems_come_in_one_message(quick):
    done = quick(
        *"mode=fly seed=-1 +model.foo=1 optimizer._target_=no.Adam scheduler=cosine".split(),
        "scheduler.T_max=x",
    ).check_refused()
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    for line, key in zip(
        lines, ("mode", "seed", "model.foo", "optimizer", "scheduler"), strict=True
    ):
        assert line.startswith(f"error: {key}")


OWN_MISTAKES = message_table("""
model._target_=lab.nets.Half precision=16-mixed => head.weight, head.bias
    Build the model in float32 | precision=16-true
data=mine data._target_=lab.data.one_set => must return (train, val), two map-style data sets
data=mine data._target_=lab.nets.resident => lab.nets.resident takes no count
model._target_=lab.nets.Uninitialised => begin __init__ of lab.nets.Uninitialised with super()
mode=evaluate checkpoint=lab/nets.py => checkpoint=lab/nets.py is no checkpoint or is cut short
""")


@pytest.mark.parametrize(("typed", "parts"), OWN_MISTAKES)
def test_code_and_files_of_the_users_that_do_not_fit(own, typed, parts):
    own(*typed.split()).check_refused(*parts)


def test_a_checkpoint_of_another_model(quick, tmp_path):
    assert quick().rc == 0
    (run,) = tmp_path.glob("outputs/runs/*")
    done = quick("mode=evaluate", f"checkpoint={run}", "model.hidden=[8]")
    done.check_refused("does not fit the model", "leave model= out")


def test_a_folder_in_which_another_command_runs(quick, tmp_path):
    (tmp_path / "run").mkdir()
    with folder_lock(tmp_path / "run"):
        done = quick("hydra.run.dir=run")
    done.check_refused("another command is running in this folder")


TWICE = message_table("""
optimizer.lr=0.1 optimizer.lr=0.2 => optimizer.lr=0.2: type optimizer.lr= once, with one value
precision=32-true precision=16-mixed => precision=16-mixed: type precision= once, with one value
-m seed=0 seed=1 => seed=1: type seed= once, with one value, or after -m with different ones
seed=1 ++seed=2 => ++seed=2: type seed= once, with one value
hydra.run.dir=a hydra.run.dir=b => hydra.run.dir=b: type hydra.run.dir= once
""")


@pytest.mark.parametrize(("typed", "parts"), TWICE)
def test_a_key_that_is_typed_twice(main, capsys, typed, parts):
    # Not by `main`: of two words of a key the fixture types the last one alone.
    assert command_line.main(typed.split()) == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in parts)


def test_a_second_sweep_in_a_folder_is_refused(quick, tmp_path):
    assert quick("-m", "seed=0,1", "hydra.sweep.dir=swept", "hydra/launcher=basic").rc == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "swept").rglob("*")}
    done = quick("-m", "seed=0,1", "optimizer.lr=0.1", "hydra.sweep.dir=swept")
    done.check_refused("hydra.sweep.dir=swept holds another sweep", "sweep.resume=swept")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "swept").rglob("*")}


def test_the_folder_of_sweeps_that_a_yaml_fixes_is_free_for_a_single_run(quick, tmp_path):
    (tmp_path / "swept" / "0").mkdir(parents=True)
    assert quick("mode=plan", "hydra.sweep.dir=swept").rc == 0


@pytest.mark.parametrize("folder", ["swept", "swept/7"])
def test_a_run_in_the_folder_of_a_sweep_which_would_take_it_for_a_job(quick, tmp_path, folder):
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / MANIFEST).touch()
    quick(f"hydra.run.dir={folder}").check_refused(f"hydra.run.dir={folder} is a folder of a sweep")
    assert [path.name for path in tmp_path.glob("swept/*")] == [MANIFEST]


def test_a_config_of_ones_own_that_hydra_would_ignore(own, lab, root):
    mine = lab / "lab" / "conf" / "model" / "mlp.yaml"
    mine.write_text("_target_: lab.nets.Net\n")
    done = own().check_ok()
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: lab/conf/model/mlp.yaml is not used: ")
    assert str(root / "conf" / "model" / "mlp.yaml") in line
    assert line.endswith("Rename yours.")
