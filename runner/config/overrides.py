"""What is done to the command line before Hydra sees it. Imports neither torch nor Hydra."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

PRECISION_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_GROUPS = (
    "accelerator|precision|model|adapter|data|task|optimizer|scheduler|tracking|debug|experiment"
    "|launcher|sweep"
)
_GROUP = re.compile(
    rf"^(?P<plus>\+{{0,2}})(?P<group>{_GROUPS})=(?P<call>choice\()?(?P<names>[^()]*)(?P<end>\))?$"
)
_NOT_TEXT = re.compile(r"^([-+]?\d+(\.\d*)?|null|true|false)$", re.IGNORECASE)
_VALUED = {
    "--config-dir",
    "-cd",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--cfg",
    "-c",
    "--package",
    "-p",
    "--info",
    "--experimental-rerun",
}

_PRECISION = "precision."
_SWEEPER = "hydra/sweeper=advise"
_ADVISES = (_SWEEPER, "--multirun")
_LOOKS = ("--cfg", "-c", "--info", "--help", "-h", "--hydra-help")


def rewrite_arguments(argv: Sequence[str]) -> list[str]:
    """Legacy precision names spelled out, numbers quoted where a group's option is wanted,
    `checkpoint=<what>` as the key that holds it, tags marked as new keys, and Hydra's own flags
    after the overrides.

    Hydra would read `precision=16` as a number and die of it, in single runs and in sweeps; and
    its parser takes overrides in one piece only, so that `model=vit -m seed=0,1` would not parse.
    """
    overrides, flags, rest = [], [], list(argv)
    while rest:
        text = rest.pop(0)
        if not text.startswith("-"):
            overrides.append(_tag(_path(_option(text))))
            continue
        flags.append(text)
        if text in _VALUED and rest and "=" not in rest[0]:
            flags.append(rest.pop(0))
    advising = _advising(overrides, flags)
    if advising or _sweeps_precisions(overrides, flags):
        overrides = [_lenient(text) for text in overrides]
    return [*overrides, *advising, *flags]


def _lenient(text: str) -> str:
    """Mark a key that only some precisions of a sweep or of mode=advise have as a new one."""
    return f"++{text}" if text.startswith(_PRECISION) else text


def _advising(overrides: Sequence[str], flags: Sequence[str]) -> list[str]:
    """What makes mode=advise the sweep that it is, whose jobs a sweeper of ours chooses."""
    asks = [text for text in overrides if text.startswith("mode=")][-1:] == ["mode=advise"]
    if not asks or any(flag.partition("=")[0] in _LOOKS for flag in flags):
        return []
    if any(text.startswith(("hydra/sweeper=", "sweep=")) for text in overrides):
        return []  # two of them: the runner says so
    several = {"-m", "--multirun"} & {*flags}
    return [_SWEEPER] if several else [*_ADVISES]


def _sweeps_precisions(overrides: Sequence[str], flags: Sequence[str]) -> bool:
    """Return whether a command's jobs may differ in their precision: as typed, or by a preset."""
    keys = [text.lstrip("+").partition("=") for text in overrides]
    if named := [value for key, _, value in keys if key == "precision"]:
        return "," in named[-1] or "(" in named[-1]
    if any(key == "sweep" for key, _, _ in keys):
        return True
    presets = any(key == "experiment" or key.startswith("hydra") for key, _, _ in keys)
    return presets and _is_multirun(overrides, flags)


def _is_multirun(overrides: Sequence[str], flags: Sequence[str]) -> bool:
    return bool({"-m", "--multirun"} & {*flags}) or "hydra.mode=MULTIRUN" in overrides


def without_program_options(argv: Sequence[str]) -> list[str]:
    """A rewritten command as it was typed: without what makes mode=advise a sweep, and without the
    marks of keys that some precisions of a sweep lack."""
    if _SWEEPER not in argv and not _sweeps_precisions(argv, argv):
        return [*argv]
    typed = (
        text.removeprefix("++") if text.startswith(f"++{_PRECISION}") else text for text in argv
    )
    return [text for text in typed if text not in _ADVISES]


def _option(text: str) -> str:
    """One `group=option,...` with its aliases spelled out and its numbers quoted."""
    match = _GROUP.match(text)
    if match is None:
        return text
    names = [name.strip() for name in match["names"].split(",")]
    if match["group"] == "precision":
        bare = [name.strip("\"'") for name in names]
        names = [PRECISION_ALIASES.get(b, n) for b, n in zip(bare, names, strict=True)]
    quoted = ",".join(f"'{name}'" if _NOT_TEXT.match(name) else name for name in names)
    return f"{match['plus']}{match['group']}={match['call'] or ''}{quoted}{match['end'] or ''}"


_PATHS = {
    "checkpoint": "checkpoint.path",
    "checkpoint.resume": "checkpoint.resume",
    "init.weights": "init.weights",
    "batch": "batch",
}


def _path(text: str) -> str:
    """A file or folder under the key that holds it, quoted where Hydra's grammar wants it."""
    key, _, value = text.partition("=")
    if key not in _PATHS or not value:
        return text
    if _exists(value):  # it may hold what Hydra's grammar does not take
        value = f"'{_BEFORE_QUOTE.sub(_escaped, value)}'"
    return f"{_PATHS[key]}={value}"


_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def _escaped(found: re.Match[str]) -> str:
    return found[1] * 2 + ("\\'" if found[2] else "")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a name
        return False


def _tag(text: str) -> str:
    """Tags have names of their own, which Hydra takes with a mark only."""
    return f"++{text}" if text.startswith("tracking.tags.") else text


def config_dir(argv: Sequence[str]) -> Path | None:
    """The folder that --config-dir (-cd) names."""
    for i, text in enumerate(argv):
        option, mark, value = text.partition("=")
        if option in ("--config-dir", "-cd"):
            return Path(value) if mark else Path(argv[i + 1]) if i + 1 < len(argv) else None
    return None


def shadowed_configs(folder: Path) -> Iterator[str]:
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
