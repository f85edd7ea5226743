"""What importing Driftpoint costs a training script, against importing torch, which the script does anyhow.

    python benchmarks/imports.py --rounds 7

Each import in a process of its own, in turns; processor time, so that what else the machine does counts little. Told
is the median, and the ratio as the median of the ratios round by round.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

GOAL = 1.5

WAYS = {
    "python alone": "pass",
    "import torch": "import torch",
    "import monitor": "import monitor",
    "import torch and all that attach needs": "import torch, monitor; monitor.attach",
    "driftpoint --help": "import sys; sys.argv = ['driftpoint', '--help']; from deploy.cli.app import main; main()",
}


def seconds(code: str) -> float:
    """Processor time of a process that runs it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for code in WAYS.values():  # files into the page cache, bytecode onto the disk
        seconds(code)
    rounds = [{name: seconds(code) for name, code in WAYS.items()} for _ in range(options.rounds)]
    ratio = statistics.median(one["import torch and all that attach needs"] / one["import torch"] for one in rounds)
    figures = [
        {"name": name, "value": statistics.median(one[name] for one in rounds), "unit": "s", "against": None}
        for name in WAYS
    ]
    figures.append(
        {
            "name": "all that attach needs",
            "value": ratio,
            "unit": "x",
            "against": "import torch",
            "goal": GOAL,
            "holds": ratio <= GOAL,
        }
    )
    for one in figures:
        print(f"| {one['name']} | {one['value']:.3g} {one['unit']} |")
    if options.json:
        options.json.write_text(json.dumps({"figures": figures}, indent=2))
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
