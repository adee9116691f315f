"""The peers' environment, which sees the project's own packages, so that torch exists once."""

import site
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"


def interpreter(folder: Path) -> Path:
    """Return the Python of an environment with the peers, which is created if it is missing."""
    python, marker = folder / "bin" / "python", folder / "requirements.txt"
    wanted = REQUIREMENTS.read_text()
    if marker.is_file() and marker.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "project.pth").write_text("\n".join(site.getsitepackages()))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", REQUIREMENTS], check=True)
    marker.write_text(wanted)
    return python


def versions(python: Path) -> str:
    """Return the versions of the compared packages, as installed there."""
    code = "from bench.common import versions; print(versions('torch', 'lightning', 'accelerate', "
    code += "'mlflow', 'hydra-core'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
