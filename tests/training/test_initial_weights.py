"""init.weights: files of the field's formats, what is left out of them, and what is refused."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from states import CPU
from torch import nn

from runner.core.base.errors import ConfigError
from runner.core.config.schema import InitSpec, RunSpec
from runner.core.record import checkpoint_file
from runner.modes.execution import read_initial_weights
from runner.precision import registry
from runner.training.initial_weights import shortest_patterns
from runner.training.model import ModelBuilder


class Net(nn.Module):
    """A body of two blocks, and a head."""

    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.body(x))


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.head = nn.Linear(8, 5, bias=False)
        self.head.weight = self.embedding.weight


def start(where, precision="32-true", target="Net", **init):
    node = {"_target_": f"{__name__}.{target}"}
    spec = RunSpec(model=node, init=InitSpec(weights=str(where), **init))
    torch.manual_seed(5)
    policy = registry.load_precision(precision)
    return ModelBuilder(spec, policy, start=read_initial_weights(spec)).build(CPU)


def weights(target=Net, seed=1, **keywords):
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in target(**keywords).state_dict().items()}


def refused(where, **keywords):
    with pytest.raises(ConfigError) as caught:
        start(where, **keywords)
    return str(caught.value)


def as_folder(path, state):
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(state, path / "model.safetensors")


def as_shards(path, state):
    path.mkdir()
    names = [*state]
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, path / file)
    files = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def as_bin_folder(path, state):
    path.mkdir()
    torch.save(state, path / "pytorch_model.bin")


FORMATS = {
    "net.safetensors": lambda path, state: save_file(state, path),
    "net.pth": lambda path, state: torch.save(state, path),
    "old.pt": lambda path, state: torch.save(state, path, _use_new_zipfile_serialization=False),
    "wrapped.ckpt": lambda path, state: torch.save({"epoch": 3, "state_dict": state}, path),
    "model.bin": lambda path, state: torch.save({"model": state, "optimizer": {}}, path),
    "folder": as_folder,
    "shards": as_shards,
    "bins": as_bin_folder,
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_every_format_are_loaded(tmp_path, name):
    state = weights()
    FORMATS[name](tmp_path / name, state)
    built = start(tmp_path / name)
    for key, value in built.model.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert built.initial.describe().startswith(f"weights: 9 of 9 tensors from {tmp_path / name} (")


def test_weights_are_cast_as_those_of_a_checkpoint_are(tmp_path):
    state = {name: v.bfloat16() if v.ndim else v for name, v in weights().items()}
    save_file(state, tmp_path / "net.safetensors")
    for precision, dtype in (("32-true", torch.float32), ("64-true", torch.float64)):
        model = start(tmp_path / "net.safetensors", precision).model
        assert torch.equal(model.head.weight, state["head.weight"].to(dtype))


def test_plain_weights_are_packed_after_they_were_loaded(tmp_path):
    state = weights()
    save_file(state, tmp_path / "net.safetensors")
    model = start(tmp_path / "net.safetensors", "bnb-nf4").model
    error = model.head.unpacked_weight() - state["head.weight"]
    assert error.norm() < 0.1 * state["head.weight"].norm()


def test_packed_weights_are_loaded_as_they_are_or_unpacked(tmp_path):
    save_file(weights(), tmp_path / "net.safetensors")
    packed = start(tmp_path / "net.safetensors", "bnb-nf4").model
    save_file(packed.state_dict(), tmp_path / "packed.safetensors")
    again = start(tmp_path / "packed.safetensors", "bnb-nf4").model
    assert torch.equal(again.head.codes, packed.head.codes)
    plain = start(tmp_path / "packed.safetensors").model
    assert torch.equal(plain.head.weight, packed.head.unpacked_weight())
    refusal = refused(tmp_path / "packed.safetensors", precision="bnb-int8")
    assert "holds weights packed as bnb-nf4" in refusal
    broken = {name: v for name, v in packed.state_dict().items() if name != "head.weight.absmax"}
    save_file(broken, tmp_path / "broken.safetensors")
    refusal = refused(tmp_path / "broken.safetensors")
    assert "holds a broken weight: head.weight: it is packed, and its absmax is missing" in refusal


def test_a_skipped_head_stays_fresh(tmp_path):
    state = weights(classes=7)
    save_file({**state, "extra": torch.ones(2)}, tmp_path / "net.safetensors")
    built = start(tmp_path / "net.safetensors", skip=["head", "extra"])
    torch.manual_seed(5)
    assert torch.equal(built.model.head.weight, Net().head.weight)
    assert torch.equal(built.model.body[0].weight, state["body.0.weight"])
    line = "; fresh: head.weight, head.bias; not used: extra"
    assert built.initial.describe().endswith(line)


def test_what_does_not_fit_is_listed_with_what_to_type(tmp_path):
    state = weights(classes=7)
    del state["body.0.bias"]
    save_file({**state, "extra.a": torch.ones(2)}, tmp_path / "net.safetensors")
    message = refused(tmp_path / "net.safetensors")
    for part in (
        "1 missing in the file (body.0.bias)",
        "1 unexpected in the file (extra.a)",
        "2 of another shape or kind (head.",
        "head.weight: [7, 64], in the model [3, 64]",
        "6 of the model's 9 tensors fit",
        "Type 'init.skip=[body.0.bias,extra,head]'",
    ):
        assert part in message
    start(tmp_path / "net.safetensors", skip=["body.0.bias", "extra", "head"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32], ids=str)
def test_codes_are_not_loaded_as_the_values_that_they_stand_for(tmp_path, dtype):
    state = weights()
    state["body.0.weight"] = (state["body.0.weight"] * 100).to(dtype)
    save_file(state, tmp_path / "net.safetensors")
    message = refused(tmp_path / "net.safetensors")
    name = str(dtype).removeprefix("torch.")
    assert "1 of another shape or kind (body.0.weight: [" in message
    assert f"] {name}, in the model [" in message


@pytest.mark.parametrize(
    ("change", "typed"),
    [
        (lambda name: f"module.{name}", "{module:null}"),
        (lambda name: f"_orig_mod.net.{name}", "{_orig_mod.net:null}"),
        (lambda name: name.replace("body", "backbone"), "{backbone:body}"),
    ],
)
def test_a_prefix_that_would_fit_is_offered_and_fits(tmp_path, change, typed):
    state = {change(name): value for name, value in weights().items()}
    save_file(state, tmp_path / "net.safetensors")
    assert f"Type 'init.rename={typed}': then 9 fit." in refused(tmp_path / "net.safetensors")
    old, _, new = typed.strip("{}").partition(":")
    built = start(tmp_path / "net.safetensors", rename={old: None if new == "null" else new})
    assert len(built.initial.loaded) == 9


def test_a_prefix_that_the_file_lacks_is_offered_and_fits(tmp_path):
    body = {k.removeprefix("body."): v for k, v in weights().items() if k.startswith("body.")}
    save_file(body, tmp_path / "net.safetensors")
    assert "Type 'init.rename={*:body}': then 7 fit." in refused(tmp_path / "net.safetensors")
    message = refused(tmp_path / "net.safetensors", rename={"*": "body"})
    assert "2 missing in the file (head.weight, head.bias)" in message
    assert "Type 'init.skip=[head]'" in message
    start(tmp_path / "net.safetensors", rename={"*": "body"}, skip=["head"])


def test_a_second_rename_is_offered_behind_the_first(tmp_path):
    state = {f"module.net.{name}": value for name, value in weights().items()}
    save_file(state, tmp_path / "net.safetensors")
    message = refused(tmp_path / "net.safetensors", rename={"module": None})
    assert "Type 'init.rename={module:null,net:null}': then 9 fit." in message
    start(tmp_path / "net.safetensors", rename={"module": None, "net": None})


def test_a_tied_weight_may_be_in_the_file_once(tmp_path):
    save_file({"embedding.weight": torch.ones(5, 8)}, tmp_path / "net.safetensors")
    model = start(tmp_path / "net.safetensors", target="Tied").model
    assert torch.equal(model.head.weight, torch.ones(5, 8))
    message = refused(tmp_path / "net.safetensors", target="Tied", skip=["head"])
    assert "head.weight out, which shares its values with embedding.weight" in message


def test_counters_of_batch_norms_may_be_missing(tmp_path):
    state = {k: v for k, v in weights().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "net.pth")
    assert start(tmp_path / "net.pth").model.body[1].num_batches_tracked == 0


class Bomb:
    def __reduce__(self):
        return (print, ("executed",))


def cut_safetensors(path):
    save_file(weights(), path)
    path.write_bytes(path.read_bytes()[:-200])


def cut_torch(path):
    torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:-200])


def index(path, text):
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(text)


def folder_with(name):
    def make(path):
        path.mkdir()
        (path / name).write_text("{}")

    return make


def folder_of_files(path):
    path.mkdir()
    save_file({"a": torch.ones(1)}, path / "weights.safetensors")


ADAM = torch.optim.Adam([torch.ones(1)])
LORA = {"q.lora_A.weight": torch.ones(1)}


WITH_BASE = {**LORA, "q.base_layer.weight": torch.ones(1)}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.gguf", lambda p: p.write_bytes(b"GGUF" + bytes(20)), "is a GGUF file"),
        ("a.h5", lambda p: p.write_bytes(b"\x89HDF" + bytes(20)), "is an HDF5 file"),
        ("a.pt", lambda p: p.write_bytes(b""), "is empty. Give a .safetensors file"),
        ("a.onnx", lambda p: p.write_bytes(b"\x08" * 20), "is in no format of weights"),
        ("a.safetensors", cut_safetensors, "is cut short or damaged (incomplete metadata, file "),
        ("a.pt", cut_torch, "cut short or damaged"),
        ("a.pt", lambda p: torch.save({"a": Bomb()}, p), "holds Python objects (print)"),
        ("a.pt", lambda p: p.write_bytes(pickle.dumps(Bomb())), "pickle of another program, which"),
        ("a.pt", lambda p: torch.save([1], p), "holds a list and no state dict"),
        ("a.pt", lambda p: torch.save({"lr": 1}, p), "holds no state dict; its keys: lr"),
        ("optimizer.pt", lambda p: torch.save(ADAM.state_dict(), p), "holds the state of an optim"),
        ("a.pt", lambda p: torch.jit.script(nn.Linear(1, 1)).save(p), "is a TorchScript program"),
        ("a.safetensors", lambda p: save_file(LORA, p), "is a LoRA adapter"),
        ("lora", folder_with("adapter_config.json"), "is a LoRA adapter"),
        ("a.safetensors", lambda p: save_file(WITH_BASE, p), "with its adapter apart. Of a run of"),
        ("bare", folder_with("config.json"), "has a config.json and no weights"),
        ("files", folder_of_files, "Name one file: weights.safetensors"),
        ("nothing", lambda p: p.mkdir(), "no checkpoint is there"),
        ("index", lambda p: index(p, "{}"), "is no index of shards"),
        ("index", lambda p: index(p, '{"weight_map": {"a": "../a"}}'), "outside its folder"),
        ("index", lambda p: index(p, '{"weight_map": {"a": "b"}}'), "1 are missing: b"),
        ("a.safetensors", lambda p: save_file({"x": torch.ones(1)}, p), "of another model"),
    ],
)
def test_what_is_no_weights_of_the_model_is_refused(tmp_path, name, make, message, capsys):
    path = tmp_path / name
    make(path)
    assert message in refused(path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("init", "message"),
    [
        ({"skip": ["haed"]}, "init.skip: haed matches nothing in the model or in"),
        ({"rename": {"bdy": "body"}}, "begins with bdy. Names begin with: body, head."),
        ({"rename": {"head": "body"}, "skip": ["h"]}, "init.skip: h matches nothing"),
        ({"rename": {"body.1": "body.0"}}, "gives two tensors of"),
    ],
)
def test_a_skip_or_rename_of_nothing_is_refused(tmp_path, init, message):
    save_file(weights(), tmp_path / "net.safetensors")
    assert message in refused(tmp_path / "net.safetensors", **init)


def test_a_pattern_covers_a_module_only_where_all_of_it_is_meant():
    every = ["a.0.w", "a.0.b", "a.1.w", "c.w"]
    assert shortest_patterns(["a.0.w", "a.0.b", "c.w"], every) == ["a.0", "c"]
    assert shortest_patterns(["a.0.w"], every) == ["a.0.w"]


def test_weights_alone_are_no_checkpoint_to_evaluate(tmp_path):
    save_file(weights(), tmp_path / "net.safetensors")
    torch.save(weights(), tmp_path / "net.pt")
    for name in ("net.safetensors", "net.pt"):
        with pytest.raises(ConfigError, match=r"holds weights alone.*init\.weights="):
            checkpoint_file.load(tmp_path / name)
