"""The sdist and the wheel hold what an installation needs, and nothing more; built offline by the declared backend."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("monitor", "policies", "store", "merger", "deploy")
LEFT_OUT = {"deploy/docker/Dockerfile", "deploy/prometheus/alerts_test.yml"}  # built, and run, in a checkout only
ROOT_FILES = {path.name for path in ROOT.glob("*.md")} | {"LICENSE", "CITATION.cff", "constraints.txt", "MANIFEST.in"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, tree: Path, out: Path) -> Path:
    """What ``python -m build`` does in the environment that it makes."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def names(folder: Path) -> set[str]:
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if "__pycache__" not in path.parts}


def product() -> set[str]:
    return {"driftpoint.py"} | {f"{one}/{name}" for one in PACKAGES for name in names(ROOT / one)} - LEFT_OUT


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path]:
    """(names in the sdist, wheel): the wheel is built from the sdist, as ``python -m build`` does."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    for one in (*PACKAGES, "examples", "notebooks"):
        shutil.copytree(ROOT / one, tree / one)
    for name in (*ROOT_FILES, "pyproject.toml", "driftpoint.py"):
        shutil.copy(ROOT / name, tree)
    stray = (
        "tests/test_it.py",
        "tests/unit/test_it.py",
        "benchmarks/one.py",
        "monitor/notes.txt",
        "store/a.safetensors",
    )
    for one in stray:
        (tree / one).parent.mkdir(parents=True, exist_ok=True)
        (tree / one).touch()
    with tarfile.open(build("sdist", tree, folder)) as packed:
        packed.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    found = names(unpacked)
    return found, build("wheel", unpacked, folder)


def test_the_wheel_holds_the_product_and_nothing_more(built: tuple[set[str], Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        listed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        changed = [name for name in listed if wheel.read(name) != (ROOT / name).read_bytes()]
    assert listed == product()
    assert changed == []
    assert {f"{one}/py.typed" for one in PACKAGES} <= listed


def test_the_sdist_holds_what_the_wheel_is_built_from(built: tuple[set[str], Path]) -> None:
    generated = {"PKG-INFO", "setup.cfg"}
    assert {name for name in built[0] if ".egg-info/" not in name} - generated == product() | ROOT_FILES | {
        "pyproject.toml"
    }


def test_the_metadata(built: tuple[set[str], Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (folder,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
        metadata: Message = message_from_string(wheel.read(f"{folder}/METADATA").decode())
        scripts = wheel.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in wheel.namelist()
    assert (
        metadata["License-Expression"] == "Apache-2.0" == yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"]
    )
    assert not [one for one in metadata.get_all("Classifier", []) if one.startswith("License ::")]  # SPDX forbids both
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "driftpoint = deploy.cli.app:main" in scripts


def test_one_version_everywhere() -> None:
    launch_files = [ROOT / "deploy" / name for name in names(ROOT / "deploy") if not name.endswith(".py")]
    images = [tag for path in launch_files for tag in re.findall(r"/driftpoint:(\S+)", path.read_text())]
    assert images and set(images) == {PROJECT["version"]}
