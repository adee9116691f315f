"""Load rows of parquet files: columns of numbers, texts through a tokenizer, or encoded images."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.data.datasets.table_columns import TableColumns, table_target
from runner.data.splits import Splits
from runner.utils.errors import ConfigError
from runner.utils.files import check_unpacked, unpacked_limit

_BATCH_ROWS = 2**16
_BYTES = {"FLOAT": 4, "INT64": 8, "DOUBLE": 8}
"""Least bytes of a number in memory, by parquet's physical types."""


@partial(table_target, "parquet")
def parquet(
    columns: TableColumns, path: str, val_path: str | None = None, val_fraction: float = 0.1
) -> Splits:
    """Load a parquet file, or a folder of them, as the fields of a batch or as images.

    Args:
        columns: keys of their own, see TableColumns.
        path: a file, or a folder whose *.parquet are read in the order of their names.
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
    files = sorted(where.glob("*.parquet")) if where.is_dir() else [where]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"data=parquet: no parquet file is at {path}. Type data.path=<file>.")
    try:
        columns.check_present(files[0], pq.read_schema(files[0]).names)
        return pa.concat_tables([_read_file(file, columns.names) for file in files])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data=parquet: {path} cannot be read: {error}.") from error


def _read_file(file: Path, names: Sequence[str]) -> Any:
    """Return columns of a file; one that unpacks to all memory is refused before it does.

    Raises:
        ValueError: the file takes too much memory.
    """
    import pyarrow as pa
    from pyarrow import parquet as pq

    content = pq.ParquetFile(file)
    check_numbers(file, content.metadata)
    groups = range(content.num_row_groups)
    largest = max((content.metadata.row_group(i).total_byte_size for i in groups), default=1)
    # No text or image is larger than its group: so many rows stay below the limit.
    rows = min(unpacked_limit(file) // max(largest, 1), _BATCH_ROWS)
    batches = []
    size = 0
    for batch in content.iter_batches(max(rows, 1), columns=[*names]):
        size += batch.nbytes
        check_unpacked(file, size)
        batches.append(batch)
    return pa.Table.from_batches(batches) if batches else content.read(columns=[*names])


def check_numbers(file: Path, metadata: Any) -> None:
    """Refuse a file whose numbers take too much memory, as its metadata say.

    Args:
        file: to be read.
        metadata: of pyarrow, of the file.

    Raises:
        ValueError: they take too much.
    """
    size = 0
    for group in range(metadata.num_row_groups):
        for i in range(metadata.num_columns):
            column = metadata.row_group(group).column(i)
            # Bytes and whole numbers of 8 bits, too, are stored in another physical type.
            size += column.num_values * _BYTES.get(column.physical_type, 1)
    check_unpacked(file, size)
