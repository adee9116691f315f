"""torch_tpu itself, in an environment of its own; everything else comes from this one. It finds no
device here and must say so. 4 GiB of packages and some minutes; RUNNER_TORCH_TPU names a Python
that has it already. `python -m pytest -m soak tests/e2e/test_tpu_packages.py`
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak


@pytest.fixture
def with_tpu(tmp_path):
    """A Python with torch_tpu and the packages of this environment."""
    if "RUNNER_TORCH_TPU" in os.environ:
        return os.environ["RUNNER_TORCH_TPU"]
    folder = tmp_path / "tpu"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "torch_tpu==0.2.0"]
    subprocess.run(install, check=True, timeout=1800)
    return str(folder / "bin" / "python")


def test_torch_tpu_without_a_tpu_says_so(with_tpu, tmp_path, clean):
    done = subprocess.run(
        [with_tpu, "-W", "ignore", "-m", "runner", "accelerator=tpu", "tracking=none"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "torch_tpu 0.2.0 finds no TPU. Type accelerator=cpu." in done.stderr
    assert "Traceback" not in done.stderr
