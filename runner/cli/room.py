"""The commands doctor, list, remove, sync and ui."""

from collections.abc import Mapping, Sequence

from runner.core import Command, Room


def _doctor(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.doctor import doctor

    return doctor(values.get("--config-dir"), "--measure" in values)


def _list(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.output_list import list_outputs

    return list_outputs(words, values)


def _remove(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.removal import remove

    return remove(words, values)


def _sync(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.sync import sync

    return sync(words, values.get("tracking.uri"), values.get("tracking.experiment"))


def _ui(words: Sequence[str], values: Mapping[str, str]) -> int:
    from runner.cli.ui import ui

    return ui(values.get("tracking.uri"), values.get("tracking.experiment"), values.get("port"))


DOCTOR = Command(
    name="doctor",
    summary="which precisions run on this machine",
    description="Lists every precision: whether it runs on this machine, why not, what to install."
    "\nMeasures what its products and copies reach, too.",
    run=_doctor,
    options={
        "--config-dir <folder>": "of your own configs: lists their precisions, too",
        "--measure": "measure products and copies, and write each device as one that device= takes",
    },
    short={"-cd": "--config-dir"},
)
LIST = Command(
    name="list",
    summary="runs and sweeps: what, when, answer, note, size",
    description="Lists the runs and sweeps below outputs/, the newest first.",
    run=_list,
    options={
        "precision=<name>": "those that ran in it",
        "model=<name>": "those of the model",
        "data=<name>": "those of the data",
        "--json": "all facts as JSON",
    },
    words="<folder or word> ...",
    words_meaning="folders in place of outputs/; other words stand in what is listed",
    words_allowed="folders and words",
)
REMOVE = Command(
    name="remove",
    summary="delete runs and sweeps, in MLflow, too",
    description="Deletes runs and sweeps: their folders, their runs in MLflow and, where the store "
    "is a database,\ntheir artifacts and models. It says what it deletes and asks.",
    run=_remove,
    options={"--yes": "without a question"},
    words="<folder or id> ...",
    words_meaning="of runs or sweeps below outputs/",
    words_allowed="folders or ids of runs and sweeps",
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
ROOM = Room(commands=(DOCTOR, LIST, REMOVE, SYNC, UI))
