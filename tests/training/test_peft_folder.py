"""An adapter as peft's own folder: peft loads it onto the base, which then computes as the run."""

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from run_folders import read_json
from safetensors import safe_open
from safetensors.torch import load_file
from states import CPU
from tiny_configs import tiny_config
from torch import nn

from runner.precision import registry
from runner.training.adapters import CHANGES_BASE, Lora
from runner.training.pretrained_folder import write_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # peft asks transformers
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),  # a packed layer of GPT-2 is a Linear
]
TOKENS = torch.randint(40, (3, 7), generator=torch.Generator().manual_seed(0))


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(tiny_config("gpt2", vocab_size=40)).eval()


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(tiny_config("llama", vocab_size=40)).eval()


def mixtral():
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.MixtralConfig(**sizes, **heads, num_hidden_layers=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config).eval()


class Mixture(nn.Module):
    """Experts of no library, whose first weight is [experts, in, out]."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(3, 7, 8))
        self.second = nn.Parameter(torch.randn(3, 2, 8))

    def forward(self, x):
        inner = torch.relu(torch.einsum("ti,eio->eto", x, self.first))
        return torch.einsum("eto,edo->etd", inner, self.second).sum(0)


def mixture():
    torch.manual_seed(0)
    return nn.Sequential(Float(), Mixture()).eval()


class Float(nn.Module):
    def forward(self, x):
        return x.float()


class Normed(nn.Module):
    """A model of no library, whose statistics run while an adapter trains."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.norm(self.layer(x.float())))


def normed():
    torch.manual_seed(0)
    return Normed().eval()


def adapted(make, precision="32-true", **settings):
    """A converted model with an adapter whose trainable numbers have moved, and its precision."""
    policy = registry.load_precision(precision)
    model, _ = policy.convert(make(), CPU)
    lora = Lora(rank=4, alpha=6.0, **settings)
    lora.split_experts(model, {"1.first": True, "1.second": False})
    lora.add(model, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    return model.eval(), policy


@torch.no_grad()
def logits(model):
    found = model(TOKENS)
    return getattr(found, "logits", found)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (gpt2, {}),
        (llama, {}),
        (gpt2, {"train": ["transformer.ln_f", "transformer.h.1.attn.c_attn"]}),
        (llama, {"modules": ["*.q_proj"], "dropout": 0.1}),
        (normed, {"train": ["head"]}),
        (gpt2, {"use_dora": True}),
        (gpt2, {"use_rslora": True}),
        (gpt2, {"init": "pissa"}),
        (gpt2, {"init": "olora", "use_rslora": True, "train": ["transformer.ln_f"]}),
        (gpt2, {"init": "pissa_niter_16", "use_dora": True}),
        (llama, {"init": "gaussian", "use_dora": True, "dropout": 0.1}),
        (llama, {"init": "pissa", "use_dora": True, "use_rslora": True}),
        (llama, {"init": "pissa", "train": ["model.layers.0.mlp.up_proj"]}),
        (llama, {"init": "olora", "modules": ["*.q_proj"]}),
        (mixtral, {"modules": ["*.1.mlp.experts", "model.layers.0.self_attn.q_proj"]}),
        (mixtral, {"modules": ["*.down_proj"], "dropout": 0.1, "use_rslora": True}),
        (mixture, {"modules": ["1"]}),
        (mixture, {"modules": ["1.first"], "init": "pissa"}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_peft_loads_the_folder_and_computes_the_same_logits(tmp_path, make, settings):
    model, _ = adapted(make, **settings)
    if make is normed:
        model.norm.running_mean += 1
    write_adapter(model, model.state_dict(), tmp_path, {"kind": "causal_lm", "path": "models/tiny"})
    loaded = PeftModel.from_pretrained(make(), tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-5, atol=1e-6)
    assert (logits(make()) - logits(model)).abs().max() > 0.001
    config = read_json(tmp_path / "adapter_config.json")
    # With twice the rank where what the additions started with is subtracted.
    factor = 2 if settings.get("init") in CHANGES_BASE else 1
    assert config["r"] == 4 * factor
    assert config["lora_alpha"] == 6 * (factor**0.5 if settings.get("use_rslora") else factor)
    assert config["base_model_name_or_path"] == "models/tiny"
    for key in ("use_dora", "use_rslora"):
        assert config[key] is settings.get(key, False)


@pytest.mark.parametrize(
    ("init", "of_peft"), [("default", True), ("gaussian", "gaussian"), ("pissa", True)]
)
def test_the_folder_says_how_the_additions_started(tmp_path, init, of_peft):
    model, _ = adapted(normed, init=init, modules=["layer"])
    write_adapter(model, model.state_dict(), tmp_path, {}, init)
    config = read_json(tmp_path / "adapter_config.json")
    assert config["init_lora_weights"] == of_peft
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["adapter.init"] == init


def test_a_folder_from_a_start_in_the_base_has_the_weights_that_peft_converts_to(tmp_path):
    """By peft's own way: the untrained adapter is saved, and subtracted from the trained one."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["c_attn"], init_lora_weights="pissa")
    theirs = get_peft_model(gpt2(), config)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "start")
    model, _ = adapted(gpt2, init="pissa", modules=["*.c_attn"])
    trained = {f"base_model.model.{name}": value for name, value in model.state_dict().items()}
    own = {name: value for name, value in trained.items() if ".start_" not in name}
    theirs.load_state_dict(own, strict=True)
    start = {"path_initial_model_for_weight_conversion": str(tmp_path / "start")}
    theirs.save_pretrained(tmp_path / "theirs", **start)
    write_adapter(model, model.state_dict(), tmp_path / "ours", {}, "pissa")
    folders = (tmp_path / "ours", tmp_path / "theirs")
    found, wanted = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.abs(), wanted[name].abs(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_an_adapter_of_packed_weights_fits_the_packed_and_the_unpacked_base(tmp_path, make):
    model, policy = adapted(make, "bnb-nf4")
    write_adapter(model, model.state_dict(), tmp_path, {})
    packed = PeftModel.from_pretrained(policy.convert(make(), CPU)[0], tmp_path).eval()
    torch.testing.assert_close(logits(packed), logits(model), rtol=1e-5, atol=1e-6)
    base = make()
    for name, module in model.named_modules():
        if hasattr(module, "unpacked_weight"):
            layer = base.get_submodule(name.removesuffix(".base_layer"))
            layer.weight = nn.Parameter(module.unpacked_weight())
    plain = PeftModel.from_pretrained(base, tmp_path).eval()
    # The packed layers compute in bfloat16, the plain ones in float32.
    error = (logits(plain) - logits(model)).norm() / logits(model).norm()
    assert error < 0.02


def test_a_trained_parameter_of_the_model_itself_is_named(tmp_path):
    model, _ = adapted(normed)
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="scale trains, and is in no module"):
        write_adapter(model, model.state_dict(), tmp_path / "adapter", {})
    assert not (tmp_path / "adapter").exists()
