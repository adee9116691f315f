"""runner.run, sweep, advise and load do in Python what the command line does."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from hydra import compose, initialize_config_dir
from run_folders import read_json
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import runner
from runner.config.hydra_plugins import VERSION_BASE
from runner.core.base.errors import ConfigError
from runner.core.base.stop_signals import Stopped
from runner.core.config.invocation import Invocation
from runner.sweeps.sweep_resume import resume_command

QUICK = ["model=mlp", "model.hidden=[16]", "train.max_steps=3", "train.log_every=2"]
UNTRACKED = [*QUICK, "tracking=none"]
FEW = ["train.max_steps=3", "tracking=none"]
INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
LABELS = (INPUTS.sum(1) > 0).long() + (INPUTS[:, 0] > 1).long()
DATA = (TensorDataset(INPUTS[:64], LABELS[:64]), TensorDataset(INPUTS[64:], LABELS[64:]))


class Net(nn.Module):
    """A model of three classes."""

    def __init__(self, classes=3):
        super().__init__()
        self.linear = nn.Linear(8, classes)

    def forward(self, inputs):
        return self.linear(inputs)


def uncopyable():
    """A model that holds a result of its weights."""
    net = Net()
    net.scale = net.linear.weight * 2
    return net


LOADERS = tuple(DataLoader(part, batch_size=16) for part in DATA)


@pytest.fixture(autouse=True)
def _in_folder(main):
    """The working directory and the environment of the test's own command."""


def run(*words, **options):
    return runner.run([*FEW, *words], quiet=True, **options)


def test_compose_returns_the_spec_that_run_takes():
    spec = runner.compose([*UNTRACKED, "precision=bf16"])
    assert isinstance(spec, runner.RunSpec)
    assert spec.precision["name"] == "bf16-mixed"
    result = runner.run(spec, out="here", quiet=True)
    assert (result.label, result.steps) == ("bf16-mixed MLP digits", 3)
    assert result.folder == str(Path("here").absolute())


def test_run_equals_the_command(main):
    result = runner.run([*UNTRACKED, "precision=16-mixed"], out="api", quiet=True)
    assert main(*UNTRACKED, "precision=16-mixed", "hydra.run.dir=cli").rc == 0
    theirs = runner.load("cli")
    assert result.metrics == theirs.metrics
    assert result.label == theirs.label == "16-mixed mlp digits"
    columns = ["train/loss", "train/grad_norm", "loss_scale/value"]
    pandas.testing.assert_frame_equal(result.history()[columns], theirs.history()[columns])


def test_a_run_prints_nothing_when_it_is_quiet(capfd):
    run("model=mlp")
    assert capfd.readouterr() == ("", "")


def test_history_has_a_row_for_each_step():
    frame = run("precision=16-mixed", model=Net(), data=DATA).history()
    assert frame.index.name == "step"
    assert [*frame.index] == [0, 1, 2, 3]
    assert frame.loc[1:, "loss_scale/value"].tolist() == [65536.0] * 3
    assert frame["train/loss"].notna().sum() == 3
    assert frame["seconds"].is_monotonic_increasing


def test_objects_stay_as_they_are_and_every_run_starts_from_them():
    net = Net()
    before = net.linear.weight.clone()
    first, second = (run("precision=32-true", model=net, data=DATA) for _ in range(2))
    assert torch.equal(net.linear.weight, before)
    assert first.metrics == second.metrics
    net.load_state_dict(first.state_dict())
    assert not torch.equal(net.linear.weight, before)


def test_a_run_of_objects_equals_a_loop_written_by_hand():
    torch.manual_seed(3)
    net = Net()
    words = ["data.shuffle=false", "train.batch_size=32", "train.max_steps=4"]
    result = run(
        *words,
        model=net,
        data=DATA,
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for begin in (0, 32, 0, 32):
        part = slice(begin, begin + 32)
        loss = nn.functional.cross_entropy(net(INPUTS[part]), LABELS[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert result.history()["train/loss"].dropna().tolist() == losses
    assert torch.equal(result.state_dict()["linear.weight"], net.linear.weight)


def test_functions_and_classes_stand_for_what_they_return():
    result = run(
        "seed=1", model=Net, data=lambda: DATA, loss=nn.CrossEntropyLoss, optimizer=torch.optim.SGD
    )
    assert result.label == "32-true Net lambda"
    torch.manual_seed(1)
    weights = Net().state_dict()
    one_step = run("seed=1", "train.max_steps=1", "scheduler=constant", model=Net, data=DATA)
    assert not torch.equal(one_step.state_dict()["linear.weight"], weights["linear.weight"])


def test_a_built_in_model_takes_its_sizes_from_data_objects():
    result = run("model=mlp", data=DATA)
    assert result.label == "32-true mlp TensorDataset"


def test_a_collator_makes_the_batches():
    def doubled(examples):
        inputs, labels = torch.utils.data.default_collate(examples)
        return inputs * 2, labels

    plain = run(model=Net(), data=DATA)
    other = run(model=Net(), data=DATA, collate=doubled)
    assert plain.metrics != other.metrics


def test_callbacks_are_called_under_the_names_of_their_classes():
    class LossWatch(runner.RunCallback):
        def __init__(self):
            self.losses = []

        def on_steps(self, records, run):
            self.losses += [record.loss for record in records]
            run.log({"count": len(self.losses)})

    watch = LossWatch()
    history = run(model=Net(), data=DATA, callbacks=[watch, LossWatch]).history()
    assert history["train/loss"].dropna().tolist() == watch.losses
    assert history["loss_watch/count"].max() == history["loss_watch_2/count"].max() == 3


def test_no_job_of_a_sweep_sees_what_a_callback_or_a_loss_gathered_in_another():
    seen = []

    class Counter(runner.RunCallback):
        def __init__(self):
            self.steps = 0

        def on_steps(self, records, run):
            self.steps += len(records)

        def on_end(self, end, run):
            seen.append(self.steps)

    class CountingLoss(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output, target):
            self.calls += 1
            return super().forward(output, target)

    counter, loss = Counter(), CountingLoss()
    runner.sweep([*FEW, "seed=0,1"], model=Net(), data=DATA, callbacks=[counter], loss=loss)
    assert seen == [3, 3]
    assert (counter.steps, loss.calls.item()) == (0, 0)


def test_a_folder_that_holds_a_run_is_not_used_again():
    run(model=Net(), data=DATA, out="same")
    for call in (run, runner.sweep):
        with pytest.raises(ConfigError, match="out=same holds a run already"):
            call(*([FEW] if call is runner.sweep else []), model=Net(), data=DATA, out="same")


def test_a_new_run_never_finds_the_checkpoints_of_another_one(main):
    words = [*UNTRACKED, "hydra.run.dir=used"]
    assert main(*words, "train.max_steps=4").rc == 0
    assert main(*words, "train.max_steps=2", "seed=1").rc == 0
    fresh = runner.run([*UNTRACKED, "train.max_steps=2", "seed=1"], out="fresh", quiet=True)
    used = runner.load("used")
    assert used.steps == 2
    for name, value in fresh.state_dict().items():
        assert torch.equal(used.state_dict()[name], value)
    assert used.history()["train/loss"].equals(fresh.history()["train/loss"])


def test_averaged_weights_are_those_that_the_metrics_are_of():
    words = ["train.ema=0.5", "train.max_steps=8"]
    averaged = run(*words, model=Net(), data=DATA)
    net = Net()
    net.load_state_dict(averaged.state_dict())
    loss = nn.functional.cross_entropy(net(INPUTS[64:]), LABELS[64:]).item()
    assert averaged.metrics["val/loss"] == pytest.approx(loss, abs=1e-6)


def test_keys_of_a_specs_data_stay_beside_data_objects():
    spec = runner.compose([*FEW, "data.shuffle=false"])
    net = Net()
    given = runner.run(spec, quiet=True, model=net, data=DATA)
    typed = run("data.shuffle=false", model=net, data=DATA)
    assert given.metrics == typed.metrics


def test_a_sweep_that_was_moved_is_read_where_it_lies():
    sweep = runner.sweep([*FEW, "seed=0,1"], model=Net(), data=DATA, out="before")
    sweep.folder.rename("after")
    moved = runner.load("after")
    assert [len(result.history()) for result in moved.runs] == [4, 4]
    assert moved.runs[0].folder == str(Path("after/0").absolute())


def test_a_job_without_its_folder_names_its_store_only_where_the_command_does():
    sweep = runner.sweep([*FEW, "seed=0,1"], model=Net(), data=DATA, out="partly")
    path = sweep.folder / "0" / "result.json"
    text = read_json(path)
    path.write_text(json.dumps({**text, "run_id": "r1", "tracking_uri": "http://127.0.0.1:9"}))
    job = runner.load("partly").runs[0]
    assert "runner ui &#x27;tracking.uri=&lt;its store&gt;" in job._repr_html_()
    shutil.rmtree("partly/0")
    with pytest.raises(ConfigError, match=r"Type runner.load\(<its MLflow id>, uri=<its store>"):
        job.history()


def test_a_run_that_was_stopped_says_how_it_is_resumed():
    class Interrupt(runner.RunCallback):
        def on_steps(self, records, run):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped) as error:
        run("train.log_every=1", model=Net(), data=DATA, out="stopped", callbacks=[Interrupt()])
    objects = "model=..., data=..., callbacks=..."
    hint = f"Resume with: runner.run(['checkpoint.resume=stopped'], {objects})"
    assert str(error.value) == f"Stopped by SIGINT. {hint}"
    with pytest.raises(ConfigError, match="stopped holds a run without a result"):
        runner.load("stopped")


def test_the_record_names_the_call_that_repeats_the_run():
    result = run("precision=bf16-mixed", model=Net(), data=DATA)
    facts = read_json(Path(result.folder, "environment.json"))
    words = [*FEW, "precision=bf16-mixed"]
    assert facts["command"] == [f"runner.run({words!r}, model=..., data=...)"]


def test_a_stopped_run_is_resumed_with_the_objects_given_again():
    net = Net()
    words = ["train.max_steps=6", "data.shuffle=false"]
    stopped = run(*words, "train.max_seconds=1e-6", model=net, data=DATA)
    assert stopped.steps < 6
    resume = [f"checkpoint.resume={stopped.folder}", "tracking=none", "train.max_steps=6"]
    with pytest.raises(ConfigError, match=r"give it again: runner.run\(\[...\], \w+=<the object>"):
        runner.run(resume, quiet=True)
    resumed = runner.run([*resume, "train.max_seconds=null"], quiet=True, model=net, data=DATA)
    assert resumed.folder == stopped.folder
    whole = run(*words, model=net, data=DATA)
    ours, theirs = (result.history()["train/loss"].dropna() for result in (resumed, whole))
    assert ours.tolist() == theirs.tolist()


def test_a_checkpoint_is_evaluated_with_the_objects_given_again():
    trained = run(model=Net(), data=DATA)
    words = ["mode=evaluate", f"checkpoint={trained.folder}", "tracking=none"]
    evaluated = runner.run(words, quiet=True, model=Net(), data=DATA)
    assert evaluated.metrics == trained.metrics


def test_mode_plan_measures_a_model_object():
    assert run("mode=plan", "precision=bf16-true", model=Net(), data=DATA).status == "finished"


@pytest.mark.parametrize(
    ("words", "objects", "message"),
    [
        (["model=mlp"], {"model": Net()}, "model=mlp was typed, and model= is an object"),
        (["model.hidden=[3]"], {"model": Net()}, "model.hidden=[3] was typed, and model= is"),
        (["data.root=x"], {"data": DATA}, "data.root=x was typed, and data= is an object"),
        (["optimizer.lr=1"], {"optimizer": torch.optim.SGD}, "optimizer.lr=1 was typed"),
        ([], {"model": 3}, "model= is an object of type int, which cannot be called. Give a t"),
        ([], {"model": lambda: 3}, "model=lambda returned an object of type int. Give a torch"),
        ([], {"data": DATA[0]}, "data= is an object of type TensorDataset. Give a tuple of dat"),
        ([], {"data": (DATA[0],)}, "must return"),
        ([], {"data": LOADERS}, 'runner.run(["train.batch_size=16", ...], data='),
        ([], {"model": uncopyable()}, "model=Net cannot be copied: "),
        ([], {"model": uncopyable()}, "Give a function that builds it, as in model=lambda: Net"),
        ([], {"callbacks": [Net]}, "callbacks=[Net] is no callback. Derive it from"),
        ([], {"callbacks": Net}, "callbacks= is an object of type type. Give a list of callbacks."),
        ([], {"loss": 3}, "loss= is an object of type int, which cannot be called."),
        ([3], {}, "3 is of type int. Give overrides as texts, as in 'precision=16-mixed'."),
        (["-m"], {}, "-m is an option of the command line. Give overrides only (key=value);"),
        (["seed=0,1"], {}, "seed=0,1 lists several values. Call runner.sweep([...]) for a run"),
        (["mode=advise"], {}, "mode=advise describes several runs. Call runner.advise([...])."),
        (["sweep=search"], {}, "sweep=search describes several runs. Call runner.sweep([...])."),
        (["precision=fp9"], {}, "precision=fp9 is not known. "),
    ],
)
def test_bad_input_is_one_message_before_anything_runs(words, objects, message):
    with pytest.raises(ConfigError) as error:
        runner.run([*FEW, *words], **{"data": DATA, "model": Net(), **objects} if objects else {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_one_text_in_place_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"Give a list of overrides, as in \['precision=16'\]"):
        runner.run("precision=16")


def test_objects_leave_no_option_behind():
    run(model=Net(), data=DATA)
    with pytest.raises(ConfigError) as error:
        runner.compose(["model=Net"])
    assert "Net," not in str(error.value).partition("Allowed")[2]


def test_the_callers_own_hydra_stays_as_it_was(tmp_path):
    (tmp_path / "own.yaml").write_text("mine: 3")
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        runner.compose(["model=mlp"])
        assert compose("own").mine == 3


def test_a_sweep_returns_its_jobs_and_their_tables():
    sweep = runner.sweep(
        [*UNTRACKED, "precision=32-true,bf16-mixed", "seed=0,1", "hydra/launcher=basic"]
    )
    assert sweep.exit_status == 0
    assert [result.label for result in sweep.runs][:2] == ["32-true seed=0", "32-true seed=1"]
    assert sweep.table()["precision"].tolist() == ["32-true"] * 2 + ["bf16-mixed"] * 2
    history = sweep.history()
    assert history.index.names == ["label", "step"]
    assert history.loc["bf16-mixed seed=1"]["train/loss"].notna().sum() == 3
    assert "bf16-mixed" in sweep.conclusion
    loaded = runner.load(sweep.folder)
    assert isinstance(loaded, runner.SweepResult)
    assert loaded.conclusion == sweep.conclusion
    assert "<iframe" in loaded._repr_html_()


def test_the_summary_of_a_sweep_has_the_numbers_of_its_answer():
    words = ["precision=32-true,bf16-mixed", "seed=0,1"]
    sweep = runner.sweep([*FEW, *words], model=Net, data=DATA)
    table = sweep.summary().set_index("precision")
    answer = read_json(sweep.folder / "report.json")["answer"]
    for name in ("32-true", "bf16-mixed"):
        row = table.loc[name]
        ratios = ("speed_ratio", "equal_loss_speed_ratio", "memory_ratio")
        for key in ("gap", "gap_half_width", *ratios):
            expected = answer.get(f"answer/{key}/{name}")
            assert row[key] == expected or (expected is None and pandas.isna(row[key]))
        assert row["verdict"] == answer[f"verdict/{name}"]
        qualities = [run.objective for run in sweep.runs if run.precision == name]
        assert row[["seeds", "mean"]].tolist() == [2, pytest.approx(sum(qualities) / 2)]
    assert "bf16-mixed" in sweep.summary().to_latex()
    assert repr(sweep) == f"{sweep.conclusion}\n{sweep.folder}"


@pytest.mark.parametrize("function", [runner.run, runner.sweep, runner.advise])
def test_an_argument_that_is_mistyped_is_named(function):
    with pytest.raises(ConfigError, match=rf"{function.__name__} takes no modle=. Type model=\."):
        function(FEW, modle=Net, data=DATA)


def test_hints_in_a_notebook_are_calls(monkeypatch):
    result = run(model=Net, data=DATA)
    assert Path(result.folder).is_absolute()
    invocation = Invocation()
    assert invocation.resume_text("a") == "python -m runner checkpoint.resume=a"
    monkeypatch.setattr("runner.core.config.invocation.in_notebook", lambda: True)
    assert invocation.resume_text("a") == "runner.run(['checkpoint.resume=a'])"
    monkeypatch.setattr("runner.core.base.terminal.in_notebook", lambda: True)
    assert str(resume_command("a")) == "runner.sweep(['sweep.resume=a'])"


def test_a_sweep_over_objects_starts_every_job_from_them():
    net = Net()
    before = net.linear.weight.clone()
    sweep = runner.sweep([*FEW, "train.log_every=1,2", "seed=0"], model=net, data=DATA)
    first, second = sweep.runs
    assert first.metrics == second.metrics
    assert torch.equal(net.linear.weight, before)


def test_a_sweep_with_a_failed_job_returns_the_others():
    words = [*FEW, "precision=32-true", "optimizer.lr=0.1,1e30", "guard.non_finite=stop"]
    sweep = runner.sweep(words, model=Net(), data=DATA)
    assert sweep.exit_status == 1
    assert [result.status for result in sweep.runs] == ["finished", "failed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precision=nope"], "precision=nope is not known."),
        (["seed=0,1", "checkpoint.resume=last"], "checkpoint.resume resumes one run."),
        (["mode=advise", "sweep=search"], "mode=advise"),
    ],
)
def test_a_sweep_that_cannot_run_raises_and_prints_nothing(words, message, capfd):
    with pytest.raises(ConfigError) as error:
        runner.sweep([*FEW, *words, "hydra/launcher=basic"])
    assert message in str(error.value)
    assert "error" not in capfd.readouterr().err


@pytest.mark.parametrize("where", ["nowhere", "."])
def test_loading_what_is_no_run_is_refused(where):
    with pytest.raises(ConfigError, match="Give"):
        runner.load(where)


def test_advise_returns_a_verdict_on_a_model_object():
    advice = runner.advise(
        ["precision=32-true,bf16-mixed", "advise.steps=4", "advise.seeds=3", "tracking=none"],
        model=Net,
        data=DATA,
    )
    assert {verdict.name for verdict in advice.verdicts} == {"32-true", "bf16-mixed"}
    assert advice.recommendation is not None
    answer, folder = repr(advice).split("\n")
    assert "32-true" in answer
    assert (Path(folder) / "advise.json").is_file()
    summary = runner.load(folder).summary()
    assert set(summary["precision"]) == {"32-true", "bf16-mixed"}


def test_the_public_names_are_listed_and_others_are_unknown():
    assert {"run", "sweep", "advise", "compose", "load"} <= set(dir(runner))
    with pytest.raises(AttributeError, match="has no attribute 'train'"):
        _ = runner.train


def test_a_sweep_is_the_first_call_of_a_process(tmp_path, root):
    """Whatever other call would have set up is not there."""
    words = ["precision=bf16-mixed", "seed=0", "train.max_steps=1", "tracking=none"]
    code = f"import runner; print(runner.sweep({['model=mlp', 'data=digits', *words]!r}))"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bf16-mixed finished: val/accuracy" in done.stdout
