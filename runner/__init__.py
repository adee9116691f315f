"""Train, compare and choose numerical precision in PyTorch: Hydra in, MLflow out."""

from pathlib import Path

from runner.config import renamed

# A wheel has conf/ and models/ inside this package; a checkout has them next to it.
if not (Path(__file__).parent / "conf").exists():
    __path__.append(str(Path(__file__).parent.parent))

renamed.install_import_hook()

__version__ = "0.1.0"
