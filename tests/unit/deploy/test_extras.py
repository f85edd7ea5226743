"""What is optional stays so: nothing imports it unasked, and where it is missing one line says what to install."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import ROOT, environment
from tests.support.plain_stores import PlainStore

PACKAGES = ("monitor", "policies", "store", "merger", "deploy")
DECLARED = {
    "isal",
    "jinja2",
    "msgspec",
    "numpy",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pydantic_core",
    "rich",
    "safetensors",
    "torch",
}
DECLARED |= {"typer", "xxhash", "yaml", "zstandard"}
"""What ``pip install driftpoint`` brings; pydantic_core comes with pydantic."""

HIDING = """
import sys

class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hider())
"""


def _hidden(names: set[str], code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDING.format(hidden=names) + code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=180, check=False)


CLI = "from deploy.cli.app import main; main()"


def _at_import(path: Path) -> Iterator[tuple[int, str]]:
    """Line and package of every import that runs when the module is imported."""
    kept = [ast.parse(path.read_text())]
    while kept:
        node = kept.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, one.name.partition(".")[0]) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").partition(".")[0]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _for_types(node):
            kept.extend(ast.iter_child_nodes(node))


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


HF = {"transformers", "accelerate", "peft"}
"""What the extra of that name brings, for the files in its folder."""


def test_what_is_imported_at_once_is_declared_or_the_file_is_named_after_it() -> None:
    strange = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in _at_import(path)
        if name not in DECLARED | {*PACKAGES} | sys.stdlib_module_names
        and not path.stem.startswith(name)
        and not (path.parent.name == "huggingface" and name in HF)
    ]
    assert strange == []


def test_import_monitor_costs_nothing_and_a_job_needs_no_extra() -> None:
    code = """
import sys
before = set(sys.modules)
import monitor
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
monitor.attach
print(sorted({name.partition(".")[0] for name in sys.modules}))
"""
    optional = {"deepspeed", "transformers", "accelerate", "matplotlib", "obstore", "lightning", "torchtitan"}
    done = _hidden(optional, code)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "['monitor']"
    assert not {"typer", "rich", "deploy", "merger", "isal"} & set(ast.literal_eval(second))


def test_public_names_are_there() -> None:
    import monitor

    assert set(monitor.__all__) <= set(dir(monitor))
    assert all(getattr(monitor, name).__name__ == name for name in monitor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        monitor.atach  # noqa: B018


@pytest.mark.parametrize("name", ["LightningCallback", "TorchtitanCheckpointManager"])
def test_a_trainer_that_is_not_installed_is_named(name: str) -> None:
    done = _hidden(
        {"lightning", "torchtitan"}, f"import monitor\ntry:\n    monitor.{name}\nexcept ImportError as e: print(e)"
    )
    assert done.stdout.startswith(
        f"monitor.{name} needs {name.removesuffix('Callback').removesuffix('CheckpointManager').lower()}"
    )


@pytest.mark.parametrize("command", ["init", "schema", "doctor"])
def test_what_comes_before_a_job_does_without_torch(tmp_path: Path, command: str) -> None:
    arguments = {"init": ("--out", tmp_path / "d.yaml"), "schema": (), "doctor": (tmp_path, "--json")}[command]
    done = _hidden({"torch", "deepspeed", "transformers"}, CLI, command, *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_report_names_what_its_charts_need(tmp_path: Path) -> None:
    store = PlainStore(tmp_path / "store")
    store.save(10)
    done = _hidden({"matplotlib"}, CLI, "report", store.root)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: the charts of a report need matplotlib (No module named 'matplotlib'): run "
        "`pip install 'driftpoint[report]'`\n"
    )
    assert not Path(f"{store.root}.report.html").exists()


def test_the_command_line_starts_without_matplotlib() -> None:
    code = "import sys, deploy.cli.app, deploy.cli.report; print('matplotlib' in sys.modules)"
    assert _hidden(set(), code).stdout == "False\n"


@pytest.mark.slow
def test_layouts_of_deepspeed(tmp_path: Path) -> None:
    builder = PlainStore(tmp_path / "store", framework="deepspeed")
    builder.save(10)
    out = tmp_path / "out"
    done = _hidden({"deepspeed"}, CLI, "merge", builder.root, "--out", out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: deepspeed is not installed, and DeepSpeed's files need its classes: run "
        "`pip install 'driftpoint[deepspeed]'`\n"
    )
    assert not out.exists()
