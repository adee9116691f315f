"""A hook of the user's generates text with a language model; MLflow shows it and its picture."""

import pytest
from quiet_mlflow import client_of, runs_in
from run_folders import write_page

pytest.importorskip("transformers")
pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.slow

GPT2 = "{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, vocab_size: 64, eos_token_id: 0}"


@pytest.fixture
def run_of_docs(main, tmp_path):
    """A command in a folder that has the hook of the page."""
    write_page("own-code.md", tmp_path, "lab/samples.py")
    return main


def test_the_text_and_the_picture_are_among_the_artifacts(run_of_docs, tmp_path, empty_store):
    uri = empty_store(tmp_path / "mlflow.db")
    words = (
        "model=hf model.kind=causal_lm data=synthetic_tokens data.vocab=64 task=language "
        "data.count=40 data.context=12 train.batch_size=8 precision=bf16-mixed train.max_steps=2 "
        "train.eval_every=2 task.after_evaluation=lab.samples.generate tracking.log_model=false "
        "hydra.run.dir=run"
    ).split()
    run_of_docs(
        *words,
        f"model.config={GPT2}",
        "task.metrics={top5: {_target_: torchmetrics.classification.MulticlassAccuracy, "
        "num_classes: 64, top_k: 5}}",
        f"tracking.uri={uri}",
    ).check_ok()
    client = client_of(uri)
    (run,) = runs_in(client)
    folder = "samples/step-00000002"
    found = {file.path: file.file_size for file in client.list_artifacts(run.info.run_id, folder)}
    assert found.keys() == {f"{folder}/text.txt", f"{folder}/tokens.png"}
    assert all(found.values())
    assert run.data.metrics["val/distinct_tokens"] >= 1
    assert 0 <= run.data.metrics["val/top5"] <= 1
