"""Load rows of parquet files: columns of numbers, texts through a tokenizer, or encoded images."""

from functools import partial
from pathlib import Path
from typing import Any

from runner.data.datasets.table_columns import TableColumns, table_target
from runner.data.splits import Splits
from runner.utils.errors import ConfigError


@partial(table_target, "parquet")
def parquet(
    columns: TableColumns, path: str, val_path: str | None = None, val_fraction: float = 0.1
) -> Splits:
    """Load a parquet file, or a folder of them, as the fields of a batch or as images.

    Args:
        columns: keys of their own, see TableColumns.
        path: a file, or a folder whose *.parquet are read in the order of their names, but for
            hidden ones.
        val_path: of the validation set; None takes val_fraction of path's examples.
        val_fraction: share for validation, between 0 and 1.

    Raises:
        ConfigError: a file, a column or the tokenizer cannot be used.
    """
    table = _read(path, columns)
    val = None if val_path is None else _read(val_path, columns)
    return columns.splits(table, val, val_fraction)


def _read(path: str, columns: TableColumns) -> Any:
    """Return the named columns of a file or of a folder's files as an Arrow table."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    where = Path(path)
    files = sorted(where.glob("[!.]*.parquet")) if where.is_dir() else [where]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"data=parquet: no parquet file is at {path}. Type data.path=<file>.")
    try:
        columns.check_present(files[0], pq.read_schema(files[0]).names)
        return pa.concat_tables([pq.read_table(file, columns=columns.names) for file in files])
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data=parquet: {path} cannot be read: {error}.") from error
