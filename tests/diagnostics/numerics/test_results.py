import json
from dataclasses import asdict, replace

import pytest

from runner.core.base.errors import ConfigError
from runner.core.base.layout import NUMERICS
from runner.diagnostics.numerics import Numerics, loss_scales, read
from runner.diagnostics.numerics.numerics_page import answer_lines, loss_scale_sentence
from runner.diagnostics.numerics.results import NumericsSnapshot, QuantizationLoss, TensorStats
from runner.precision.emulation.formats import FORMATS


def lost(
    underflow=0.0, subnormal=0.0, overflow=0.0, sqnr_db: float | None = 70.0, swallowed=None, **more
):
    return QuantizationLoss(underflow, subnormal, overflow, sqnr_db, swallowed, **more)


def measured(module="head", kind="activations", not_finite=0.0, **shares):
    """One tensor, of which every format loses the same."""
    formats = dict.fromkeys((*FORMATS, "float8_e5m2_unscaled"), lost(**shares))
    return TensorStats(module, kind, 100, 0.25, not_finite, 2.5, {-3: 60, 1: 15}, formats)


def numerics(*looks, compute="float32"):
    found = [NumericsSnapshot(10 * i, None, tuple(look)) for i, look in enumerate(looks, 1)]
    return Numerics(10, "32-true", "float32", compute, tuple(found))


def verdict(*parts, **more):
    return numerics(parts, **more).sensitivity("float16")


def zeros(module="head", kind="gradients", **shares):
    return replace(measured(module, kind, **shares), zeros=1.0, largest=0.0, exponents={})


def test_zeros_hide_nothing_and_are_named():
    """As the gradients behind a last layer of zeros, in the first of two looks."""
    one = numerics(
        [zeros(), zeros("a"), measured("a")],
        [measured(kind="gradients", underflow=0.06), zeros("a"), measured("a")],
    )
    # The mean of 0.06 and of zeros would be below the limit.
    assert one.sensitivity("float16") == "range"
    assert one.unjudged() == {"gradients": ["a"]}
    assert "not judged, for all are 0: gradients of a" in answer_lines(one)


def test_a_stalled_module_is_no_module_of_zeros():
    one = numerics([zeros(kind="updates", swallowed=1.0)])
    assert one.sensitivity("bfloat16") == "precision"
    assert one.unjudged() == {}


def test_gradients_of_zero_say_nothing_of_loss_scales():
    one = numerics([zeros(), measured()])
    assert loss_scales(one) is None
    assert "no loss scale can be judged" in loss_scale_sentence(one)


def test_a_written_file_is_read_back(tmp_path):
    one = numerics([measured(), measured("a", "updates", swallowed=1 / 3, sqnr_db=None)], [])
    one.write(tmp_path / NUMERICS)
    again = read(tmp_path)
    assert again.probes[0].measured[1].formats["float16"].swallowed == 1 / 3
    assert again.probes[0].measured[0].exponents == {-3: 60, 1: 15}
    assert again.sensitivity("float16") == one.sensitivity("float16")
    again.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / NUMERICS).read_text()


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"numerics\.json is no file.*numerics\.every="):
        read(tmp_path)


LATER_VERSION = json.dumps({**asdict(numerics([measured()])), "new": 1})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"probes": 3}', '{"probes": [{"measured": [{}]}]}', '{"probes": []}'),
        LATER_VERSION,
    ],
)
def test_a_damaged_file_is_a_config_error(tmp_path, text):
    (tmp_path / NUMERICS).write_text(text)
    with pytest.raises(ConfigError, match="is damaged"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        (measured(), "none"),
        (measured(overflow=1e-6), "range"),
        (measured(underflow=0.05), "range"),
        (measured(underflow=0.049), "none"),
        (measured(sqnr_db=None), "none"),
        (measured(subnormal=0.9, sqnr_db=40.0), "none"),
        (measured(underflow=0.5, negligible=0.46), "none"),
        (measured(underflow=0.5, negligible=0.44), "range"),
        (measured(subnormal=0.1, sqnr_db=19.0, underflow_noise=0.012), "range"),
        (measured(subnormal=0.9, sqnr_db=19.0, underflow_noise=0.002), "precision"),
        (measured(kind="gradients", underflow=0.2), "range"),
        (measured(kind="weights", sqnr_db=12.0), "precision"),
        (measured(kind="updates", swallowed=0.5), "precision"),
        (measured(kind="updates", swallowed=0.49), "none"),
        (measured(kind="updates", underflow=1.0, overflow=0.5, sqnr_db=0.0), "none"),
    ],
)
def test_the_limits_of_the_verdict(part, wanted):
    assert verdict(measured("body"), part) == wanted


def test_a_lack_of_range_precedes_a_lack_of_precision():
    found = measured(kind="updates", swallowed=1.0), measured(underflow=0.9)
    assert verdict(*found) == verdict(*reversed(found)) == "range"


def test_the_verdict_is_that_of_the_mean_over_snapshots():
    calm, wild = [measured()], [measured(underflow=0.1)]
    assert numerics(wild).sensitivity("float16") == "range"
    assert numerics(wild, calm, calm).sensitivity("float16") == "none"


def test_a_value_that_is_not_finite_overflows_the_run_s_format_and_every_narrower_one():
    part = measured(not_finite=0.1)
    half, brain = numerics([part], compute="float16"), numerics([part], compute="bfloat16")
    assert (half.sensitivity("float16"), half.sensitivity("bfloat16")) == ("range", "none")
    assert brain.sensitivity("bfloat16") == "range"
    assert half.worst("float8_e4m3fn", 1) == [("head", "activations", "overflow", 0.1)]
    assert numerics([part]).sensitivity("bfloat16") == "range"


def test_the_worst_come_first():
    found = numerics(
        [
            measured("a", underflow=0.3),
            measured("b", "gradients", overflow=0.001),
            measured("c", "updates", swallowed=0.9, underflow=1.0),
            measured("d", sqnr_db=10.0),
            measured("e"),
        ]
    )
    assert found.worst("float16", 9) == [
        ("b", "gradients", "overflow", 0.001),
        ("c", "updates", "swallowed", 0.9),
        ("a", "activations", "underflow", 0.3),
        ("d", "activations", "noise", pytest.approx(0.1)),
    ]
    assert len(found.worst("float16", 2)) == 2


def test_the_reasons_are_those_of_the_verdict():
    swallowed = measured("c", "updates", swallowed=0.9)
    found = numerics([measured("a", underflow=0.3), swallowed, measured("b", underflow=0.01)])
    assert found.reasons("float16") == [("a", "activations", "underflow", 0.3)]
    assert found.reasons("float16", ["updates"]) == [("c", "updates", "swallowed", 0.9)]
    assert numerics([measured("b", underflow=0.01)]).reasons("float16") == []


def test_a_format_that_was_not_measured_is_refused():
    for ask in (lambda n: n.worst("int8", 3), lambda n: n.sensitivity("float32")):
        with pytest.raises(ValueError, match=r"was not measured\. Known: float16, bfloat16"):
            ask(numerics([measured()]))


def test_a_format_outside_the_measured_ones_is_replaced_by_a_half_precision():
    assert (numerics().computed_in, numerics().stored_in) == ("float16", "bfloat16")
    half = Numerics(1, "bf16-true", "bfloat16", "bfloat16", ())
    assert (half.computed_in, half.stored_in) == ("bfloat16", "bfloat16")
