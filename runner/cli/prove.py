"""Run `runner prove`: measure published claims about low precision again on this machine."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from runner.claims.catalogue import CLAIMS
from runner.claims.claim import Claim, check_claim
from runner.claims.report import (
    PAGE,
    head_line,
    list_line,
    result_line,
    summary,
    write_report,
)
from runner.config.commands import PROVE
from runner.utils.errors import ConfigError
from runner.utils.files import os_error_reason
from runner.utils.formatting import relative_path
from runner.utils.terminal import quote_command

DEFAULT_FOLDER = Path("outputs", "prove")


def prove(argv: Sequence[str]) -> int:
    """Measure claims, print a line for each, and write prove.html and prove.json.

    Args:
        argv: names of claims, by default all; `--out <folder>`; `--list` to print the names only.

    Returns:
        0 if every claim holds, else 1.

    Raises:
        ConfigError: an argument that it does not take, or --out cannot be made.
    """
    arguments = PROVE.parse(argv)
    claims = _chosen_claims(arguments.words)
    if "--list" in arguments.values:
        print("\n".join(list_line(claim) for claim in claims))
        return 0
    folder = Path(arguments.values.get("--out", DEFAULT_FOLDER))
    _make_folder(folder)
    print(head_line())
    results = []
    for claim in claims:
        results.append(check_claim(claim))
        print(result_line(results[-1]), flush=True)
    print(summary(results))
    command = quote_command(["python", "-m", "runner", "prove", *argv])
    write_report(results, command, folder)
    print(relative_path(folder / PAGE))
    return int(not all(result.holds for result in results))


def _chosen_claims(names: Sequence[str]) -> Sequence[Claim]:
    """Return the claims of these names, once each, in the catalogue's order; all without names."""
    known = [claim.name for claim in CLAIMS]
    unknown = [name for name in names if name not in known]
    if unknown:
        near = get_close_matches(unknown[0], known, n=3, cutoff=0.3) or known
        raise ConfigError(
            f"prove knows no claim {unknown[0]}. Nearest: {', '.join(near)}. Type "
            f"python -m runner prove {near[0]}, or prove --list for all names."
        )
    return [claim for claim in CLAIMS if not names or claim.name in names]


def _make_folder(folder: Path) -> None:
    """Make the folder of the files, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out={folder} cannot be made: {os_error_reason(error)}. Allowed: a folder that "
            f"exists or can be made. Type --out {DEFAULT_FOLDER}."
        ) from error
