"""The demo: train, lose a rank to SIGKILL, resume by itself, finish; then show what it cost and what came of it.

    python -m examples.demo

Starts examples.train_llama under torchrun and driftpoint run, twice: once with a rank killed part-way, once left alone,
so that there is something to compare with. All it makes is under demo-output/, which it removes first. The numbers come
from these two runs; nothing is remembered from elsewhere. Ends with code 1 unless the job resumed and finished.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from examples.commits import Commit, Watcher
from examples.job import Job, JobError
from examples.journal import Reader
from examples.picture import draw
from examples.story import Story, tell
from examples.table import certificate_table, footnotes, result_table

_VICTIM = 1
_OURS = ".made-by-the-demo"
_PATIENCE = 600.0
"""Seconds that one run may take."""


class Conductor:
    """Runs the job, tells what happens, and kills a rank when it is time."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self._args = args
        self._console = console
        self._began = time.monotonic()
        self._settings = yaml.safe_load(args.config.read_text())
        every = self._settings["every"]
        self._kill_after = args.kill_after or int(0.6 * args.steps / every) * every + min(3, every - 1)

    def interrupted(self) -> Story:
        """The run that loses a rank, under the configuration as it is."""
        args, out = self._args, self._args.out
        config = self._config("driftpoint", {**self._settings, "store": str(out / "store")})
        watcher = Watcher(out / "store")
        commits: list[Commit] = []
        events: list[dict[str, Any]] = []
        killed = False
        with closing(self._run("interrupted", config, ["--time-deepspeed", str(out / "deepspeed")])) as told:
            for event in told:
                commits += watcher.new()
                if event is None:
                    continue
                events.append(event)
                self._show(event, commits)
                if not killed and event["event"] == "step" and event["step"] >= self._kill_after:
                    killed = self._kill(event["step"], events[0]["metrics_port"])
        commits += watcher.new()
        if not killed:
            raise JobError(f"the job ended before step {self._kill_after}, so no rank was killed")
        story = tell(events, commits)
        if story.resumed is None or story.finished_at != args.steps:
            raise JobError("the job ended, but it did not resume from a commit and finish")
        return story

    def undisturbed(self) -> Story:
        """The same run without a failure. It saves nothing: policy observe."""
        settings = {key: value for key, value in self._settings.items() if key != "bounds"}
        settings |= {"store": str(self._args.out / "never-made"), "policy": {"name": "observe"}}
        events = []
        with closing(self._run("undisturbed", self._config("observe", settings), [])) as told:
            for event in told:
                if event is not None:
                    events.append(event)
                    self._show(event, [])
        return tell(events)

    def say(self, text: str) -> None:
        """One line, with the time since the demo began."""
        self._console.print(f"[dim]{time.monotonic() - self._began:5.0f} s[/dim]  {text}", highlight=False)

    def _run(self, name: str, config: Path, extra: list[str]) -> Generator[dict[str, Any] | None, None, None]:
        """The journal's events as they come, and None in between."""
        args, out = self._args, self._args.out
        journal = out / f"{name}.jsonl"
        flags = ["--journal", str(journal), *extra]
        for flag in ("steps", "hidden", "blocks", "batch"):
            flags += [f"--{flag}", str(getattr(args, flag))]
        reader, deadline = Reader(journal), time.monotonic() + _PATIENCE
        with Job(config, flags, out / f"{name}.log") as self._job:
            while self._job.running:
                yield from reader.new()
                yield None
                time.sleep(0.05)
                if time.monotonic() > deadline:
                    raise JobError(f"not finished after {_PATIENCE:.0f} s; see {self._job.log}")
            self._job.require_success()
        yield from reader.new()

    def _kill(self, step: int, port: int | None) -> bool:
        self._show_metrics(port)
        pid = self._job.kill_rank(_VICTIM)
        self.say(f"[bold red]killed rank {_VICTIM} (process {pid}) with SIGKILL after step {step}[/bold red]")
        self.say("nobody touches anything now: torchrun ends, and driftpoint run starts it again")
        return True

    def _show(self, event: dict[str, Any], commits: list[Commit]) -> None:
        if event["event"] == "start" and event["certificate"]:
            found = event["certificate"]
            kind = "exact" if found["exact"] else f"a composite, layers up to {found['max_staleness']} steps old"
            newest = found["step"]
            back = "" if newest == event["step"] else f"; the newest commit is of step {newest}"
            self.say(f"[bold green]resumed step {event['step']}[/bold green] ({kind}{back})")
        elif event["event"] == "start":
            size = f"{event['parameters'] / 1e6:.1f} M parameters in {len(event['layers'])} layers"
            self.say(f"training: {size}; DeepSpeed ZeRO-3, bf16, 2 ranks on CPU")
        elif event["event"] == "step" and (event["step"] == 1 or event["step"] % self._args.tell == 0):
            saves = f"   {len(commits)} saves, {_written(commits)}" if commits else ""
            self.say(f"step {event['step']:4d}   loss {event['loss']:.3f}{saves}")

    def _show_metrics(self, port: int | None) -> None:
        if port is None:
            return
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        shown = [
            line for line in lines if line.startswith(("driftpoint_saves_total", "driftpoint_written_bytes_total"))
        ]
        shown += [line for line in lines if line.startswith("driftpoint_layer_drift_ratio") and "fp32" in line][:2]
        self.say(f"what Prometheus sees at port {port}, for instance:")
        for line in shown:
            self._console.print(f"           {line}", style="cyan", highlight=False, markup=False)

    def _config(self, name: str, settings: dict[str, Any]) -> Path:
        path: Path = self._args.out / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings, sort_keys=False))
        return path


def main() -> int:
    args = arguments()
    console = Console(width=None if sys.stdout.isatty() else 118)
    make_anew(args.out)
    conductor = Conductor(args, console)
    try:
        conductor.say("a job that will lose a rank part-way")
        story = conductor.interrupted()
        control = None
        if not args.no_control:
            conductor.say("the same job again, left alone and saving nothing, to compare with")
            control = conductor.undisturbed()
    except JobError as error:
        console.print(f"[bold red]the demo failed:[/bold red] {error}", highlight=False)
        return 1
    picture = draw(story, control, args.out / "drift.png", threshold_of(args.config))
    for part in (result_table(story, control), certificate_table(story), footnotes(story, control)):
        console.print(part, highlight=False)
    console.print(f"picture: [bold]{picture}[/bold]\nnext, try:", highlight=False)
    store = args.out / "store"
    for command in (f"status {store}", f"show {store}", f"merge {store} --out {args.out / 'rebuilt'}"):
        console.print(f"  driftpoint {command}", style="cyan", highlight=False)
    return 0


def make_anew(folder: Path) -> None:
    """An empty ``folder``. Leaves with a message where there is one that the demo did not make."""
    if folder.exists() and not (folder / _OURS).exists():
        sys.exit(f"{folder} was not made by the demo and stays as it is; name another with --out")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _OURS).touch()


def threshold_of(config: Path) -> float | None:
    """The threshold that weights are saved at, where the policy has one."""
    policy = yaml.safe_load(config.read_text())["policy"]
    if not isinstance(policy, dict) or policy["name"] != "threshold":
        return None
    return float(policy.get("slots", {}).get("fp32", policy["threshold"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="removed and made anew")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("demo.yaml"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--kill-after", type=int, help="the step after which rank 1 is killed; default: at about 60 %%")
    parser.add_argument("--no-control", action="store_true", help="leave out the run without a failure")
    parser.add_argument("--tell", type=int, default=20, metavar="N", help="show every N-th step")
    return parser.parse_args()


def _written(commits: list[Commit]) -> str:
    written, full = sum(c.nbytes for c in commits), sum(c.nbytes + c.avoided for c in commits)
    return f"{written / 1e6:.0f} MB written where full saves are {full / 1e6:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
