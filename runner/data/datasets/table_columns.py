"""Make data sets of the columns of an Arrow table: numbers, texts through a tokenizer, images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.data.datasets.encoded_images import EncodedImages, image_splits, image_transform
from runner.data.datasets.npz import as_input, as_target
from runner.data.fields import IGNORED_LABEL, TensorFields, split_fields
from runner.data.splits import Splits, held_out, require_at_least
from runner.utils.errors import ConfigError

_TOKEN_FIELDS = ("input_ids", "attention_mask", "labels")
"""Fields that data.text becomes."""

Tokenize = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True)
class TextOptions:
    """How texts become tokens.

    Attributes:
        column: with the texts.
        tokenize: returns the tokens of each text.
        length: tokens of an example.
        packing: whether texts follow each other without padding.
    """

    column: str
    tokenize: Tokenize
    length: int
    packing: bool


@dataclass(frozen=True)
class ImageOptions:
    """How encoded images become tensors.

    Attributes:
        column: with the images.
        label: column with the classes.
        size: side in pixels.
        augment: whether those of training are cropped and mirrored at random.
    """

    column: str
    label: str
    size: int
    augment: bool


@dataclass(frozen=True)
class TableColumns:
    """Which columns of a table are read, and what they become.

    Attributes:
        source: name of the data config, for messages.
        columns: columns of numbers that are fields under their names.
        target: column of the field `labels`; None where there is none.
        text: None without texts.
        image: None without images.
    """

    source: str
    columns: Sequence[str]
    target: str | None
    text: TextOptions | None
    image: ImageOptions | None

    @property
    def names(self) -> list[str]:
        """Return the columns that are read, each once."""
        names = [*self.columns]
        if self.text is not None:
            names.append(self.text.column)
        if self.image is not None:
            names += [self.image.column, self.image.label]
        if self.target is not None:
            names.append(self.target)
        return list(dict.fromkeys(names))

    def check_present(self, where: object, present: Sequence[str]) -> None:
        """Raise ConfigError where a table lacks a column.

        Args:
            where: the table's place, for the message.
            present: its columns.
        """
        missing = [name for name in self.names if name not in present]
        if missing:
            raise ConfigError(
                f"data={self.source}: {where} has no column {', '.join(missing)}; it has "
                f"{', '.join(present)}."
            )

    def splits(self, train: Any, val: Any, val_fraction: float, seed: int) -> Splits:
        """Return the data sets of tables.

        Args:
            train: Arrow table with the columns.
            val: of the validation set; None takes a share of train's examples.
            val_fraction: that share, between 0 and 1.
            seed: of the split.

        Raises:
            ConfigError: a column does not hold what it is to become.
        """
        if self.image is not None:
            return self._image_splits(train, val, val_fraction, seed)
        fields = self._fields(train)
        if val is not None:
            return Splits(TensorFields(fields), TensorFields(self._fields(val)))
        count = held_out(len(fields["labels"]), val_fraction, self.source)
        return Splits(*split_fields(fields, count, seed))

    def _image_splits(self, train: Any, val: Any, val_fraction: float, seed: int) -> Splits:
        make = self._image_maker(train)
        if val is None:
            count = held_out(len(train), val_fraction, self.source)
            return Splits(*image_splits(make, len(train), count, seed))
        held = self._image_maker(val)(False, torch.arange(len(val)))
        return Splits(make(True, torch.arange(len(train))), held)

    def _image_maker(self, table: Any) -> Callable[[bool, Tensor], EncodedImages]:
        """Return what makes a data set of rows of a table, given whether it is for training."""
        options = self.image
        assert options is not None
        images = table[options.column]
        self._check_images(images)
        labels = as_target(self._array(table, options.label, "Number the classes from 0."))
        if labels.is_floating_point() or labels.ndim != 1:
            raise ConfigError(
                f"data={self.source}: column {options.label} holds {table[options.label].type}, no "
                "classes. Type data.label=<a column of integers from 0>."
            )
        source = f"data={self.source}: column {options.column}"

        def make(for_training: bool, rows: Tensor) -> EncodedImages:
            transform = image_transform(options.size, options.augment and for_training)
            return EncodedImages(images, labels, rows, transform, source)

        return make

    def _check_images(self, images: Any) -> None:
        import pyarrow as pa

        kind = images.type
        is_struct = pa.types.is_struct(kind) and {"bytes", "path"} <= {field.name for field in kind}
        is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        if not (is_struct or is_bytes):
            assert self.image is not None
            raise ConfigError(
                f"data={self.source}: column {self.image.column} holds {kind}, no encoded images "
                "(bytes of PNG or JPEG files, or Hugging Face's {bytes, path}). Type "
                "data.image=<another column>."
            )

    def _fields(self, table: Any) -> dict[str, Tensor]:
        fields = {name: as_input(self._array(table, name)) for name in self.columns}
        if self.text is not None:
            fields |= self._token_fields(table[self.text.column].to_pylist(), self.text)
        if self.target is not None:
            fields["labels"] = as_target(self._array(table, self.target))
        if "labels" not in fields:
            raise ConfigError(
                f"data={self.source}: no column is the target. Type data.target=<name>."
            )
        return fields

    def _array(self, table: Any, name: str, remedy: str = "") -> np.ndarray:
        """Return a column of numbers, or of lists of one length, as an array [N, ...]."""
        column = table[name]
        if column.null_count:
            raise ConfigError(
                f"data={self.source}: column {name} has {column.null_count} empty values."
            )
        values = column.to_numpy()
        try:
            array = np.stack(values) if values.dtype == object else values
        except ValueError as error:
            raise ConfigError(
                f"data={self.source}: the lists of column {name} differ in length. Pad them to "
                "one length."
            ) from error
        if array.dtype.kind not in "fiub":
            otherwise = f"Texts are read with data.text={name} data.tokenizer=<path>."
            raise ConfigError(
                f"data={self.source}: column {name} holds {column.type}, no numbers. "
                f"{remedy or otherwise}"
            )
        # Arrow's own memory, a file perhaps, is not writable, of which torch warns.
        return array if array.flags.writeable else array.copy()

    def _token_fields(self, texts: list[str], options: TextOptions) -> dict[str, Tensor]:
        """Return input_ids, attention_mask and labels, int64 [N, length] each."""
        if any(text is None for text in texts):
            raise ConfigError(f"data={self.source}: column {options.column} has empty values.")
        if not all(isinstance(text, str) for text in texts):
            kind = type(texts[0]).__name__
            raise ConfigError(
                f"data={self.source}: column {options.column} holds values of type {kind}, no "
                "texts. Type data.text=<another column>, or data.columns=[<names>] for numbers."
            )
        rows = options.tokenize(texts)
        length = options.length
        if options.packing:
            stream = torch.tensor([token for row in rows for token in row])
            count = len(stream) // length
            if not count:
                raise ConfigError(
                    f"data={self.source}: all texts together have {len(stream)} tokens, fewer "
                    f"than one example of data.length={length}."
                )
            ids = stream[: count * length].reshape(count, length)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        ids = torch.zeros(len(rows), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            kept = row[:length]
            ids[i, : len(kept)] = torch.tensor(kept)
            mask[i, : len(kept)] = 1
        labels = ids.masked_fill(mask == 0, IGNORED_LABEL)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def table_columns(  # noqa: PLR0913 - its parameters are keys of the yaml
    source: str,
    *,
    columns: Sequence[str] | None,
    target: str | None,
    text: str | None,
    tokenizer: str | None,
    length: int,
    packing: bool,
    image: str | None,
    label: str | None,
    size: int,
    augment: bool,
) -> TableColumns:
    """Return the columns that keys of a data config name.

    Args:
        source: name of the data config, for messages.
        columns: columns of numbers, or of lists of one length, that are fields under their names.
        target: the column with the targets; None makes the tokens their own labels.
        text: the column with texts.
        tokenizer: a local folder that transformers loads, or a tokenizer.json.
        length: tokens of an example.
        packing: texts one after the other, cut into examples without padding; without target.
        image: the column with encoded images, which needs no other but label.
        label: the column with the classes of the images, integers from 0.
        size: side of an image in pixels.
        augment: crop and mirror the images of training at random.

    Raises:
        ConfigError: no input is named, or keys contradict each other.
    """
    require_at_least(source, length=(length, 2), size=(size, 1))
    if image is None and label is not None:
        raise ConfigError(
            f"data={source}: data.label={label} is the class of an image, and data.image names "
            "no column. Type data.image=<name>, or data.target for other inputs."
        )
    if image is not None:
        others = {"text": text, "columns": columns, "target": target}
        _check_image_keys(source, image, label, [key for key, value in others.items() if value])
        assert label is not None
        return TableColumns(source, (), None, None, ImageOptions(image, label, size, augment))
    texts = _text_options(source, text, tokenizer, length, packing, target)
    if texts is not None and packing and columns:
        raise ConfigError(
            f"data={source}: data.packing=true mixes the texts of several rows, so data.columns="
            f"[{','.join(columns)}] have no rows of their own. Type data.packing=false."
        )
    if texts is None and not columns:
        raise ConfigError(
            f"data={source}: neither data.text nor data.columns names an input. Type "
            "data.columns=[<names>] data.target=<name>, or data.text=<name> data.tokenizer=<path>, "
            "or data.image=<name> data.label=<name>."
        )
    _check_field_names(source, columns or (), target, text)
    return TableColumns(source, columns or (), target, texts, None)


def _check_field_names(
    source: str, columns: Sequence[str], target: str | None, text: str | None
) -> None:
    """Raise ConfigError where a column has the name of a field that other keys make."""
    made: dict[str, str] = {}
    if text is not None:
        made = dict.fromkeys(_TOKEN_FIELDS, f"data.text={text}")
    if target is not None:
        made["labels"] = f"data.target={target}"
    for name in columns:
        if name in made and name != target:
            advice = "data.target=labels, or leave it out of" if name == "labels" else "others in"
            raise ConfigError(
                f"data={source}: data.columns names {name}, and {made[name]} makes a field of that "
                f"name, too. Type {advice} data.columns."
            )


def _check_image_keys(source: str, image: str, label: str | None, others: Sequence[str]) -> None:
    if label is None:
        raise ConfigError(
            f"data={source}: data.image={image} needs the column with the classes. Type "
            "data.label=<name>."
        )
    if others:
        keys = ", ".join(f"data.{key}" for key in others)
        raise ConfigError(
            f"data={source}: data.image={image} is the one input, with data.label as its target; "
            f"leave out {keys}."
        )


def _text_options(
    source: str,
    text: str | None,
    tokenizer: str | None,
    length: int,
    packing: bool,
    target: str | None,
) -> TextOptions | None:
    if text is None:
        return None
    if tokenizer is None:
        raise ConfigError(
            f"data={source}: data.text={text} needs a tokenizer. Type data.tokenizer=<a local "
            "folder of a Hugging Face tokenizer, or a tokenizer.json>."
        )
    if packing and target is not None:
        raise ConfigError(
            f"data={source}: data.packing=true mixes the texts of several rows, so data.target="
            f"{target} has no row of its own. Type data.packing=false."
        )
    return TextOptions(text, _load_tokenizer(Path(tokenizer)), length, packing)


def _load_tokenizer(path: Path) -> Tokenize:
    """Return a function from texts to their tokens."""
    if not path.exists():
        raise ConfigError(f"data.tokenizer={path} does not exist. Type a local folder or file.")
    try:
        if path.is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(path))
            return lambda texts: [encoding.ids for encoding in fast.encode_batch(texts)]
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer: transformers is not installed here. Type pip install "
            "'precision-runner[hf]'."
        ) from error
    except Exception as error:  # tokenizers raises a bare Exception
        raise ConfigError(f"data.tokenizer={path} cannot be loaded: {error}.") from error
    return lambda texts: loaded(texts)["input_ids"]
