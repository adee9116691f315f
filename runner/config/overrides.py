"""Rewrite the command line before Hydra parses it. Imports neither torch nor Hydra."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from runner.config.hydra_plugins import set_plugin_folders
from runner.core import ConfigError, Room, RunSpec, files, fmt, layout, terminal, torchrun

_ALIAS = re.compile(r"(^|[\s,\[{])\*[^\s*]", re.MULTILINE)
YAML_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Loader that reads every value as text; PyYAML may be installed without libyaml."""
DTYPE_PRECISIONS = {
    **dict.fromkeys(("tf32", "tf-32", "tensorfloat"), ("tf32",)),
    "mxfp8": ("transformer-engine-mxfp8", "torchao-mxfp8"),
    "mxfp4": ("transformer-engine-nvfp4",),
    **dict.fromkeys(("bfloat16", "bfloat", "bf16"), ("bf16-mixed", "bf16-true")),
    **dict.fromkeys(("fp8", "float8"), ("transformer-engine", "float8-tensorwise")),
    **dict.fromkeys(("fp64", "float64", "double", "64"), ("64-true",)),
    **dict.fromkeys(("fp32", "float32", "single", "32"), ("32-true",)),
    **dict.fromkeys(("fp16", "float16", "half", "16"), ("16-mixed", "16-true")),
    **dict.fromkeys(("nvfp4",), ("nvfp4", "qat-nvfp4", "transformer-engine-nvfp4")),
    **dict.fromkeys(("nf4", "qlora"), ("bnb-nf4", "bnb-nf4-dq")),
    **dict.fromkeys(("fp4", "float4"), ("bnb-fp4", "bnb-fp4-dq")),
    **dict.fromkeys(("4bit", "4-bit", "int4"), ("bnb-nf4", "int4", "qat-int4")),
    **dict.fromkeys(("8bit", "8-bit", "int8"), ("bnb-int8", "int8", "qat-int8")),
    **dict.fromkeys(("amp", "autocast"), ("16-mixed", "bf16-mixed")),
    "float": ("32-true",),
}
"""Names of dtypes that users type for a precision, and the precisions that they may mean; the first
one that a typed name holds counts."""
_GROUPS = (
    "accelerator|precision|model|adapter|data|task|optimizer|scheduler|tracking|debug|experiment"
    "|callbacks|launcher|sweep"
)
_GROUP = re.compile(
    rf"^(?P<plus>\+{{0,2}})(?P<group>{_GROUPS})=(?P<call>choice\()?"
    r"(?P<names>[^(){}\[\]]*)(?P<end>\))?$"  # no list and no node
)
# Values that Hydra's parser reads as a number, null or a boolean.
_NOT_TEXT = re.compile(
    r"^([-+]?(\d[\d_]*(\.\d*)?(e[-+]?\d+)?|inf|nan)|null|true|false)$", re.IGNORECASE
)
_FLAGS_WITH_VALUE = (
    *("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn"),
    *("--cfg", "-c", "--package", "-p", "--info", "--experimental-rerun"),
)
"""Hydra's flags that take the next word as their value."""

_JOB_KEYS = {"hydra.sweep.dir", "hydra.job.num"}
_JOB_FOLDER = "hydra.run.dir=${hydra.sweep.dir}/${hydra.sweep.subdir}"
_SWEEPER = "hydra/sweeper=advise"
_MULTIRUN = "--multirun"
_MULTIRUN_FLAGS = {"-m", _MULTIRUN}
_QUERY_FLAGS = ("--cfg", "-c", "--info", "--help", "-h", "--hydra-help")
# Hydra's flags, but --cfg, which one of three words follows.
_FLAGS = {*_FLAGS_WITH_VALUE, *_MULTIRUN_FLAGS, *_QUERY_FLAGS} - {"-c", "--cfg"}
_FLAGS |= {"--version", "--resolve", "--run", "-r", "--shell-completion", "-sc", "-i"}


def rewrite_arguments(argv: Sequence[str]) -> list[str]:
    """Return a command in the form that Hydra parses, with its overrides before its flags.

    `explain <module> ...` becomes mode=explain explain=<module> ..., short precision names become
    full ones, numbers that name an option are quoted, `checkpoint=<file>` becomes checkpoint.path=,
    the keys of SWEEP_KEYS become those of the sweep's callback, and the keys of _NEW_KEYS are
    marked as new ones.
    A command with hydra.sweep.dir and hydra.job.num is one job of a sweep, and runs in that job's
    folder.
    """
    # Hydra fails at `precision=16`, which it reads as a number, and at `model=vit -m seed=0,1`:
    # its parser wants all overrides next to each other.
    overrides = []
    flags = []
    rest = list(argv)
    explains = rest[:1] == ["explain"]
    if explains:
        del rest[0]
    while rest:
        text = rest.pop(0)
        flag, equals, value = text.partition("=")
        is_query = flag in ("-c", "--cfg") and {value, *rest[:1]} & {"job", "hydra", "all"}
        if text.startswith("-") and flag not in _FLAGS and not is_query:
            if not equals and not re.match("-|.*=|$", "".join(rest[:1])):
                value = rest.pop(0)
            text = _override_of_option(flag, value)
        if not text.startswith("-"):
            override = _rewrite_path(_quote_option(text))
            if override.startswith("verbose="):
                override = f"sweep.{override}"
            if override.partition("=")[0] in SWEEP_KEYS:
                override = f"{_CALLBACK}{override}"
            overrides.append(f"++{override}" if _NEW_KEYS.match(override) else override)
            continue
        flags.append(text)
        if (
            text in _FLAGS_WITH_VALUE
            and rest
            and ("=" not in rest[0] or files.path_exists(rest[0]))
        ):
            flags.append(rest.pop(0))
    if explains:
        overrides = _explain_overrides(overrides)
    if any(map(_names_run, overrides)):
        # Keys of a run's options are new ones, for Hydra composes other options than the run's.
        overrides = [f"++{t}" if t.startswith(_KEYS_OF_RUN) else t for t in overrides]
    keys = {text.partition("=")[0] for text in overrides}
    is_multirun = bool(_MULTIRUN_FLAGS & {*flags}) or "hydra.mode=MULTIRUN" in overrides
    if keys >= _JOB_KEYS and not is_multirun:
        overrides.append(_JOB_FOLDER)
    return [*overrides, *_sweep_words(overrides, flags), *flags]


def _override_of_option(flag: str, value: str) -> str:
    """Return the override that is named as an option of another program, as lr= for --lr.

    Hydra refuses it with what to type: no key of the config has that name.

    Raises:
        ConfigError: the config has a key of that name.
    """
    name = flag.lstrip("-").replace("-", "_")
    if name.partition(".")[0] in {*RunSpec.__dataclass_fields__, *Room.all_sections()} - {
        "sections"
    }:
        raise ConfigError(f"{flag} is no option here. Type {name}={value or '<value>'}.")
    return f"{name}={value}"


def _explain_overrides(words: Sequence[str]) -> list[str]:
    """Return the overrides of `explain <module> <key>=<value> ...`.

    The module is the first word without a key. Where there is none, the spec's check says what
    mode=explain needs; of further ones Hydra says that they are no overrides.
    """
    module = next((word for word in words if "=" not in word and not word.startswith("~")), None)
    if module is None:
        return ["mode=explain", *words]
    rest = [*words]
    rest.remove(module)
    return ["mode=explain", f"explain={fmt.quote_value(module)}", *rest]


_KEYS_OF_RUN = ("precision.", "model.", "adapter.")
"""How the keys begin that a run's options have, and those of this command may lack."""


def _names_run(text: str) -> bool:
    """Return whether an override compares with a run: by its folder or its MLflow id."""
    key, _, value = text.partition("=")
    value = value.strip("\"'")
    if key != "against" or not value:
        return False
    return (Path(value) / layout.CONFIG).is_file() or bool(_RUN_ID.fullmatch(value))


_RUN_ID = re.compile(r"[0-9a-f]{32}")


def _sweep_words(overrides: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the words that make a command with a preset of a sweep, mode=advise or mode=gate a
    sweep; empty for other commands and for those that have these words."""
    if any(flag.partition("=")[0] in _QUERY_FLAGS for flag in flags):
        return []
    # The last value of a key counts.
    values = dict(text.split("=", 1) for text in overrides if "=" in text)
    advises = values.get("mode") in ("advise", "gate")
    # Two sweepers contradict each other; the sweep's callback reports it.
    words = [_SWEEPER] if advises and values.keys().isdisjoint(("sweep", "hydra/sweeper")) else []
    # Hydra 1.4 does not read the mode that a preset sets.
    is_preset = "sweep" in values and "hydra.mode" not in values
    if (words or is_preset) and _MULTIRUN_FLAGS.isdisjoint(flags):
        words.append(_MULTIRUN)
    return words


def without_program_options(argv: Sequence[str]) -> list[str]:
    """Return a rewritten command without what rewrite_arguments added: the words that make a
    preset or mode=advise a sweep, and the marks of new keys."""
    is_sweep = _SWEEPER in argv or any(text.startswith("sweep=") for text in argv)
    added = (_SWEEPER, _MULTIRUN) if is_sweep else ()
    return [as_typed(text) for text in argv if text not in added]


def _quote_option(text: str) -> str:
    """Return `group=option,...` with full names for short ones, and with numbers quoted."""
    match = _GROUP.match(text)
    if match is None:
        return text
    names = []
    for name in match["names"].split(","):
        option = name.strip()
        if match["group"] == "precision":
            # precision='16' is a short name, too.
            option = RunSpec.PRECISION_ALIASES.get(option.strip("\"'"), option)
        names.append(f"'{option}'" if _NOT_TEXT.match(option) else option)
    values = ",".join(names)
    return f"{match['plus']}{match['group']}={match['call'] or ''}{values}{match['end'] or ''}"


# Keys that take a path as the user types them, and their full keys.
_PATH_KEYS = {
    "checkpoint": "checkpoint.path",
    "checkpoint.resume": "checkpoint.resume",
    "init.weights": "init.weights",
    "batch": "batch",
    "against": "against",
    "serving": "serving",
}


def _rewrite_path(text: str) -> str:
    """Return an override of a file or folder with its full key, quoted as Hydra's grammar wants."""
    key, _, value = text.partition("=")
    if key not in _PATH_KEYS or not value:
        return text
    # Names of files may hold characters that Hydra's grammar refuses without quotes.
    is_override = key in ("against", "serving") and "=" in value and value[0] not in "\"'"
    if files.path_exists(value) or is_override:
        value = fmt.quote_value(value)
    return f"{_PATH_KEYS[key]}={value}"


SWEEP_KEYS = ("sweep.fail_fast", "sweep.verbose")
"""Keys of a sweep, which the callback takes: `sweep` itself is the group of presets."""
_CALLBACK = "hydra.callbacks."


_NEW_KEYS = re.compile(
    r"tracking\.tags[.=]|vars\.|callbacks(\.|=\{)|init\.rename[.=]|data\.(collate|sampler)[.=]"
    r"|task\.(metrics|quality|direction|after_evaluation|loss_weights|whole_batch)[.=]"
    r"|optimizer\.(\w+\.)?(groups|no_decay_on|layer_decay|state_dtype)=|scheduler\.warmup="
)
"""Keys that no yaml has to list: names of the user's own, and what fits every data set, task,
optimizer and schedule."""


def as_typed(text: str) -> str:
    """Return an override as it was typed: without the mark of a new key, a sweep's key short."""
    short = text.removeprefix(_CALLBACK)
    if short.partition("=")[0] in SWEEP_KEYS:
        return short
    typed = text.removeprefix("++")
    return typed if _NEW_KEYS.match(typed) else text


def config_dir(argv: Sequence[str]) -> Path | None:
    """Return the folder that --config-dir (-cd) names, or None."""
    for i, text in enumerate(argv):
        option, equals, value = text.partition("=")
        if option not in ("--config-dir", "-cd"):
            continue
        if equals:
            return Path(value)
        return Path(argv[i + 1]) if i + 1 < len(argv) else None
    return None


def existing_config_dir(folder: str | Path) -> Path:
    """Return the path of a --config-dir.

    Raises:
        ConfigError: it is no folder, or a yaml in it stands for more than a config has.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            f"--config-dir={path} is no folder in {Path.cwd()}. Type the folder of your configs."
        )
    check_aliases(path)
    return path


def check_aliases(folder: Path) -> None:
    """Refuse a folder of configs with a YAML file whose aliases unfold to more than a config.

    A file that cannot be read is left to Hydra, which names it if the command needs it.

    Raises:
        ConfigError: such a file is in the folder.
    """
    for path in folder.rglob("*.yaml"):
        with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
            text = files.read_text(path)
            # Most files have none: parsing takes ten times as long as reading.
            if _ALIAS.search(text):
                files.check_values(
                    yaml.load(text, YAML_LOADER), f"{path}, with its aliases unfolded,"
                )


def shadowed_configs(folder: Path) -> Iterator[str]:
    """Yield a warning for each yaml of the user that Hydra ignores.

    Hydra takes the built-in one where both have the same group and name.
    """
    for mine in sorted(folder.rglob("*.yaml")):
        theirs = layout.BUILT_IN_CONFIGS / mine.relative_to(folder)
        if theirs.exists():
            yield f"warning: {mine} is not used: {theirs} has its group and name. Rename yours."


def check_config_dir(folder: str | Path | None) -> Path | None:
    """Return a --config-dir as a path, after a warning for configs in it that are not used.

    Hydra's plugins are looked for there, too.

    Raises:
        ConfigError: it is no folder.
    """
    path = None if folder is None else existing_config_dir(folder)
    set_plugin_folders(path)
    for warning in () if path is None else shadowed_configs(path):
        if torchrun.claim_message(warning):
            print(terminal.sanitize(warning), file=sys.stderr)
    return path


def override_texts(overrides: Sequence[str]) -> list[str]:
    """Return a list of overrides that Hydra has stored, as they were typed."""
    # Reading one element would resolve the ${...} in its text, which may not be possible yet.
    texts = OmegaConf.to_container(overrides)
    assert isinstance(texts, list)
    return [str(text) for text in texts]
