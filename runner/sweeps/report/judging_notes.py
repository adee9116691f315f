"""Notes on how mode=advise and mode=gate judge: (term, explanation), for the end of a page."""

from statistics import fmean

from runner.sweeps.report.ranking import Advice
from runner.utils.formatting import format_number

Note = tuple[str, str]


def trials_note(advice: Advice) -> Note:
    """Return what a trial is."""
    settings = advice.settings
    text = (
        f"{settings.steps} optimizer steps each; every precision from the same weights on the same "
        f"batches as {settings.baseline}, for each seed. Jobs ran in turn, seed by seed."
    )
    if settings.recorded_in:
        text += f" {settings.baseline} was trained before, in {settings.recorded_in}."
    return "Trials", text


def baseline_note(advice: Advice) -> Note:
    """Return where the baseline ends, and which difference to it is accepted."""
    settings = advice.settings
    sign = 1 if settings.direction == "min" else -1
    ends_at = sign * fmean(advice.baseline_losses.values())
    accepted = f"Tolerated are {settings.tolerance:g} of them (advise.tolerance)."
    if settings.max_gap is not None:
        accepted = f"Accepted is a difference of {settings.max_gap:g} (advise.max_gap)."
    return "Baseline", (
        f"{settings.baseline} ends at {settings.metric} {format_number(ends_at)}; its seeds differ "
        f"by a standard deviation of {format_number(advice.baseline_spread)}. {accepted}"
    )


def limits_note(advice: Advice) -> Note:
    """Return what trials do not show."""
    steps = advice.settings.steps
    text = f"{steps} steps are not a whole training: what goes wrong later is not seen."
    return "What this is not", text
