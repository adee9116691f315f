"""The text of --help for a run; those of the other commands are in config/commands.py.

Hydra's own help is not used: listing its groups takes six times as long as composing a config.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from runner.config.commands import COMMANDS
from runner.config.overrides import config_dir

HELP = """Train a model under a numerical precision, or compare precisions in a sweep.

  python -m runner precision=16-mixed model=resnet
  python -m runner -m precision=32-true,bf16-mixed,16-mixed
  python -m runner checkpoint.resume=last    resumes an interrupted run
  python -m runner sweep.resume=last         resumes a sweep
  python -m runner mode=advise model=resnet data=digits   which precision, on this machine?
  python -m runner mode=gate precision=bf16-true model=gpt data=text   exit status 0: accepted
  python -m runner mode=diff precision=bf16-mixed against=32-true    where do the two part?
  python -m runner mode=plan precision=bf16-true model=gpt data=text
  python -m runner mode=evaluate checkpoint=<file, run folder or MLflow run id>
{commands}

Options (group=option):
{groups}

Keys (key=value) and their values, as `--cfg job` prints them; `--hydra-help` lists more flags:
"""


def print_help(argv: Sequence[str]) -> str:
    """Return the help text before the config; it lists the options of --config-dir, too."""
    folders = [Path(str(files("runner.conf")))]
    own_folder = config_dir(argv)
    if own_folder is not None:
        folders.append(own_folder)
    commands = [f"  python -m runner {each.name:13} {each.summary}" for each in COMMANDS.values()]
    return HELP.format(commands="\n".join(commands), groups="\n".join(_group_lines(folders)))


def _group_lines(folders: Sequence[Path]) -> Iterator[str]:
    options: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            options.setdefault(path.parent.name, set()).add(path.stem)
    for group, names in sorted(options.items()):
        yield f"  {group}: {', '.join(sorted(names))}"
