"""runner.sweep.advisor.minimal_set: the smallest healing set, found with few tries."""

from itertools import combinations

import pytest

from runner.sweep.advisor.minimal_set import find_minimal_set

TREE = {
    "": ["stem", "blocks", "head"],
    "stem": [],
    "blocks": ["blocks.0", "blocks.1", "blocks.2"],
    "blocks.0": ["blocks.0.attn", "blocks.0.mlp"],
    "blocks.1": ["blocks.1.attn", "blocks.1.mlp"],
    "blocks.2": ["blocks.2.attn", "blocks.2.mlp"],
    "head": [],
}
LEAVES = [name for name, parts in TREE.items() if name and not parts] + [
    f"blocks.{i}.{part}" for i in range(3) for part in ("attn", "mlp")
]


def covers(found: tuple[str, ...], leaf: str) -> bool:
    return any(leaf == name or leaf.startswith(f"{name}.") for name in found)


@pytest.mark.parametrize("size", [1, 2])
def test_exactly_the_bad_leaves_are_found_wherever_they_are(size: int) -> None:
    for bad in combinations(sorted(set(LEAVES)), size):
        found = find_minimal_set(
            TREE, [], lambda kept, bad=bad: all(covers(kept, leaf) for leaf in bad)
        )
        assert sorted(found or ()) == sorted(bad)


def test_a_right_suspicion_takes_two_tries() -> None:
    tried: list[tuple[str, ...]] = []

    def heals(kept: tuple[str, ...]) -> bool:
        tried.append(kept)
        return covers(kept, "blocks.1.mlp")

    assert find_minimal_set(TREE, ["blocks.1.mlp", "head"], heals) == ("blocks.1.mlp",)
    assert len(tried) == 1


def test_nothing_heals() -> None:
    assert find_minimal_set(TREE, ["head"], lambda kept: False) is None


def test_what_needs_a_whole_module_keeps_it() -> None:
    """A container whose own arithmetic is at fault, not that of a part of it."""
    assert find_minimal_set(TREE, [], lambda kept: "blocks.1" in kept or "blocks" in kept) == (
        "blocks.1",
    )
