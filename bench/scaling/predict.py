"""What the model says of 8, 64 and 1024 H200s: assumptions, networks, and tables of predictions.

Nothing here has been run on these machines.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from bench.scaling.links import Cluster, Latency
from bench.scaling.model import (
    KINDS,
    REDUCED,
    STRATEGIES,
    Case,
    Kind,
    Net,
    Step,
    Work,
    memory,
)

US = 1e-6
GB, TB = 1e9, 1e12
VOCABULARY = 50257
WORLDS = (8, 64, 1024)
PEAK = {"32-true": 67 * TB, "tf32": 494.7 * TB, "half": 989.5 * TB}  # FLOP/s, dense
SHARE = {"32-true": 0.7, "tf32": 0.43, "half": 0.43}  # of the peak that a GPT reaches
FP8_GAIN = 1.25  # time of a bfloat16 step over that of an FP8 one
MEMORY = 4.8 * TB  # bytes per second
MEMORY_SHARE = 0.8
SPEED = MEMORY * MEMORY_SHARE
CAPACITY, USABLE = 141 * GB, 0.9
A100_IMAGES = {"tf32": 938.0, "half": 2470.0}  # ResNet-50 per second
A100_MEMORY = 2.04 * TB
CLUSTER = Cluster(
    1,
    8,
    inside=450 * GB,
    between=50 * GB,
    share=0.8,
    ring=Latency(10 * US, 1.9 * US, 4.0 * US),
    tree=Latency(4.4 * US, 1.2 * US, 8.5 * US),
)


class Source(NamedTuple):
    """An assumption: what, how much, and on whose word."""

    what: str
    value: str
    why: str


ASSUMED = [
    Source(
        "peak, dense",
        "67 float32, 495 TF32, 989 bfloat16 and float16 TFLOP/s",
        "H200 SXM datasheet (which lists the tensor cores' with sparsity, twice that)",
    ),
    Source(
        "share of it that a GPT reaches",
        f"{SHARE['half']:.2f}; float32 {SHARE['32-true']}",
        "GPT-2 124M at 498k tokens/s on one H200, bfloat16, compiled (a public script, one "
        "reading); MPT-7B 0.46 on H100s (llm-foundry); for TF32 and float32 a guess",
    ),
    Source(
        "FP8 step against bfloat16",
        f"{FP8_GAIN} times as fast",
        "MPT-1B on H100s 1.35 at T=512, 1.10 at T=8k (llm-foundry); Llama3-8B 1.25 (torchao)",
    ),
    Source(
        "ResNet-50",
        "A100's images/s times 2.35, the ratio of the memories",
        "938 TF32, 2470 AMP (NVIDIA DeepLearningExamples); its time goes to memory, not FLOPs",
    ),
    Source(
        "memory",
        f"4.8 TB/s, of which {MEMORY_SHARE} is reached; 141 GB, {USABLE} usable",
        "datasheet; the rest for the context, NCCL and gaps: a guess",
    ),
    Source(
        "links",
        f"450 GB/s each way in a node of 8, 50 GB/s per GPU out of it, {CLUSTER.share} "
        "of it reached",
        "NVLink 900 GB/s in both directions; 400 Gb/s NDR InfiniBand, a card "
        "per GPU; the share is a guess",
    ),
    Source(
        "latency",
        "ring 10 us + 1.9 per hop in a node, 4 between; tree 4.4 us + 2 (7 x 1.2 + "
        "log2(nodes) x 8.5)",
        "NCCL's own model, src/graph/tuning.cc at 01afd20, LL128",
    ),
    Source(
        "overlap",
        "collectives cost nothing while compute runs",
        "Li et al. 2020, Zhao et al. 2023; really they take units and bandwidth",
    ),
    Source(
        "examples per device",
        "GPT-2 32 x 1024 tokens, 1.3B 8 x 2048, 7B 2 x 2048, 256 images",
        "constant, so train.batch_size grows with the devices (weak scaling)",
    ),
    Source(
        "FP8's copies of weights",
        "2 bytes per weight on every device",
        "float8-tensorwise: autocast's; transformer-engine: FP8 and transpose; a guess",
    ),
    Source("optimizer", "AdamW, fused; train.accumulate=1; no clipping", "the default"),
]


def gpt(name: str, layers: int, width: int, context: int, vocabulary: int = VOCABULARY) -> Net:
    """models/gpt.py. FLOPs of a token: 6 x weights + 12 x layers x T x width (Chowdhery et al.,
    arXiv:2204.02311, appendix B); activations are counted by hand, as attention keeps no T x T."""
    block = 12 * width**2 + 13 * width
    root = (vocabulary + context) * width + 2 * width
    weights = layers * block + vocabulary * width
    flops = context * (6 * weights + 12 * layers * context * width)
    kept = (
        context * (15 * layers * width + vocabulary),
        context * 2 * layers * width,
        context * 2 * vocabulary,
    )
    return Net(name, layers, block, root, flops, kept)


RESNET = Net("ResNet-50", 16, 23.5e6 / 16, 2.06e6, 24.6e9, (22e6, 0, 0))
NETS = {
    gpt("GPT-2 124M", 12, 768, 1024): 32,
    gpt("GPT 1.3B", 24, 2048, 2048): 8,
    gpt("GPT 7B", 32, 4096, 2048): 2,
    RESNET: 256,
}
"""With examples per device."""


def rate(net: Net, precision: str) -> float:
    """FLOP/s that one H200 reaches."""
    width = precision if precision in PEAK else "half"
    if net is RESNET and width != "32-true":
        return A100_IMAGES[width] * net.flops * MEMORY / A100_MEMORY
    gain = FP8_GAIN if precision in ("float8-tensorwise", "transformer-engine") else 1.0
    return PEAK[width] * SHARE[width] * gain


def work(net: Net, precision: str, examples: float) -> Work:
    """One H200's step alone. Beside the FLOPs: weights and gradients cast (mixed), AdamW's seven
    passes, the norms' one, and two for the loss scale."""
    kind, speed = KINDS[precision], SPEED
    flops = net.flops * examples / rate(net, precision)
    cast = net.params * (4 + 2) / speed if kind.cast and kind.stored == 4 else 0.0
    passes = 7 + 1 + (2 if kind.scaled else 0)
    update = passes * net.params * kind.stored / speed
    return Work(flops / 3 + cast, flops * 2 / 3 + cast, update)


def predict(net: Net, precision: str, strategy: str, world: int, examples: float) -> Step:
    kind, links = KINDS[precision], replace(CLUSTER, world=world)
    alone = work(net, precision, examples)
    return STRATEGIES[strategy](Case(net, kind, alone, links, SPEED, True))


def taken(net: Net, precision: str, strategy: str, world: int, examples: float) -> float:
    return sum(memory(net, KINDS[precision], strategy, world, examples).values())


def per_parameter(kind: Kind) -> float:
    """Bytes of DDP for each weight: it, its gradient, two averages, the cast copy, and a narrow
    gradient's float32 one, as long as it is under way."""
    return 4 * kind.stored + kind.cast + (REDUCED if kind.stored < REDUCED else 0)


def largest(kind: Kind) -> float:
    """Weights at which DDP fits no device any more, before any activation."""
    return CAPACITY * USABLE / per_parameter(kind)


class Row(NamedTuple):
    """A prediction by strategy and world."""

    net: Net
    precision: str
    examples: int
    alone: float  # seconds of one device without collectives
    steps: dict[tuple[str, int], Step]
    bytes: dict[tuple[str, int], float]

    def fits(self, strategy: str, world: int) -> bool:
        return self.bytes[strategy, world] <= CAPACITY * USABLE


def rows() -> Iterator[Row]:
    for net, examples in NETS.items():
        for precision in KINDS:
            if net is RESNET and precision in ("float8-tensorwise", "transformer-engine"):
                continue  # convolutions are not converted
            where = [(strategy, world) for strategy in STRATEGIES for world in WORLDS]
            steps = {(s, n): predict(net, precision, s, n, examples) for s, n in where}
            sizes = {(s, n): taken(net, precision, s, n, examples) for s, n in where}
            alone = sum(work(net, precision, examples))
            yield Row(net, precision, examples, alone, steps, sizes)
