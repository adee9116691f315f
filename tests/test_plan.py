import re

import pytest


def plan(main, *args):
    done = main("mode=plan", *args)
    assert done.rc == 0, done.stderr
    return done.stdout


def mib(text, row):
    return float(re.search(rf"{row}\s*│\s*([\d.]+) MiB", text)[1])


def test_says_what_a_run_would_hold(main):
    """MLP of 784 x 256 x 10 (with biases) in float32 with Adam's two states per element."""
    text = plan(main, "model=mlp", "data=mnist", "model.hidden=[256]")
    count = 784 * 256 + 256 + 256 * 10 + 10
    assert f"{count:,}" in text
    weights = round(count * 4 / 2**20, 1)
    assert mib(text, "weights and buffers") == weights
    assert mib(text, "gradients") == weights
    assert mib(text, "optimizer state") == round(count * 8 / 2**20, 1)


@pytest.mark.parametrize(
    ("precision", "stored", "share"), [("bf16-true", "bfloat16", 0.5), ("64-true", "float64", 2)]
)
def test_memory_follows_the_precision(main, precision, stored, share):
    base = plan(main, "model=mlp", "data=mnist", "model.hidden=[4096]")
    text = plan(main, "model=mlp", "data=mnist", "model.hidden=[4096]", f"precision={precision}")
    assert stored in text
    for row in ("weights and buffers", "gradients", "optimizer state"):
        assert mib(text, row) == pytest.approx(mib(base, row) * share, abs=0.15)


def test_neither_data_nor_tracking_nor_training(main, tmp_path):
    """MNIST's files are not there, and nothing asks for them."""
    plan(main, "model=resnet", "model.depth=50", "data=mnist")
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
    assert not (tmp_path / "data").exists()


def test_islands_and_the_loss_scale_are_named(main):
    text = plan(main, "model=resnet", "precision=16-mixed", "precision.keep_fp32=[fc]")
    assert "kept in float32: fc" in text
    assert "from 65536" in text


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "lbfgs", "adagrad"])
def test_any_optimizer(main, optimizer):
    plan(main, "model=mlp", f"optimizer={optimizer}")


def test_what_a_run_would_refuse_is_refused(main):
    for bad in ("precision.keep_fp32=[nothing]", "optimizer=lbfgs"):
        done = main("mode=plan", "precision=16-mixed", "model=mlp", bad)
        assert done.rc == 2
        assert done.stderr.startswith("error: ")
