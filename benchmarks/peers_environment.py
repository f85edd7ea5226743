"""Python environments of peers: one each, on top of the environment that runs the benchmark.

A peer's environment sees the packages of the parent (torch above all, which is not downloaded again) and has its own
ones in front of them. What is installed there never changes the parent.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path


class PeerError(Exception):
    """A peer that cannot be installed or run. The message is the reason that its row gives."""


def python_for(requirements: tuple[str, ...], folder: Path) -> Path:
    """Return the interpreter of an environment with ``requirements``; the parent's own where there are none.

    Made at the first call, found again later: the requirements that it was made for are noted in it.

    Raises:
        PeerError: The package registry does not give it, or it wants another torch than the one that is here.
    """
    if not requirements:
        return Path(sys.executable)
    python, made = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join((*requirements, f"# torch {version('torch')}", ""))
    if made.exists() and made.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=False)
    see_parent(folder)
    fixed = folder / "constraints.txt"  # so that the peer runs on the same torch as all others, or not at all
    fixed.write_text(f"torch=={version('torch').partition('+')[0]}\n")
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(fixed), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"not installed: {last_line(done.stderr)}")
    made.write_text(wanted)
    return python


def see_parent(folder: Path) -> None:
    """Let an environment import the parent's packages after its own ones."""
    paths = sysconfig.get_paths()
    parents = dict.fromkeys((paths["purelib"], paths["platlib"]))
    own = next(folder.glob("lib/python3*/site-packages"))
    (own / "zz-parent.pth").write_text("".join(f"{parent}\n" for parent in parents))


def last_line(text: str) -> str:
    """The last line that says something, cut to what fits in a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
