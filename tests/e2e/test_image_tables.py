"""Images in tables and weights of local files, from the command line."""

import io
import re
import shlex

import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet as pq
from run_folders import read_json
from torchvision.models import get_model

TINY = (
    "tracking=none train.max_steps=2 train.batch_size=4 data.size=16 data.meta.input=[3,16,16] "
    "checkpoint.final=false hydra.run.dir=run"
).split()
PHOTOS = (
    "data=hf data.path=photos data.image=image data.label=label data.meta.classes=2 "
    "task=classification"
).split()


@pytest.fixture
def photos(tmp_path):
    """The same images as photos.parquet and as the folder photos of datasets."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    encoded = []
    for i in range(20):
        file = io.BytesIO()
        Image.new("RGB", (20, 24), (255 * (i % 2), 0, 9 * i)).save(file, "PNG")
        encoded.append(file.getvalue())
    kinds = [i % 2 for i in range(20)]
    pq.write_table(pa.table({"photo": encoded, "kind": kinds}), tmp_path / "photos.parquet")
    rows = {"image": [{"bytes": data, "path": None} for data in encoded], "label": kinds}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "photos")
    return tmp_path


@pytest.mark.parametrize("data", ["parquet", "hf"])
def test_the_commands_of_the_docs_train(photos, root, main, data):
    page = (root / "docs" / "vision.md").read_text()
    (command,) = re.findall(rf"    python -m runner (.*data={data} .*)\n", page)
    given = [word for word in shlex.split(command) if not word.startswith("data.meta.input")]
    main(*given, *TINY, "model=mlp").check_ok()
    metrics = read_json(photos / "run" / "result.json")["metrics"]
    assert set(metrics) == {"val/loss", "val/accuracy"}


def test_local_weights_for_other_classes_are_tuned(photos, main):
    torch.save(get_model("mobilenet_v3_small").state_dict(), photos / "pretrained.pth")
    given = (*PHOTOS, "model=torchvision", *TINY)
    main(*given, "model.weights=pretrained.pth", "train.max_steps=1").check_ok()
    other = main(*given, "model.weights=pretrained.pth", "model.name=resnet18")
    other.check_refused("weights=pretrained.pth do not fit the model: it lacks conv1.weight")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "data.path=stanfordnlp/imdb",
            'load_dataset("stanfordnlp/imdb").save_to_disk("data/imdb")',
        ),
        ("data.image=photo", "photos has no column photo; it has image, label"),
        ("data.label=null", "Type data.label=<name>"),
        ("data.val=2", "leaves an empty split"),
    ],
)
def test_what_cannot_be_read_gets_one_message(photos, main, words, message):
    main(*PHOTOS, *TINY, "model=mlp", words).check_refused(message)
