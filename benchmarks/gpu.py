"""Prove and measure the CUDA paths on a machine with one GPU: every step a process of its own, one JSON, one table.

    python benchmarks/gpu.py [--json FILE] [--log FILE] [--steps NAME ...] [--minutes 8.5] [--folder DIR] [--cpu]

Needed: this repository, a Python that has torch, and the wheels that ``make gpu-wheels`` collected in ``.gpu-wheels``,
which are installed in ``.gpu-site`` without a network; without them, or a GPU, what this Python has is used. Steps
that prove run at the same time, and then those that measure, one after the other. A step that fails, or runs out of
time, does not keep others from running; those that no time is left for are told. ``--cpu`` tries the steps themselves,
small, on a machine without a GPU: it proves nothing of CUDA.

Exits with 0 if every step passed or was skipped with a reason, 1 if one failed or ran out of time, and 2 if there is
no GPU, which proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS, SITE = ROOT / ".gpu-wheels", ROOT / ".gpu-site"
NO_GPU = 2
_FACTS = """
import json, platform, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    "device": torch.cuda.get_device_name(0) if cuda else None,
    "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else None,
}))
"""


@dataclass(frozen=True)
class Step:
    """One process. ``arguments`` follow the interpreter; FOLDER, JSON and DEVICE in them are replaced."""

    name: str
    arguments: tuple[str, ...]
    limit: float  # seconds
    small: tuple[str, ...] = ()  # further arguments with --cpu
    tool: tuple[str, ...] = ()  # program that runs the interpreter, and its arguments
    proof: str = ""  # what the output holds where something was done on the device: tests that skip prove nothing
    measures: bool = False  # whether it takes times, which others would disturb


@dataclass
class Outcome:
    """What became of a step. ``result``: passed, failed, timed out, not run."""

    name: str
    result: str
    seconds: float = 0.0
    detail: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    log: str = field(default="", repr=False)


_RESUME = ("--folder=FOLDER", "--device=DEVICE", "--json=JSON")
_ENCODERS = (
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "tests/unit/monitor/save/test_torch_codecs.py",
    "tests/gpu",
    "-k",
    "(codecs and cuda) or measured_at_once",
)
_TESTS = ("tests/gpu", "tests/unit/monitor/save/test_torch_codecs.py", "tests/unit/monitor/memory/test_tier.py")
STEPS = (
    Step(
        "tests",
        ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--basetemp=FOLDER", "-m", "cuda", *_TESTS),
        120,
        proof=" passed",
    ),
    Step("resume-torch", ("benchmarks/gpu_resume.py", "torch", *_RESUME), 120),
    Step("resume-deepspeed", ("benchmarks/gpu_resume.py", "deepspeed", *_RESUME), 120),
    Step(
        "copies",
        ("benchmarks/gpu_copies.py", "--profile", *_RESUME),
        200,
        ("--gigabytes=0.02", "--seconds=0.1", "--rounds=1"),
        measures=True,
    ),
    Step("kills", ("benchmarks/gpu_kills.py", *_RESUME), 240),
    Step("sanitizer", _ENCODERS, 90, tool=("compute-sanitizer", "--error-exitcode=9"), proof=" passed"),
    Step(
        "save",
        ("benchmarks/save.py", "--stages", "2", "--ranks=1", "--rounds=2", "--dir=FOLDER", "--json=JSON"),
        150,
        ("--layers=2", "--rounds=1"),
        measures=True,
    ),
    Step(
        "drift",
        ("benchmarks/drift.py", "--seeds=5", "--device=DEVICE", "--json=JSON"),
        60,
        ("--layers=1", "--rounds=1"),
        measures=True,
    ),
)
"""In the order of what they prove: where time runs out, the last are left out."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--log", type=Path, default=None, help="for all that the steps print")
    parser.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], default=None)
    parser.add_argument("--minutes", type=float, default=8.5, help="for all of them")
    parser.add_argument(
        "--folder", type=Path, default=None, help="for stores; needs 50 GB. Default: where there is room"
    )
    parser.add_argument("--cpu", action="store_true", help="try the steps, small, without a GPU")
    options = parser.parse_args()
    began = time.monotonic()
    facts = facts_of()
    if facts.get("device") is None and not options.cpu:
        print(f"no GPU here: {facts.get('problem') or 'torch {torch} sees no CUDA device'.format(**facts)}")
        return NO_GPU
    environment = install(None if options.cpu else WHEELS)
    chosen = [step for step in STEPS if not options.steps or step.name in options.steps]

    def outcome(step: Step) -> Outcome:
        left = 60 * options.minutes - (time.monotonic() - began)
        one = run(step, environment, options.folder, left, cpu=options.cpu)
        print(f"{one.name}: {one.result}, {one.seconds:.0f} s", flush=True)
        return one

    with ThreadPoolExecutor(1 if options.cpu else len(STEPS)) as pool:
        outcomes = list(pool.map(outcome, [step for step in chosen if not step.measures]))
    outcomes += [outcome(step) for step in chosen if step.measures]
    print(f"\n{table(facts, outcomes)}")
    if options.log is not None:
        options.log.write_text("".join(f"==== {one.name}: {one.result}\n{one.log}\n" for one in outcomes))
    if options.json is not None:
        found = {"date": time.strftime("%Y-%m-%d"), **facts, "seconds": round(time.monotonic() - began)}
        found["steps"] = [{key: value for key, value in asdict(one).items() if key != "log"} for one in outcomes]
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(one.result in ("failed", "timed out") for one in outcomes))


def install(folder: Path | None) -> dict[str, str]:
    """Install the wheels of a folder, if there are any and they are not installed. Return the environment of steps."""
    wheels, done = sorted(map(str, folder.glob("*.whl"))) if folder else [], SITE / "installed"
    paths = [str(ROOT)]
    if wheels:
        if not done.exists() or done.read_text().split("\n") != wheels:
            shutil.rmtree(SITE, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            command += ["--disable-pip-version-check", f"--target={SITE}"]
            if subprocess.run([*command, *wheels], check=False).returncode:
                sys.exit(f"the wheels in {folder} do not fit this Python: run `make gpu-wheels` for it")
            done.write_text("\n".join(wheels))
        paths.append(str(SITE))
    known = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([known] if known else [])]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # sums of equal order, which bitwise comparison needs
        "DS_BUILD_OPS": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
    }


def facts_of() -> dict[str, Any]:
    """Return what torch says of itself and of the device, or the problem."""
    seen = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=False)
    if seen.returncode:
        return {"problem": f"{sys.executable} cannot use torch: {(seen.stderr.strip() or '?').splitlines()[-1]}"}
    facts: dict[str, Any] = json.loads(seen.stdout.splitlines()[-1])
    return facts


def run(step: Step, environment: dict[str, str], folder: Path | None, left: float, *, cpu: bool) -> Outcome:
    """Run a step in a folder of its own, for as long as it may, and end all its processes."""
    if step.tool and (cpu or shutil.which(step.tool[0]) is None):
        return Outcome(step.name, "not run", detail=f"{step.tool[0]} is not here" if not cpu else "needs a GPU")
    if left < 20:
        return Outcome(step.name, "not run", detail="no time is left")
    with tempfile.TemporaryDirectory(prefix="driftpoint-gpu-", dir=folder or roomy()) as place:
        out = Path(place) / "out.json"
        (stores := Path(place) / "stores").mkdir()
        names = {"FOLDER": str(stores), "JSON": str(out), "DEVICE": "cpu" if cpu else "cuda"}
        arguments = [_replaced(one, names) for one in (*step.arguments, *(step.small if cpu else ()))]
        log, began = Path(place) / "log", time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*step.tool, sys.executable, *arguments],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(min(step.limit, left))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        seconds, text = time.monotonic() - began, log.read_text(errors="replace")
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    proven = code == 0 and (cpu or step.proof in text)
    result = "timed out" if code is None else "passed" if proven else "failed"
    missed = [figure["name"] for figure in found.get("figures", []) if figure.get("holds") is False]
    detail = f"goals missed: {', '.join(missed)}" if missed else last_line(text) if result != "failed" else text[-1500:]
    if result != "passed":
        print(text[-6000:], file=sys.stderr)
    return Outcome(step.name, result, round(seconds, 1), detail, found.pop("figures", []), found, text)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a step's processes, those that it left running too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def roomy() -> Path | None:
    """Return shared memory where it holds the stores of 10 GB of state, since disks are not what is measured."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > 50e9 else None


def table(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    """Return the steps, and their figures, as text."""
    lines = [f"{facts.get('device') or 'CPU'}, torch {facts.get('torch')}, Python {facts.get('python')}", ""]
    for one in outcomes:
        note = one.detail.splitlines()[-1][:110] if one.detail else ""
        lines.append(f"{one.name:18} {one.result:10} {one.seconds:6.1f} s  {note}")
        for figure in one.figures:
            goal = (
                "" if figure["goal"] is None else f"<= {figure['goal']:.3g} {'holds' if figure['holds'] else 'MISSED'}"
            )
            lines.append(f"    {figure['name']:44} {figure['value']:10.4g} {figure['unit']:5} {goal}")
        lines += [f"    {case['name']:44} {case['result']}" for case in one.found.get("cases", [])]
    return "\n".join(lines)


def last_line(text: str) -> str:
    """Return the last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip(" =-─└┘│")), "")


def _replaced(argument: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        argument = argument.replace(name, value)
    return argument


if __name__ == "__main__":
    sys.exit(main())
