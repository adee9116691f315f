"""runner.sweeps.advisor.remedies finds the smallest set that is enough, in few trials."""

from itertools import combinations

import pytest

from runner.sweeps.advisor.remedies import find_minimal_set

TREE = {
    "": ["stem", "blocks", "head"],
    "stem": [],
    "blocks": ["blocks.0", "blocks.1", "blocks.2"],
    "blocks.0": ["blocks.0.attn", "blocks.0.mlp"],
    "blocks.1": ["blocks.1.attn", "blocks.1.mlp"],
    "blocks.2": ["blocks.2.attn", "blocks.2.mlp"],
    "head": [],
}
LEAVES = ["head", "stem", *(part for i in range(3) for part in TREE[f"blocks.{i}"])]


def covers(modules: tuple[str, ...], leaf: str) -> bool:
    """Return whether a leaf is one of some modules, or inside one."""
    return any(leaf == name or leaf.startswith(f"{name}.") for name in modules)


@pytest.mark.parametrize("size", [1, 2])
def test_exactly_the_bad_leaves_are_found_wherever_they_are(size: int) -> None:
    for bad in combinations(LEAVES, size):

        def is_enough(modules: tuple[str, ...], bad: tuple[str, ...] = bad) -> bool:
            return all(covers(modules, leaf) for leaf in bad)

        assert sorted(find_minimal_set(TREE, [], is_enough) or ()) == sorted(bad)


def test_a_right_suspicion_takes_one_trial() -> None:
    tried: list[tuple[str, ...]] = []

    def is_enough(modules: tuple[str, ...]) -> bool:
        tried.append(modules)
        return covers(modules, "blocks.1.mlp")

    assert find_minimal_set(TREE, ["blocks.1.mlp", "head"], is_enough) == ("blocks.1.mlp",)
    assert len(tried) == 1


def test_there_is_no_set_where_not_even_all_modules_are_enough() -> None:
    assert find_minimal_set(TREE, ["head"], lambda modules: False) is None


def test_a_container_is_not_replaced_if_its_own_arithmetic_is_at_fault() -> None:
    def is_enough(modules: tuple[str, ...]) -> bool:
        return "blocks.1" in modules or "blocks" in modules

    assert find_minimal_set(TREE, [], is_enough) == ("blocks.1",)
