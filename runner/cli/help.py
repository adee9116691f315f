"""Texts of --help, for a run and for each command.

Hydra's own help is not used: listing its groups takes six times as long as composing a config.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from runner.config.overrides import config_dir

HELP = """Train a model under a numerical precision, or compare precisions in a sweep.

  python -m runner precision=16-mixed model=resnet
  python -m runner -m precision=32-true,bf16-mixed,16-mixed
  python -m runner checkpoint.resume=last    resumes an interrupted run
  python -m runner sweep.resume=last         resumes a sweep
  python -m runner mode=advise model=resnet data=digits   which precision, on this machine?
  python -m runner mode=plan precision=bf16-true model=gpt data=text
  python -m runner mode=evaluate checkpoint=<file, run folder or MLflow run id>
  python -m runner doctor        which precisions run on this machine
  python -m runner report        rebuild a sweep's report
  python -m runner sync          upload records that are missing in MLflow
  python -m runner ui            MLflow's pages on the store that runs log to

Options (group=option):
{groups}

Keys (key=value) and their values, as `--cfg job` prints them; `--hydra-help` lists more flags:
"""

COMMAND_HELP = {
    "doctor": """python -m runner doctor [--config-dir <folder>]

Lists every precision: whether it runs on this machine, why not, what to install. With a folder of
your own configs, its precisions too.""",
    "report": """python -m runner report [sweep folder, parent run id or sweep id] [keys]

Rebuilds the report of a sweep from its folder or from MLflow; by default of the newest sweep.
Keys: tracking.uri=<store>, tracking.experiment=<name>.""",
    "sync": """python -m runner sync [run, sweep or outputs folder ...] [keys]

Uploads records of runs that are missing in MLflow, after an outage or a crash; by default of all
runs under outputs/. Nothing is uploaded twice. Exit status 1 if an upload failed: type it again.
Keys: tracking.uri=<store> and tracking.experiment=<name> upload to another store or experiment.""",
    "ui": """python -m runner ui [keys]

Starts MLflow's server on 127.0.0.1, on the store that runs log to, and prints the pages' URLs.
Keys: tracking.uri=<store>, tracking.experiment=<name>, port=<number>.""",
}


def print_help(argv: Sequence[str]) -> str:
    """Return the help text before the config; it lists the options of --config-dir, too."""
    folders = [Path(str(files("runner.conf")))]
    own_folder = config_dir(argv)
    if own_folder is not None:
        folders.append(own_folder)
    return HELP.format(groups="\n".join(_group_lines(folders)))


def _group_lines(folders: Sequence[Path]) -> Iterator[str]:
    options: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.glob("*/*.yaml"):
            options.setdefault(path.parent.name, set()).add(path.stem)
    for group, names in sorted(options.items()):
        yield f"  {group}: {', '.join(sorted(names))}"
