"""What is done to the command line before Hydra sees it. Imports neither torch nor Hydra."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

PRECISION_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_PRECISION = re.compile(r"^(?P<key>\+{0,2}precision=)(?P<call>choice\()?(?P<names>.*?)(?P<end>\))?$")


def rewrite(argv: Sequence[str]) -> list[str]:
    """Legacy precision names spelled out, and `checkpoint=<what>` as the key that holds it.

    `precision=16` would reach Hydra as a number and `precision=32,"16"` as a mixture; both
    become names, in single runs and in sweeps, quoted or not.
    """
    return [_checkpoint(_precision(text)) for text in argv]


def _precision(text: str) -> str:
    match = _PRECISION.match(text)
    if match is None:
        return text
    names = [name.strip().strip("\"'") for name in match["names"].split(",")]
    spelled = ",".join(PRECISION_ALIASES.get(name, name) for name in names)
    return f"{match['key']}{match['call'] or ''}{spelled}{match['end'] or ''}"


def _checkpoint(text: str) -> str:
    key, mark, value = text.partition("=")
    return f"checkpoint.path={value}" if mark and key == "checkpoint" and value else text


def config_dir(argv: Sequence[str]) -> Path | None:
    """The folder that --config-dir (-cd) names."""
    for i, text in enumerate(argv):
        option, mark, value = text.partition("=")
        if option in ("--config-dir", "-cd"):
            return Path(value) if mark else Path(argv[i + 1]) if i + 1 < len(argv) else None
    return None


def shadowed(folder: Path) -> Iterator[str]:
    """A warning for each config of the user's that Hydra ignores because a built-in one has its
    group and name."""
    built_in = Path(str(files("runner.conf")))
    for mine in sorted(folder.rglob("*.yaml")):
        theirs = built_in / mine.relative_to(folder)
        if theirs.exists():
            yield (
                f"warning: {mine} is not used: the built-in {theirs} has the same group and name. "
                f"Give your file another name, for example my_{mine.name}."
            )
