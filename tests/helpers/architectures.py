"""Real architectures with tiny configs and random weights, and data that fits each of them.

Every model takes one tensor and returns logits, which is what a run asks of a model. Widths are
multiples of 16, so that FP8 formats can hold the linear layers.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
import torchvision
import transformers
from tiny_configs import GPT2_SIZES, LAYERS, T5_SIZES, TEXT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation.lraspp import LRASPP

from runner.core.loop.task import Task
from runner.training.tasks.tensor_task import mean, stack, wide

TOKENS = 64
LENGTH = 12
CLASSES = 16
IGNORED = -100
EXAMPLES = 8

MODELS: list[nn.Module] = []
"""Models that `build` made, the newest last: a run converts its model in place."""


class Logits(nn.Module):
    """A network whose output is an object with logits, called with one tensor."""

    def __init__(self, net: nn.Module, decoder: bool = False) -> None:
        super().__init__()
        self.net, self.decoder = net, decoder

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits of the inputs."""
        if not self.decoder:
            return self.net(inputs).logits
        ids = inputs
        if inputs.is_floating_point():  # a spectrogram; the decoder starts from fixed tokens
            ids = torch.arange(LENGTH, device=inputs.device).expand(len(inputs), LENGTH)
        return self.net(inputs, decoder_input_ids=ids).logits


class SegmentationLogits(nn.Module):
    """torchvision's segmentation networks return a dict."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, C, H, W] of images [B, 3, H, W]."""
        return self.net(images)["out"]


class Segmentation(Task):
    """Cross entropy per pixel over logits [B, C, H, W] and integer targets [B, H, W]."""

    quality = "val/loss"
    direction = "min"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats."""
        return F.cross_entropy(output, target)

    def totals(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [summed cross entropy in nats, pixels]."""
        losses = F.cross_entropy(output, target, reduction="none").to(wide(output))
        return stack(losses.sum(), target.numel())

    def summarise(self, totals: list[float]) -> dict[str, float]:
        """Return val/loss in nats."""
        return {"val/loss": mean(*totals)}


TRANSFORMER = {**TEXT, "vocab_size": TOKENS}
STARTS_AT_0 = {"decoder_start_token_id": 0, "use_cache": False}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
GPT2 = {**GPT2_SIZES, **ENDS, "vocab_size": TOKENS, "use_cache": False}
T5 = {**T5_SIZES, "vocab_size": TOKENS, **STARTS_AT_0}
WHISPER = {
    "vocab_size": TOKENS,
    "d_model": 32,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_mel_bins", "max_source_positions"), 16),
    "max_target_positions": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), None),
    **STARTS_AT_0,
}


def of_transformers(
    config: str, model: str, sizes: dict[str, Any], decoder: bool = False
) -> Callable[[], nn.Module]:
    """Return a function that makes a network of transformers, by the names of its classes."""

    def make() -> nn.Module:
        net = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        return Logits(net, decoder)

    return make


def of_timm(name: str, **keywords: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a network of timm."""
    return partial(timm.create_model, name, num_classes=CLASSES, **keywords)


def _timm_mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(num_classes=CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=32)


def _tv_swin() -> nn.Module:
    sizes = {"embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2]}
    return torchvision.models.SwinTransformer(
        patch_size=[4, 4], window_size=[4, 4], num_classes=CLASSES, **sizes
    )


def _tv_efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 16, 16, 1), MBConvConfig(4, 3, 2, 16, 32, 1)]
    return torchvision.models.EfficientNet(
        blocks, dropout=0.0, num_classes=CLASSES, last_channel=32
    )


def _tv_segmentation() -> nn.Module:
    low = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    high = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU())
    backbone = IntermediateLayerGetter(
        nn.Sequential(OrderedDict(low=low, high=high)), {"low": "low", "high": "high"}
    )
    return SegmentationLogits(LRASPP(backbone, 16, 32, CLASSES, inter_channels=16))


def _ids(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids = torch.randint(TOKENS, (EXAMPLES, LENGTH), generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < 0.7
    masked[:, 0] = False
    return ids, ids.roll(-1, 1).masked_fill(masked, IGNORED)


def _spectrograms(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(EXAMPLES, 16, 32, generator=generator), _ids(generator)[1]


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(EXAMPLES, 3, 32, 32, generator=generator)
    return images, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def _pixels(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(EXAMPLES, 3, 32, 32, generator=generator)
    return images, torch.randint(CLASSES, (EXAMPLES, 32, 32), generator=generator)


LANGUAGE = "runner.training.tasks.language.Language"
CLASSIFICATION = "runner.training.tasks.classification.Classification"
SEGMENTATION = f"{__name__}.Segmentation"


@dataclass(frozen=True)
class Architecture:
    """How to make a model, its data (inputs and targets), and the path of its task."""

    model: Callable[[], nn.Module]
    tensors: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    task: str


VIT = {**LAYERS, "image_size": 32, "patch_size": 8, "num_labels": CLASSES}
SMALL_SWIN = {"embed_dim": 16, "depths": (1, 2), "num_heads": (1, 2)}
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
TEXT_MODELS = {
    "gpt2": of_transformers("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": of_transformers(
        "LlamaConfig", "LlamaForCausalLM", {**TRANSFORMER, "use_cache": False}
    ),
    "bert": of_transformers("BertConfig", "BertForMaskedLM", TRANSFORMER),
    "albert": of_transformers(
        "AlbertConfig", "AlbertForMaskedLM", {**TRANSFORMER, "embedding_size": 16}
    ),
    "t5": of_transformers("T5Config", "T5ForConditionalGeneration", T5, True),
}
WHISPER_MODEL = of_transformers(
    "WhisperConfig", "WhisperForConditionalGeneration", WHISPER, decoder=True
)
IMAGE_MODELS = {
    "vit": of_transformers("ViTConfig", "ViTForImageClassification", VIT),
    "timm-resnet": of_timm("resnet18", channels=(16, 16, 32, 32), stem_width=16),
    "timm-vit": of_timm("vit_tiny_patch16_224", **SMALL_VIT),
    "timm-swin": of_timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, **SMALL_SWIN),
    "timm-convnext": of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    "timm-mixer": _timm_mixer,
    "torchvision-swin": _tv_swin,
    "torchvision-efficientnet": _tv_efficientnet,
}
ARCHITECTURES = {
    **{name: Architecture(make, _ids, LANGUAGE) for name, make in TEXT_MODELS.items()},
    "whisper": Architecture(WHISPER_MODEL, _spectrograms, LANGUAGE),
    **{name: Architecture(make, _images, CLASSIFICATION) for name, make in IMAGE_MODELS.items()},
    "torchvision-segmentation": Architecture(_tv_segmentation, _pixels, SEGMENTATION),
}


def build(name: str) -> nn.Module:
    """Make the model of an architecture, without dropout, and remember it in MODELS."""
    model = ARCHITECTURES[name].model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    MODELS.append(model)
    return model


def data(name: str) -> tuple[TensorDataset, TensorDataset]:
    """Return (train, val) of an architecture: EXAMPLES each, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    tensors = ARCHITECTURES[name].tensors
    return TensorDataset(*tensors(generator)), TensorDataset(*tensors(generator))
