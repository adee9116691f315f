"""What is done to the command line before Hydra sees it. Imports neither torch nor Hydra."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

PRECISION_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_GROUPS = "accelerator|precision|model|data|task|optimizer|scheduler|tracking"
_GROUP = re.compile(
    rf"^(?P<plus>\+{{0,2}})(?P<group>{_GROUPS})=(?P<call>choice\()?(?P<names>[^()]*)(?P<end>\))?$"
)
_NUMBER = re.compile(r"^[-+]?\d+(\.\d*)?$")


def rewrite(argv: Sequence[str]) -> list[str]:
    """Legacy precision names spelled out, numbers quoted where a group's option is wanted, and
    `checkpoint=<what>` as the key that holds it.

    Hydra would read `precision=16` as a number and die of it, in single runs and in sweeps.
    """
    return [_checkpoint(_option(text)) for text in argv]


def _option(text: str) -> str:
    """One `group=option,...` with its aliases spelled out and its numbers quoted."""
    match = _GROUP.match(text)
    if match is None:
        return text
    names = [name.strip() for name in match["names"].split(",")]
    if match["group"] == "precision":
        bare = [name.strip("\"'") for name in names]
        names = [PRECISION_ALIASES.get(b, n) for b, n in zip(bare, names, strict=True)]
    quoted = ",".join(f"'{name}'" if _NUMBER.match(name) else name for name in names)
    return f"{match['plus']}{match['group']}={match['call'] or ''}{quoted}{match['end'] or ''}"


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
