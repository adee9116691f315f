"""Real architectures, tiny: the report's converted layers are those that run, found by hooks of
the test's own, and packed weights are read by their layers alone."""

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from runner.modes.trial_forward import BYPASSED_REASON, CODES_REASON, build_proven_model
from runner.precision import registry
from runner.precision.conversion import ROOT_NAME, is_converted
from runner.training.model import BuiltModel

CPU = torch.device("cpu")
PRECISIONS = {
    "bnb-nf4": {},
    "bnb-int8": {},
    "bnb-int8-training": {},
    "float8-tensorwise": {"emulate": True},
    "transformer-engine": {"emulate": True},
}
TEXT = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BERT = {
    **TEXT,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


class Call(nn.Module):
    """A model with the way in which it is called."""

    def __init__(self, model, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, x):
        return self.call(self.model, x)


def tokens():
    return torch.randint(64, (2, 8))


def image():
    return torch.randn(2, 3, 32, 32)


def sound():
    return torch.randn(2, 16, 32)


def bert():
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    return Call(model, lambda m, x: m(x, attention_mask=torch.ones_like(x)).pooler_output)


def bert_with_checkpoints():
    made = bert()
    made.model.activation_checkpointing_enable()
    return made


def albert():
    config = transformers.AlbertConfig(**BERT, embedding_size=16)
    return Call(transformers.AlbertModel(config), lambda m, x: m(x).pooler_output)


def llama():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BERT))
    return Call(model, lambda m, x: m(x).logits)


def vit():
    sizes = {k: v for k, v in BERT.items() if k not in TEXT}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    return Call(transformers.ViTModel(config), lambda m, x: m(x).pooler_output)


def t5():
    config = transformers.T5Config(
        **TEXT, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return Call(model, lambda m, x: m(x, decoder_input_ids=x).logits)


def whisper():
    sizes = {
        f"{part}_{what}": 2
        for part in ("encoder", "decoder")
        for what in ("layers", "attention_heads")
    }
    config = transformers.WhisperConfig(
        **TEXT,
        **sizes,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=16,
        max_target_positions=16,
        decoder_start_token_id=0,
    )
    return Call(
        transformers.WhisperModel(config),
        lambda m, x: m(x, decoder_input_ids=torch.ones(2, 4, dtype=torch.long)).last_hidden_state,
    )


def swin():
    return torchvision.models.SwinTransformer(
        [4, 4], 32, [1, 1], [2, 2], [4, 4], num_classes=16, stochastic_depth_prob=0.0
    )


def timm_swin():
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        embed_dim=32,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        num_classes=16,
    )


def encoder():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 16))
    return Call(model, lambda m, x: m(x.mT[..., :16]))


def lora():
    from runner.training.adapters import Lora

    made = bert()
    made.after = lambda model, dtype: Lora(rank=2).add(model, dtype)
    return made


MODELS = {
    bert: tokens,
    bert_with_checkpoints: tokens,
    lora: tokens,
    albert: tokens,
    llama: tokens,
    vit: image,
    t5: tokens,
    whisper: sound,
    swin: image,
    timm_swin: image,
    encoder: sound,
}


def proven(name, make_model):
    """A built model with its precision and its report."""
    precision = registry.load_precision(name, **PRECISIONS[name])
    torch.manual_seed(0)
    x = MODELS[make_model]()

    def make():
        torch.manual_seed(0)
        model, report = precision.convert(make_model(), CPU)
        if hasattr(model, "after"):
            model.after(model, precision.storage)
        return BuiltModel(model, report, 0)

    made = build_proven_model(make, precision, CPU, 0, lambda: x)
    return made, precision, x


def runs(model, precision, x):
    """Names of the converted modules whose forward runs, by hooks; what comes out."""
    ran = set()
    for name, module in model.named_modules():
        if is_converted(module):
            plain = name.replace(".base_layer", "") or ROOT_NAME
            module.register_forward_hook(lambda *_, name=plain: ran.add(name))
    with torch.no_grad(), precision.forward(CPU):
        out = model.eval()(precision.cast(x))
    return ran, out


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("make_model", MODELS, ids=lambda make: make.__name__)
def test_what_counts_as_converted_is_what_runs(make_model, name):
    made, precision, x = proven(name, make_model)
    ran, out = runs(made.model, precision, x)
    done = {row.module for row in made.report.modules if row.done}
    assert done == ran
    assert done
    assert out.float().isfinite().all()
    torch.manual_seed(0)
    plain, _ = registry.load_precision("32-true").convert(make_model(), CPU)
    with torch.no_grad():
        wanted = plain.eval()(x)
    assert (out.float() - wanted).norm() < 0.35 * wanted.norm()


@pytest.mark.parametrize("name", PRECISIONS)
def test_torchvisions_swin_passes_its_attentions_layers_by(name):
    made, _, _ = proven(name, swin)
    skipped = {
        row.module.rpartition(".")[2] for row in made.report.modules if row.why == BYPASSED_REASON
    }
    assert skipped == {"qkv", "proj"}


def test_t5_casts_to_the_dtype_of_a_packed_weight_unless_it_is_int8():
    for name, count in (("bnb-nf4", 4), ("bnb-int8", 0), ("float8-tensorwise", 0)):
        made, _, _ = proven(name, t5)
        skipped = [row.module for row in made.report.modules if row.why == CODES_REASON]
        assert len(skipped) == count, name
        assert all(module.endswith(".wo") for module in skipped)


def test_an_embedding_may_read_the_weight_that_it_shares_with_an_idle_layer():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
            self.head.weight, self.out = self.table.weight, nn.Linear(32, 16)

        def forward(self, x):
            return self.out(self.table(x))

    precision = registry.load_precision("float8-tensorwise", emulate=True)
    x = tokens()
    made = build_proven_model(
        lambda: BuiltModel(*precision.convert(Idle(), CPU), 0), precision, CPU, 0, lambda: x
    )
    assert dict(precision.bypassed) == {}
    assert str(made.report) == "1/2"
