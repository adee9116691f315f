"""Serve an exported program through mlflow.pyfunc: fields by name in, named arrays out.

A logged model's folder has a copy of this file, so it imports nothing of this project.
mlflow.pytorch's own pyfunc takes and returns single tensors only.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _load_pyfunc(path: str, model_config: Mapping[str, Any]) -> "ExportedProgram":
    """Load a model; mlflow.pyfunc.load_model calls it with the folder of model.pt2."""
    return ExportedProgram(Path(path), model_config)


class ExportedProgram:
    """An exported program that takes and returns NumPy arrays.

    Args:
        folder: of model.pt2.
        facts: names of `inputs` and `outputs`; `fields`, whether the program takes the inputs by
            name; `one_output`, whether it returns a single tensor.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        import torch

        self._facts = facts
        self._program = torch.export.load(folder / "model.pt2").module()

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Return the output for a batch: an array, or a dict of arrays where it has several parts.

        Args:
            model_input: a dict of arrays [N, ...] by the names of the model's signature; an array
                where the signature has no names.
            params: not used.
        """
        import numpy as np
        import torch
        from torch.utils._pytree import tree_leaves

        names = self._facts["inputs"]
        arrays = model_input if isinstance(model_input, dict) else {names[0]: model_input}
        tensors = {name: torch.from_numpy(np.array(arrays[name])) for name in names}
        arguments = (tensors,) if self._facts["fields"] else tuple(tensors.values())
        with torch.no_grad():
            output = self._program(*arguments)
        leaves = [leaf.numpy() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if self._facts["one_output"]:
            return leaves[0]
        return dict(zip(self._facts["outputs"], leaves, strict=True))
