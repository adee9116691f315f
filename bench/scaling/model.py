"""Time and memory of one training step by strategy and precision: a model, in plain Python.

A step is compute (given in seconds, or as FLOPs over an achieved rate), copies (bytes over a
memory bandwidth) and collectives (links.py). What runner/strategy does decides which collectives
there are, how large and when. Sizes in bytes, times in seconds, bandwidths in bytes per second.

Sources: buckets, Li et al., arXiv:2006.15704; sharding, Rajbhandari et al., arXiv:1910.02054 and
Zhao et al., arXiv:2304.11277.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bench.scaling.links import Links

MIB = 2**20
FIRST_BUCKET = 1 * MIB  # of DistributedDataParallel
REDUCED = 4  # bytes of a gradient element on the wire: strategies add in float32


@dataclass(frozen=True)
class Net:
    """A model: equal blocks, and a root (embeddings, head, stem) that is gathered on its own.

    Attributes:
        blocks: how many; block, root: parameters of each, and of the rest.
        flops: of an example, forward and backward.
        kept: roughly how many activation elements an example keeps for the backward: of the dtype
            that computes, of the dtype that weights are stored in, and of float32.
    """

    name: str
    blocks: int
    block: float
    root: float
    flops: float
    kept: tuple[float, float, float]

    @property
    def params(self) -> float:
        return self.blocks * self.block + self.root


@dataclass(frozen=True)
class Kind:
    """What of a precision costs time and memory.

    Attributes:
        stored: bytes of a weight, of its gradient and of each of Adam's two averages.
        compute: bytes of an activation.
        cast: bytes of the copy of a weight that the forward makes and the backward reads; 0: none.
        scaled: there is a loss scale, so gradients are unscaled and found-inf is shared.
    """

    stored: int
    compute: int
    cast: int = 0
    scaled: bool = False


KINDS = {
    "32-true": Kind(4, 4),
    "tf32": Kind(4, 4),
    "bf16-mixed": Kind(4, 2, 2),
    "16-mixed": Kind(4, 2, 2, scaled=True),
    "bf16-true": Kind(2, 2),
    "float8-tensorwise": Kind(4, 2, 2),
    "transformer-engine": Kind(2, 2, 2),  # FP8 weights and their transposes
}


class Work(NamedTuple):
    """What one process computes in a step, in seconds; update: of all weights."""

    forward: float
    backward: float
    update: float


class Step(NamedTuple):
    """Seconds of a step.

    Attributes:
        compute: forward, backward and this process's part of the update.
        copies: into and out of buckets and gathered units.
        collectives: all of them.
        hidden: those of them that run beside the compute.
    """

    compute: float
    copies: float
    collectives: float
    hidden: float

    @property
    def exposed(self) -> float:
        return self.collectives - self.hidden

    @property
    def total(self) -> float:
        return self.compute + self.copies + self.exposed


def wire(net: Net, kind: Kind, strategy: str, world: int) -> float:
    """Bytes that each process sends in a step, large world: DDP 2 x gradients, FSDP two gathers of
    the stored weights and one reduce-scatter of the gradients."""
    width = 2 * REDUCED if strategy == "ddp" else 2 * kind.stored + REDUCED
    return net.params * width * (world - 1) / world


def copied(net: Net, kind: Kind, strategy: str) -> float:
    """Bytes that a process reads and writes beside the step of one process alone, where it has no
    company, too."""
    grad = kind.stored
    if strategy == "ddp":
        narrow = 2 * (grad + REDUCED) if grad < REDUCED else 0  # to float32, and back
        return net.params * (2 * grad + narrow + 2 * REDUCED)  # into the bucket; divided there
    return net.params * (2 * 2 * kind.stored + grad + REDUCED)  # out of two gathers, into one sum


def buckets(net: Net, kind: Kind, cap: float) -> Iterator[tuple[float, float]]:
    """Of DDP, in the order in which backward fills them: share of the backward that is done by
    then, bytes on the wire. A tied or input embedding is ready last, and is never split."""
    whole = net.blocks * net.block
    done, limit = 0.0, float(FIRST_BUCKET)
    while done < whole:
        size = min(limit / kind.stored, whole - done)
        done += size
        yield done / whole, size * REDUCED
        limit = cap
    yield 1.0, net.root * REDUCED


@dataclass(frozen=True)
class Case:
    """What a step is of.

    Attributes:
        memory: bytes per second that copies reach.
        overlaps: collectives run beside the compute; not so where it needs the same cores.
    """

    net: Net
    kind: Kind
    work: Work
    links: Links
    memory: float
    overlaps: bool


def ddp(case: Case, cap: float = 25.0) -> Step:
    """Each bucket is reduced once it is full and the one before it is through; cap in MiB."""
    work, links = case.work, case.links
    sizes = buckets(case.net, case.kind, cap * MIB)
    found = [(at, links.all_reduce(size)) for at, size in sizes]
    end = 0.0
    for at, seconds in found:
        end = max(end, at * work.backward) + seconds
    collectives = sum(seconds for _, seconds in found)
    hidden = collectives + work.backward - max(end, work.backward) if case.overlaps else 0.0
    copies = copied(case.net, case.kind, "ddp") / case.memory
    return Step(sum(work), copies, collectives, hidden)


def fsdp(case: Case, again: bool = True) -> Step:
    """Gathers run ahead of the compute, reductions behind it, all in one queue; again: the root,
    too, is gathered a second time."""
    net, kind, links = case.net, case.kind, case.links
    gather, root = (links.all_gather(n * kind.stored) for n in (net.block, net.root))
    reduce, last = (links.reduce_scatter(n * REDUCED) for n in (net.block, net.root))
    forward, backward = case.work.forward / net.blocks, case.work.backward / net.blocks
    queue = now = root
    for _ in range(net.blocks):
        queue += gather
        now = max(now, queue) + forward
    queue = ready = max(now, queue) + again * root + gather
    for left in range(net.blocks, 0, -1):
        start = max(now, ready)
        now = start + backward
        if left > 1:
            queue = ready = max(queue, start) + gather
        queue = max(queue, now) + reduce
    passes = case.work.forward + case.work.backward
    collectives = net.blocks * (2 * gather + reduce) + (1 + again) * root + last
    hidden = collectives + passes - queue - last if case.overlaps else 0.0
    flag = links.all_reduce(4) if kind.scaled else 0.0
    copies = copied(net, kind, "fsdp") / case.memory
    return Step(passes + case.work.update / links.world, copies, collectives + flag, hidden)


STRATEGIES = {"ddp": ddp, "fsdp": fsdp}


def memory(net: Net, kind: Kind, strategy: str, world: int, examples: float) -> dict[str, float]:
    """Bytes of a device at the widest point of a step, AdamW, by what takes them."""
    held = world if strategy == "fsdp" else 1
    weights = net.params * kind.stored / held
    unit = max(net.block, net.root)
    found = {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
        "casts": net.params * kind.cast,
        "activations": examples
        * sum(n * width for n, width in zip(net.kept, (kind.compute, kind.stored, 4), strict=True)),
        "buffers": 0.0,
    }
    if strategy == "fsdp":  # the root and two blocks gathered; a unit's gradient, and that summed
        gathered = (net.root + 2 * net.block) * kind.stored
        found["buffers"] = gathered + unit * (kind.stored + REDUCED)
    elif kind.stored < REDUCED:
        found["buffers"] = net.params * REDUCED  # every bucket widened, where none is through yet
    return found
