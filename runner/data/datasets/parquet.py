"""Load rows of parquet files: columns of numbers, texts through a tokenizer, or encoded images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.data.datasets.table_columns import TableColumns, table_columns
from runner.data.splits import Splits
from runner.utils.errors import ConfigError


def parquet(  # noqa: PLR0913 - its parameters are the keys of the yaml
    path: str,
    val_path: str | None = None,
    val_fraction: float = 0.1,
    columns: Sequence[str] | None = None,
    target: str | None = None,
    text: str | None = None,
    tokenizer: str | None = None,
    length: int = 128,
    packing: bool = False,
    seed: int = 0,
    image: str | None = None,
    label: str | None = None,
    size: int = 224,
    augment: bool = False,
) -> Splits:
    """Load a parquet file, or a folder of them, as the fields of a batch or as images.

    Args:
        path: a file, or a folder whose *.parquet are read in the order of their names.
        val_path: of the validation set; None takes val_fraction of path's examples.
        val_fraction: share for validation, between 0 and 1.
        columns: columns of numbers, or of lists of one length, that are fields under their names.
        target: the column with the targets, the field `labels`; None makes the tokens of `text`
            their own labels, as task=causal_lm takes them.
        text: the column with texts, which become the fields input_ids and attention_mask.
        tokenizer: a local folder that transformers loads, or a tokenizer.json.
        length: tokens of an example: longer texts are cut, shorter ones padded at the end.
        packing: texts one after the other, cut into examples without padding; without target.
        seed: of the split.
        image: the column with images, as the bytes of PNG or JPEG files or as Hugging Face's
            {bytes, path}; examples are then pairs (image, class).
        label: the column with the images' classes, integers from 0.
        size: side of the square image in pixels: the shorter side is resized to it, then
            the centre is cropped.
        augment: train on random resized crops and mirror images instead.

    Returns:
        Fields of float32, int64 tokens and labels; labels are -100 at padding. Images are float32
        [3, size, size], normalised with ImageNet's statistics, and decoded when they are read.

    Raises:
        ConfigError: a file, a column or the tokenizer cannot be used.
    """
    wanted = table_columns(
        "parquet",
        columns=columns,
        target=target,
        text=text,
        tokenizer=tokenizer,
        length=length,
        packing=packing,
        image=image,
        label=label,
        size=size,
        augment=augment,
    )
    table = _read(path, wanted)
    val = None if val_path is None else _read(val_path, wanted)
    return wanted.splits(table, val, val_fraction, seed)


def _read(path: str, wanted: TableColumns) -> Any:
    """Return the named columns of a file or of a folder's files as an Arrow table."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    where = Path(path)
    files = sorted(where.glob("*.parquet")) if where.is_dir() else [where]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"data=parquet: no parquet file is at {path}. Type data.path=<file>.")
    try:
        wanted.check_present(files[0], pq.read_schema(files[0]).names)
        return pa.concat_tables([pq.read_table(file, columns=wanted.names) for file in files])
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data=parquet: {path} cannot be read: {error}.") from error
