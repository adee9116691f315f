"""What collectives cost: as they were timed, or of hardware by latency and bandwidth (alpha-beta).

Sources: ring all-reduce, Patarasuk and Yuan 2009 (J. Parallel Distrib. Comput. 69, pages 117-124);
latencies of rings and trees as NCCL's own model counts them (src/graph/tuning.cc).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log2
from typing import NamedTuple, Protocol


class Links(Protocol):
    """What collectives cost among so many processes. `size` is of the whole tensor."""

    world: int

    def all_reduce(self, size: float) -> float: ...
    def all_gather(self, size: float) -> float: ...
    def reduce_scatter(self, size: float) -> float: ...


@dataclass(frozen=True)
class Measured:
    """Collectives as they were timed: seconds by size, straight lines between them."""

    world: int
    times: Mapping[str, Mapping[int, float]]

    def _time(self, name: str, size: float) -> float:
        if self.world == 1:
            return 0.0
        points = sorted(self.times[name].items())
        if size <= points[0][0]:
            return points[0][1]
        for (low, before), (high, after) in pairwise(points):
            if size <= high:
                return before + (after - before) * (size - low) / (high - low)
        return points[-1][1] * size / points[-1][0]

    def all_reduce(self, size: float) -> float:
        return self._time("all_reduce", size)

    def all_gather(self, size: float) -> float:
        return self._time("all_gather", size)

    def reduce_scatter(self, size: float) -> float:
        return self._time("reduce_scatter", size)


class Latency(NamedTuple):
    """Of an algorithm: once, per hop inside a node, per hop between nodes."""

    base: float
    inside: float
    between: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs: rings, and for all-reduce the better of ring and tree.

    Attributes:
        node: GPUs of one node.
        inside, between: bytes per second of a GPU, one way, within a node and out of it.
        share: of these that large messages reach.
    """

    world: int
    node: int
    inside: float
    between: float
    share: float
    ring: Latency
    tree: Latency

    @property
    def nodes(self) -> int:
        return -(-self.world // self.node)

    @property
    def bandwidth(self) -> float:
        """Of the slowest link of a ring that goes in and out of every node through all its cards:
        the cards of a node carry together what each of its GPUs passes on."""
        between = self.between * min(self.world, self.node) if self.nodes > 1 else inf
        return self.share * min(self.inside, between)

    def _pass(self, size: float) -> float:
        """Once around the ring: N - 1 hops, each with an Nth of the bytes."""
        far = self.nodes - 1
        hops = (self.world - 1 - far) * self.ring.inside + far * self.ring.between
        return hops + size * (self.world - 1) / self.world / self.bandwidth

    def _tree(self, size: float) -> float:
        """Up and down: chains within nodes, a binary tree between them."""
        near = (min(self.world, self.node) - 1) * self.tree.inside
        hops = near + log2(self.nodes) * self.tree.between
        return self.tree.base + 2 * hops + 2 * size / (0.9 * self.bandwidth)

    def all_reduce(self, size: float) -> float:
        if self.world == 1:
            return 0.0
        return min(self.ring.base + 2 * self._pass(size), self._tree(size))

    def all_gather(self, size: float) -> float:
        return self.ring.base + self._pass(size) if self.world > 1 else 0.0

    def reduce_scatter(self, size: float) -> float:
        return self.all_gather(size)
