"""Load local data with Hugging Face's datasets: what save_to_disk wrote, csv, json or parquet."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from runner.core import ConfigError, errors
from runner.data.datasets.parquet import batch_rows
from runner.data.datasets.table_columns import TableColumns, table_target
from runner.data.splits import Splits

log = logging.getLogger(__name__)

_KINDS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Loaders of datasets by the suffixes of files."""
_VALIDATION_SPLITS = ("validation", "val", "valid", "dev")
_SHARE = 0.1
_LAYOUT = "Allowed: a folder of save_to_disk, or a file or glob of .csv, .json, .jsonl or .parquet"


@partial(table_target, "hf")
def hf_dataset(
    columns: TableColumns, path: str, val: str | float | None = None, split: str = "train"
) -> Splits:
    """Load a data set of Hugging Face's datasets; nothing is downloaded.

    Args:
        columns: keys of their own, see TableColumns.
        path: a folder that save_to_disk wrote, or a file or glob of .csv, .json, .jsonl, .parquet.
        val: the validation set: another path, the name of a split beside `split`, or a share of
            path's examples between 0 and 1. None takes the split `validation` where the folder
            has one (a line of the log says so), else 0.1 of the examples.
        split: which part of a folder with several is trained on.

    Raises:
        ConfigError: datasets is not installed, or a file, a column or the tokenizer cannot be used.
    """
    parts = _load(path)
    train = _table(_part(parts, split, path, "split"), path, columns)
    if isinstance(val, int | float):
        return columns.splits(train, None, float(val))
    validation = _validation(parts, val, path)
    if validation is not None:
        validation = _table(validation, str(val or path), columns)
    return columns.splits(train, validation, _SHARE)


def _validation(parts: Mapping[str, Any], val: str | None, path: str) -> Any:
    """Return the validation set; None where it is a share of the training set."""
    if val is None:
        name = next((name for name in _VALIDATION_SPLITS if name in parts), None)
        if name is None:
            return None
        log.warning("data=hf validates on the split %s of %s (data.val=%s)", name, path, name)
        return parts[name]
    if val in parts:
        return parts[val]
    others = _load(val, "val", [*parts])
    # A folder of one set, or the set of that purpose in a folder of several.
    if len(others) == 1:
        return next(iter(others.values()))
    name = next((name for name in _VALIDATION_SPLITS if name in others), _VALIDATION_SPLITS[0])
    return _part(others, name, val, "val")


def _part(parts: Mapping[str, Any], name: str, path: str, key: str) -> Any:
    """Return one of the sets of a folder."""
    if len(parts) == 1 and "" in parts:
        return parts[""]
    if name in parts:
        return parts[name]
    splits = ", ".join(parts)
    raise ConfigError(
        f"data=hf: {path} has the splits {splits}, and not {name}. Type data.{key}=<one of them>."
    )


def _load(path: str, key: str = "path", splits: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the data sets at a path by the names of their splits; that of an only one is empty.

    Args:
        path: folder, file or glob.
        key: that named it, for messages.
        splits: of data.path, which data.val may name, for messages.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data=hf: datasets is not installed. Type pip install 'precision-runner[datasets]'."
        ) from error
    where = Path(path)
    # Path.glob takes no absolute pattern.
    files = sorted(name for name in glob(path, recursive=True) if Path(name).is_file())  # noqa: PTH207
    if not where.is_dir() and not files:
        named = f", or one of its splits {', '.join(splits)}" if any(splits) else ""
        raise ConfigError(
            f"data=hf: data.{key}={path} is not on this machine, and nothing is downloaded. "
            f"{_LAYOUT}{named}. A data set of the hub is saved by "
            f'datasets.load_dataset("{path}").save_to_disk("data/{where.name}").'
        )
    # Its bars would stand between the runner's own lines.
    datasets.disable_progress_bars()
    try:
        content: Any = _folder(datasets, where) if where.is_dir() else _files(datasets, files)
    except ConfigError:
        raise
    except Exception as error:  # of any reader's own type
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {errors.first_line(cause)}"
        raise ConfigError(f"data=hf: {path} cannot be read: {reason}. {_LAYOUT}.") from error
    if isinstance(content, datasets.DatasetDict):
        return {str(name): part for name, part in content.items()}
    return {"": content}


def _folder(datasets: Any, where: Path) -> Any:
    """Return what save_to_disk wrote into a folder."""
    if any((where / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(str(where))
    suffixes = sorted({file.suffix for file in where.iterdir() if file.suffix in _KINDS})
    hint = ""
    if suffixes:
        hint = f" It has {', '.join(suffixes)} files: type data.path='{where}/*{suffixes[0]}'."
    raise ConfigError(f"data=hf: {where} is no folder that save_to_disk wrote. {_LAYOUT}.{hint}")


def _files(datasets: Any, files: Sequence[str]) -> Any:
    """Return the rows of files, which must be of one kind."""
    suffixes = sorted({Path(file).suffix for file in files})
    kinds = {_KINDS.get(suffix) for suffix in suffixes}
    if len(kinds) != 1 or None in kinds:
        named = ", ".join(suffix or "without suffix" for suffix in suffixes)
        raise ConfigError(f"data=hf: the files are {named}. {_LAYOUT}, all of one kind.")
    for file in files:
        if kinds == {"parquet"}:
            batch_rows(Path(file))
        elif datasets.utils.extract.Extractor.infer_extractor_format(file):
            raise ConfigError(f"data=hf: {file} is compressed. Unpack it first.")
    return datasets.load_dataset(kinds.pop(), data_files=[*files], split="train")


def _table(dataset: Any, where: str, columns: TableColumns) -> Any:
    """Return the columns of a data set as an Arrow table, of files that stay on the disk."""
    columns.check_present(where, dataset.column_names)
    return dataset.select_columns(columns.names).with_format("arrow")[:]
