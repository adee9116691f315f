"""Serve an exported program through mlflow.pyfunc: fields by name in, named arrays out.

A logged model's folder has a copy of this file, so it imports nothing of this project.
mlflow.pytorch's own pyfunc takes and returns single tensors only.
"""

import json
from pathlib import Path
from typing import Any

FACTS_FILE = "program.json"
"""Names of inputs and outputs, beside model.pt2."""


def _load_pyfunc(path: str, model_config: Any = None) -> "ExportedProgram":
    """Load a model; mlflow.pyfunc.load_model calls it with the model's data folder."""
    return ExportedProgram(Path(path))


class ExportedProgram:
    """An exported program that takes and returns NumPy arrays."""

    def __init__(self, folder: Path) -> None:
        import torch

        self._facts = json.loads((folder / FACTS_FILE).read_text())
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
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        found = [leaf.numpy() for leaf in leaves]
        if self._facts["one_output"]:
            return found[0]
        return dict(zip(self._facts["outputs"], found, strict=True))
