"""mode=advise on the planted cases and on models of the runner: verdict, modules, repeatability."""

import os
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from runner.sweeps.report.load import load_from_folder
from runner.sweeps.verdict.ranking import Advice, PrecisionVerdict

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parents[2] / "helpers"
# Three seeds, which measure a deviation badly, show what is within two deviations.
QUICK = (
    *("mode=advise", "tracking=none", "accelerator=cpu", "advise.budget=10h"),
    *("advise.seeds=3", "advise.tolerance=2"),
)


@pytest.fixture(scope="module")
def advised(tmp_path_factory, inside):
    """The advice on a config, and what was printed."""

    def of(*words: str) -> tuple[Advice, str]:
        folder = tmp_path_factory.mktemp("advise")
        with inside(folder) as main:
            done = main(*QUICK, *words)
        assert done.rc == 0, done.stdout[-2000:] + done.stderr
        (out,) = folder.glob("outputs/sweeps/*")
        advice = load_from_folder(out).advice
        assert advice is not None
        return advice, done.stdout

    return of


@pytest.fixture(scope="module")
def planted(advised):
    """The advice on a planted case."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HELPERS), before])
    yield lambda case, steps, *words: advised(
        "--config-dir",
        str(HELPERS / "planted" / "conf"),
        f"experiment={case}",
        f"advise.steps={steps}",
        *words,
    )
    os.environ["PYTHONPATH"] = before


def verdict_of(advice: Advice, name: str) -> PrecisionVerdict:
    (found,) = (one for one in advice.verdicts if one.name == name)
    return found


def good(one: PrecisionVerdict) -> bool:
    return one.is_acceptable and one.rating != "baseline"


def test_a_model_beyond_float16s_range_trains_with_its_wide_module_in_float32(planted):
    advice, _ = planted("broken_by_range", 100, "precision=16-mixed")
    broken = verdict_of(advice, "16-mixed")
    assert (broken.rating, broken.diverged_step) == ("diverged", 30)  # overflows in a row
    assert "short of float16's range: in wide" in broken.float32_finding
    healed = verdict_of(advice, "16-mixed precision.keep_fp32=[wide]")
    assert not healed.is_failing
    assert healed.test is not None
    assert healed.test.n == 3  # not the seed that chose the set
    assert abs(healed.test.value) < healed.test.margin


@pytest.mark.extended
def test_a_model_that_bfloat16_harms_trains_with_its_clock_module_in_float32(planted):
    advice, _ = planted("harmed_by_precision", 200, "precision=bf16-mixed,16-mixed")
    harmed = verdict_of(advice, "bf16-mixed")
    assert harmed.rating == "worse"
    assert harmed.test is not None
    assert harmed.test.value == pytest.approx(0.0033, rel=0.2)
    assert good(verdict_of(advice, "16-mixed"))
    assert good(verdict_of(advice, "bf16-mixed precision.keep_fp32=[clock]"))


@pytest.mark.extended
def test_a_model_that_fp8_harms_trains_without_its_head_and_its_speed_is_unknown(planted):
    advice, printed = planted(
        "harmed_in_the_head", 200, "precision=float8-tensorwise", "precision.emulate=true"
    )
    assert verdict_of(advice, "float8-tensorwise").rating == "worse"
    healed = verdict_of(advice, "float8-tensorwise precision.ignore_modules=[head]")
    assert good(healed)
    assert healed.is_emulated
    assert advice.recommendation is not None
    assert advice.recommendation.name == "32-true"
    assert "unknown" in printed


def test_a_model_whose_updates_bf16_weights_swallow_trains_with_a_rule_that_keeps_them(planted):
    advice, printed = planted(
        "harmed_in_the_head", 100, "precision=bf16-true", "advise.objective=memory"
    )
    harmed = verdict_of(advice, "bf16-true")
    assert harmed.rating == "worse"
    assert "of updates are swallowed" in harmed.float32_finding
    assert advice.recommendation is not None
    assert advice.recommendation.name == "bf16-true precision.update=stochastic_rounding"
    assert advice.recommendation.test is not None
    assert advice.recommendation.test.n == 3  # not the seed that chose the rule
    # The rule of the fewest bytes helps: no other one, and no set of modules, is tried.
    assert "precision.update=kahan" not in printed
    assert "keep_fp32" not in printed
    # Its speed comes first on a machine where every seed was faster, or every seed slower.
    sentence = (
        r"Use bf16-true precision\.update=stochastic_rounding: "
        r"(\d\.\d\d × as fast as 32-true|0\.50 × 32-true's weights)"
    )
    assert re.search(sentence, printed)


@pytest.mark.extended
def test_a_model_that_no_precision_harms_gets_the_same_ranking_twice(planted):
    words = ("harmed_by_nothing", 30, "precision=bf16-true", "advise.objective=memory")
    first, second = (planted(*words)[0].verdicts for _ in range(2))
    assert all(one.is_acceptable for one in first)
    assert (first[0].name, first[0].rating) == ("bf16-true", "recommended")
    for one, again in zip(first, second, strict=True):
        assert (one.name, one.rating) == (again.name, again.rating)
        assert one.test == again.test  # to the last bit


SMALL = "model.layers=1 model.width=32 model.heads=2 data.context=32 train.batch_size=4"
GPT = f"model=gpt data=text {SMALL}".split()
COMPLEX = ["model=complex_mlp", "data=signals"]


@pytest.fixture
def prose(tmp_path: Path) -> str:
    """A text of 20 kB."""
    path = tmp_path / "prose.txt"
    path.write_text(topics["assignment"] * 3)
    return f"data.path={path}"


@pytest.mark.extended
@pytest.mark.parametrize("words", [GPT, COMPLEX], ids=["gpt", "complex_mlp"])
def test_models_of_the_runner_are_judged(advised, words, prose):
    more = ["advise.steps=20", "advise.islands=false", *([prose] if words is GPT else [])]
    advice, printed = advised(*words, *more, "precision=bf16-mixed")
    judged = verdict_of(advice, "bf16-mixed").test
    assert judged is not None
    assert judged.n == 3
    assert advice.recommendation is not None
    assert advice.recommendation.name in ("32-true", "bf16-mixed")
    assert f" {words[0]} {words[1]} " in printed.partition("Next: python -m runner ")[2]
    if words is COMPLEX:  # autocast leaves complex numbers alone
        assert judged.value == 0
        assert good(verdict_of(advice, "bf16-mixed"))
