"""Load rows of parquet files: columns of numbers, texts through a tokenizer, or encoded images."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.core import ConfigError
from runner.data.datasets.table_columns import TableColumns, table_target
from runner.data.splits import Splits
from runner.data.unpacked_size import check_unpacked, unpacked_limit

_BYTES = {"FLOAT": 4, "INT64": 8, "DOUBLE": 8}
"""Bytes of a number in memory by parquet's physical type; numbers of 8 bits have another, too."""
_BATCH_ROWS = 65_536  # pyarrow's default


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
        schema = pq.read_schema(files[0])
        columns.check_present(files[0], schema.names)
        batches = [batch for file in files for batch in _batches(file, columns.names)]
        return pa.Table.from_batches(batches) if batches else schema.empty_table()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"data=parquet: {path} cannot be read: {error}.") from error


def _batches(file: Path, names: Sequence[str]) -> Iterator[Any]:
    """Yield columns of a file; one that unpacks to all memory is refused before it does.

    Raises:
        ValueError: the file takes too much memory.
    """
    from pyarrow import parquet as pq

    size = 0
    for batch in pq.ParquetFile(file).iter_batches(batch_rows(file, names), columns=[*names]):
        size += batch.nbytes
        check_unpacked(file, size)
        yield batch


def batch_rows(file: Path, names: Sequence[str] | None = None) -> int:
    """Return how many rows of a file can be read at once without filling the memory.

    Args:
        file: to be read.
        names: columns that are read; None for all.

    Raises:
        ValueError: the numbers in it take too much memory, as its metadata say.
    """
    from pyarrow import parquet as pq

    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(metadata.num_columns)]
    if names is not None:
        chunks = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in names]
    check_unpacked(file, sum(c.num_values * _BYTES.get(c.physical_type, 1) for c in chunks))
    # A text or an image is at most as large as its column in a group of rows, which stores equal
    # ones once.
    texts = [c.total_uncompressed_size for c in chunks if c.physical_type.endswith("BYTE_ARRAY")]
    return min(max(unpacked_limit(file) // max(texts, default=1), 1), _BATCH_ROWS)
