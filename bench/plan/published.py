"""Published training speeds: what was trained, in what, on which card, and how fast."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """What a row trains.

    Attributes:
        overrides: of the command.
        rows: tokens or images of a micro-batch of one card.
        card: a yaml of conf/device/, and overrides of it.
        gpus: cards that share the weights.
        compiled: whether torch.compile fuses what is not a product.
    """

    overrides: Sequence[str]
    rows: int
    card: Sequence[str]
    gpus: int = 1
    compiled: bool = False


@dataclass(frozen=True)
class Pair:
    """Two published speeds whose ratio is predicted.

    Attributes:
        source: rows of one source are left out together.
        name: of the row.
        base: the job in the precision of `base_precision`.
        base_speed: tokens or images per second of one card.
        precision: of the other speed; its recipe is looked up.
        speed: in it.
        beside: precision of what is not converted.
        job: where it differs from the base.
        ignored: modules that were not converted.
        fuses: whether the compiler fused around the converted layers.
    """

    source: str
    name: str
    base: Job
    base_precision: str
    base_speed: float
    precision: str
    speed: float
    beside: str = "bf16-mixed"
    job: Job | None = None
    ignored: Sequence[str] = ()
    fuses: bool = False


@dataclass(frozen=True)
class Speed:
    """A published speed of one precision, whose time is predicted."""

    source: str
    name: str
    job: Job
    precision: str
    speed: float
    overrides: Sequence[str] = field(default_factory=tuple)


def gpt(layers: int, width: int, vocabulary: int, batch: int, length: int, *more: str) -> list[str]:
    """Return the overrides of a GPT whose feed-forward is four times as wide."""
    return [
        *("model=gpt", "data=synthetic_tokens", f"model.layers={layers}", f"model.width={width}"),
        *(f"model.heads={width // 128}", f"data.meta.classes={vocabulary}"),
        *(f"data.meta.input=[{length}]", f"train.batch_size={batch}", *more),
    ]


def llama(
    sizes: tuple[int, int, int, int, int], vocabulary: int, batch: int, length: int, *more: str
) -> list[str]:
    """Return the overrides of a Llama: width, feed-forward, layers, heads, key-value heads."""
    width, hidden, layers, heads, groups = sizes
    config = (
        f"hidden_size:{width},intermediate_size:{hidden},num_hidden_layers:{layers},"
        f"num_attention_heads:{heads},num_key_value_heads:{groups},vocab_size:{vocabulary},"
        f"max_position_embeddings:{length},tie_word_embeddings:false"
    )
    return [
        *("model=hf", "model.kind=causal_lm", "data=synthetic_tokens", "task=hf"),
        *(f"model.config={{model_type:llama,{config}}}", f"data.meta.classes={vocabulary}"),
        *(f"data.meta.input=[{length}]", f"train.batch_size={batch}", *more),
    ]


def mpt(layers: int, width: int, batch: int, length: int, *more: str) -> Job:
    """Return a job of llm-foundry on eight H100."""
    overrides = gpt(layers, width, 50368, batch, length, *more)
    return Job(overrides, batch * length, ("device=h100",), 8)


LLAMA_8B = (4096, 14336, 32, 32, 8)
LLAMA_70B = (8192, 28672, 80, 64, 8)
# "Per operator" checkpointing computes every second product again: as half of the blocks do.
HALF = f"train.activation_checkpointing=[{','.join(f'model.layers.{i}' for i in range(0, 32, 2))}]"
META_H100 = ("device=h100", "device.bandwidth=2400")  # HBM2e, 500 W
B200 = ("device=b200",)
RESNET = [
    *("model=torchvision", "model.name=resnet50", "data=synthetic_images", "optimizer=sgd"),
    *("data.meta.input=[3,224,224]", "data.meta.classes=1000", "train.batch_size=256"),
]


def torchao(card: Sequence[str]) -> Job:
    """Return torchao's job: Llama 3 8B, one sequence of 8192, compiled, FSDP on eight cards."""
    return Job(llama(LLAMA_8B, 128256, 1, 8192, HALF), 8192, card, 8, True)


def own(width: int, compiled: bool = False) -> Job:
    """Return the project's own measurement on an H200."""
    return Job(gpt(4, width, 50304, 16, 1024), 16384, ("device=h200",), 1, compiled)


LAST = ("lm_head",)
TITAN = Job(llama(LLAMA_8B, 128256, 2, 8192, HALF), 16384, META_H100, 8, True)
MEGATRON = {
    name: Job(
        llama(LLAMA_70B, 128256, 1, 8192, "train.activation_checkpointing=true"), 8192, card, 64
    )
    for name, card in {
        "GB200": ("device=gb200",),
        "GB300": ("device=gb200", "device.tflops.float4=14000"),
    }.items()
}
FOUNDRY = {"beside": "bf16-mixed", "ignored": ("head",)}
PAIRS = [
    # llm-foundry, scripts/train/benchmarking: FSDP, TransformerEngine with delayed scaling.
    *(
        Pair(
            "llm-foundry",
            f"MPT-1B, {name}",
            base,
            "bf16-mixed",
            a,
            "transformer-engine",
            b,
            job=job,
            **FOUNDRY,
        )
        for name, base, job, a, b in (
            ("56 x 512", mpt(24, 2048, 56, 512), None, 52275, 70315),
            ("3 and 2 x 8192", mpt(24, 2048, 3, 8192), mpt(24, 2048, 2, 8192), 29157, 32010),
            ("1 x 32768", mpt(24, 2048, 1, 32768), None, 12025, 12580),
        )
    ),
    # pytorch/ao, docs, workflows/training.md.
    *(
        Pair(
            "torchao",
            f"Llama 3 8B on {name}",
            torchao(card),
            "bf16-mixed",
            base,
            precision,
            speed,
            ignored=LAST,
            fuses=True,
        )
        for name, card, base, speeds in (
            ("H100", META_H100, 6150, {"float8-tensorwise": 7689.5, "float8-rowwise": 6768}),
            (
                "B200",
                B200,
                8307.5,
                {"float8-tensorwise": 10417, "torchao-mxfp8": 9969, "float8-rowwise": 8640.5},
            ),
        )
        for precision, speed in speeds.items()
    ),
    # pytorch/torchtitan, benchmarks of 2024-12.
    Pair(
        "torchtitan",
        "Llama 3.1 8B, 2 x 8192",
        TITAN,
        "bf16-mixed",
        6667,
        "float8-tensorwise",
        8532,
        ignored=LAST,
        fuses=True,
    ),
    # bench/results/gpu/h200.md.
    *(
        Pair(
            "own",
            f"GPT, width {width}",
            own(width, compiled),
            "bf16-mixed",
            base,
            precision,
            speed,
            beside,
        )
        for width, compiled, base, beside, speeds in (
            (
                4096,
                False,
                80073,
                "bf16-true",
                {
                    "transformer-engine": 132214,
                    "transformer-engine-block": 112576,
                    "transformer-engine-current": 127677,
                    "transformer-engine-float16": 137118,
                },
            ),
            (
                2048,
                False,
                232250,
                "bf16-true",
                {
                    "transformer-engine": 331168,
                    "transformer-engine-block": 288523,
                    "transformer-engine-current": 311914,
                    "transformer-engine-float16": 340843,
                },
            ),
            (
                2048,
                True,
                253311,
                "bf16-mixed",
                {
                    "float8-rowwise": 229618,
                    "float8-rowwise-hp": 275315,
                    "float8-tensorwise": 283659,
                },
            ),
        )
        for precision, speed in speeds.items()
    ),
    *(
        Pair(
            "own",
            f"GPT, width {width}",
            own(width),
            "bf16-mixed",
            base,
            precision,
            speed,
            precision,
        )
        for width, base, speeds in (
            (4096, 80073, {"tf32": 36894, "16-mixed": 77058, "bf16-true": 86352}),
            (2048, 232250, {"tf32": 106635, "16-mixed": 223962, "bf16-true": 251949}),
        )
        for precision, speed in speeds.items()
    ),
    # NVIDIA Deep Learning Examples, ResNet-50 v1.5.
    Pair(
        "NVIDIA examples",
        "ResNet-50 on A100",
        Job(RESNET, 256, ("device=a100-80",)),
        "bf16-mixed",
        2470,
        "tf32",
        938,
        "tf32",
    ),
    Pair(
        "NVIDIA examples",
        "ResNet-50 on V100",
        Job(RESNET, 256, ("device=v100-32",)),
        "16-mixed",
        1200,
        "32-true",
        367,
        "32-true",
    ),
    # Megatron-Bridge, archive of 26.04.01: against FP8 there, for it has no row in bfloat16.
    *(
        Pair(
            "Megatron-Bridge",
            f"Llama 3 70B on {card}",
            MEGATRON[card],
            "transformer-engine",
            base,
            precision,
            speed,
            "bf16-true",
            ignored=LAST,
        )
        for card, base, speeds in (
            ("GB200", 4224, {"transformer-engine-mxfp8": 3712, "transformer-engine-nvfp4": 4864}),
            ("GB300", 5248, {"transformer-engine-mxfp8": 4864, "transformer-engine-nvfp4": 7296}),
        )
        for precision, speed in speeds.items()
    ),
]
LORA = "adapter=lora"
SPEEDS = [
    *(
        Speed("llm-foundry", name, job, "bf16-mixed", speed)
        for name, job, speed in (
            ("MPT-1B, 56 x 512", mpt(24, 2048, 56, 512), 52275),
            ("MPT-1B, 3 x 8192", mpt(24, 2048, 3, 8192), 29157),
            ("MPT-1B, 1 x 32768", mpt(24, 2048, 1, 32768), 12025),
            ("MPT-7B", mpt(32, 4096, 6, 2048), 10643),
            ("MPT-13B", mpt(40, 5120, 2, 2048), 4792),
            (
                "MPT-30B on H100",
                mpt(48, 7168, 3, 2048, "train.activation_checkpointing=true"),
                2002,
            ),
            (
                "MPT-30B on A100",
                Job(
                    gpt(48, 7168, 50368, 3, 2048, "train.activation_checkpointing=true"),
                    6144,
                    ("device=a100-80",),
                    8,
                ),
                916,
            ),
        )
    ),
    Speed("torchao", "Llama 3 8B on H100", torchao(META_H100), "bf16-mixed", 6150),
    Speed("torchao", "Llama 3 8B on B200", torchao(B200), "bf16-mixed", 8307.5),
    Speed("torchtitan", "Llama 3.1 8B", TITAN, "bf16-mixed", 6667),
    Speed(
        "NeMo Automodel",
        "Llama 3 8B, LoRA",
        Job(llama(LLAMA_8B, 128256, 2, 4096, LORA), 8192, ("device=h100",)),
        "bf16-true",
        12473,
    ),
    Speed(
        "NeMo Automodel",
        "Qwen 2.5 7B, LoRA",
        Job(llama((3584, 18944, 28, 28, 4), 152064, 2, 4096, LORA), 8192, ("device=h100",)),
        "bf16-true",
        14110,
    ),
    *(
        Speed(
            "own",
            f"GPT, width {width}{', compiled' if compiled else ''}",
            own(width, compiled),
            "bf16-mixed",
            speed,
        )
        for width, compiled, speed in (
            (4096, False, 80073),
            (4096, True, 85920),
            (2048, False, 232250),
            (2048, True, 253311),
        )
    ),
    Speed(
        "NVIDIA examples",
        "ResNet-50 on A100",
        Job(RESNET, 256, ("device=a100-80",)),
        "bf16-mixed",
        2470,
    ),
    Speed(
        "NVIDIA examples",
        "ResNet-50 on V100",
        Job(RESNET, 256, ("device=v100-32",)),
        "16-mixed",
        1200,
    ),
]
