"""--help. Hydra's own lists the groups at six times the cost of composing a config."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from runner.config.overrides import config_dir

HELP = """Train a model under a numerical precision, or compare precisions in a sweep.

  python -m runner precision=16-mixed model=resnet
  python -m runner -m precision=32-true,bf16-mixed,16-mixed
  python -m runner checkpoint.resume=last    goes on with a run that was cut
  python -m runner sweep.resume=last         and with a sweep
  python -m runner mode=advise model=resnet data=digits   which precision, on this machine?
  python -m runner mode=plan precision=bf16-true model=gpt data=text
  python -m runner mode=evaluate checkpoint=<file, run folder or MLflow run id>
  python -m runner doctor        which precisions run on this machine
  python -m runner report        rebuild a sweep's report
  python -m runner sync          send what an outage kept from MLflow
  python -m runner ui            MLflow's pages on the store that runs log to

Options (group=option):
{groups}

Keys (key=value) and their values, as `--cfg job` prints them; `--hydra-help` tells of more flags:
"""

COMMAND_HELP = {
    "doctor": """python -m runner doctor [--config-dir <folder>]

Every precision on this machine: whether it runs, why not, what to install. With a folder of
your own configs, its precisions too.""",
    "report": """python -m runner report [sweep folder, parent run id or sweep id] [keys]

Rebuilds the report of a sweep, of the newest one without a name, from its folder or from MLflow.
Keys: tracking.uri=<store>, tracking.experiment=<name>.""",
    "sync": """python -m runner sync [run, sweep or outputs folder ...] [keys]

Sends what runs recorded and MLflow does not have yet, after an outage or a crash: of all runs under
outputs/ without a folder. Nothing is sent twice. Exit status 1 where something could not be sent.
Keys: tracking.uri=<store> and tracking.experiment=<name> send it there instead.""",
    "ui": """python -m runner ui [keys]

Starts MLflow's pages on 127.0.0.1, on the store that runs log to, and prints the dashboards' URLs.
Keys: tracking.uri=<store>, tracking.experiment=<name>, port=<number>.""",
}


def print_help(argv: Sequence[str]) -> str:
    """The help text up to the config's keys; lists the user's own --config-dir, too."""
    folders = [Path(str(files("runner.conf")))]
    if (mine := config_dir(argv)) is not None:
        folders.append(mine)
    return HELP.format(groups="\n".join(_groups(folders)))


def _groups(folders: Sequence[Path]) -> Iterator[str]:
    options: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            options.setdefault(path.parent.name, set()).add(path.stem)
    for group, names in sorted(options.items()):
        yield f"  {group}: {', '.join(sorted(names))}"
