import pytest

from runner.core.base.errors import ConfigError
from runner.core.base.module_tree import matches_pattern, select_modules

NAMES = ["", "l1", "l1.0", "l10", "layer1", "layer1.0", "layer1.0.bn1", "layer2.1.bn1", "head"]


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("l1", {"l1", "l1.0"}),
        ("l10", {"l10"}),
        ("l*", set(NAMES) - {"", "head"}),
        ("l1.0", {"l1.0"}),
        ("layer*.0", {"layer1.0", "layer1.0.bn1"}),
        ("layer1.*.bn1", {"layer1.0.bn1"}),
        ("*.bn1", {"layer1.0.bn1", "layer2.1.bn1"}),
        ("*.0.bn1", {"layer1.0.bn1"}),
        ("*.head", {"head"}),
        ("layer*.bn1", set()),
        ("ayer1", set()),
        ("bn1", set()),
        ("layer1.0.bn1.weight", set()),
        ("*", set(NAMES)),
    ],
)
def test_segment_by_segment(pattern, hits):
    assert {name for name in NAMES if matches_pattern(pattern, name)} == hits


def test_select_unites_the_patterns():
    assert select_modules("key", ["head", "*.bn1"], NAMES) == {
        *"head layer1.0.bn1 layer2.1.bn1".split()
    }
    assert select_modules("key", [], NAMES) == set()


def test_every_pattern_without_a_match_is_named_with_near_names():
    with pytest.raises(ConfigError) as error:
        select_modules("precision.keep_fp32", ["layr1", "head", "haed"], NAMES)
    first, second = error.value.problems
    assert first.startswith("precision.keep_fp32: layr1 matches no module of the model.")
    assert "Nearest names: layer1, " in first
    assert "Nearest names: head, " in second


def test_names_are_offered_where_none_is_near():
    with pytest.raises(ConfigError, match=r"Nearest names: l1, l1\.0, l10, "):
        select_modules("key", ["zzz"], NAMES)
    with pytest.raises(ConfigError, match=r"Nearest names: \*\."):
        select_modules("key", ["zzz"], [""])
