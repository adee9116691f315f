"""The commands doctor, sync and ui."""

from collections.abc import Mapping, Sequence

from runner.core import Command, Room


def _doctor(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.doctor import doctor

    return doctor(values.get("--config-dir"))


def _sync(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.sync import sync

    return sync(words, values.get("tracking.uri"), values.get("tracking.experiment"))


def _ui(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.ui import ui

    return ui(values.get("tracking.uri"), values.get("tracking.experiment"), values.get("port"))


DOCTOR = Command(
    name="doctor",
    summary="which precisions run on this machine",
    description="Lists every precision: whether it runs on this machine, why not, what to install.",
    run=_doctor,
    options={"--config-dir <folder>": "of your own configs: lists their precisions, too"},
    short={"-cd": "--config-dir"},
)
SYNC = Command(
    name="sync",
    summary="upload records that are missing in MLflow",
    description="Uploads records that are missing in MLflow, after an outage or a crash; nothing "
    "is uploaded\ntwice. Exit status 1 if an upload failed: type it again.",
    run=_sync,
    options={
        "tracking.uri=<store>": "upload to another store",
        "tracking.experiment=<name>": "upload to another experiment",
    },
    words="<folder> ...",
    words_meaning="of runs or sweeps; by default all runs under outputs/",
    words_allowed="folders of runs or sweeps",
    takes_folders=True,
)
UI = Command(
    name="ui",
    summary="MLflow's pages on the store that runs log to",
    description="Starts MLflow's server on 127.0.0.1 and prints the URLs of its pages.",
    run=_ui,
    options={
        **Command.STORE_OPTIONS,
        "port=<number>": "by default the first free one from 5000 on",
    },
)
ROOM = Room(commands=(DOCTOR, SYNC, UI))
