"""What the page on operations says can be done with a store's files, done: copied under a running job, and put back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import monitor
from store.catalog import open_catalog
from store.resolve import newest_resumable
from store.storage.local import LocalFiles
from store.verify import verify
from tests.support.site import DOCS

PAGE = (DOCS / "operations.md").read_text()
KEPT = 2


class Run:
    """A toy job with a commit at every step; ``states``: its weights after each."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        settings: dict[str, Any] = {"every": 1, "retention": {"keep_last": KEPT, "log_spaced": False}}
        settings |= {"store": str(root), "metrics": {"enabled": False}}
        self.ckpt = monitor.attach((self.model, self.optimizer), settings)
        self.step = self.ckpt.resume()
        self.states = {self.step: self.weights()}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            self.ckpt.step()
            self.ckpt.flush()
            self.step += 1
            self.states[self.step] = self.weights()

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def committed(root: Path) -> list[int]:
    return [save.step for save in open_catalog(LocalFiles(root)).saves()]


def test_the_page_copies_manifests_first() -> None:
    copied = re.findall(r"^rsync (.*)$", PAGE, re.MULTILINE)
    assert copied == [
        "-a STORE/manifests/ COPY/manifests/",
        "-a --exclude LOCK --exclude LATEST --exclude '.tmp-*' --exclude '/manifests/' STORE/ COPY/",
    ]


@pytest.mark.parametrize("meanwhile", [0, KEPT - 1, KEPT])
def test_a_copy_made_while_the_job_commits_and_prunes(tmp_path: Path, meanwhile: int) -> None:
    """In the order of the page, with commits between its two commands: fewer than are kept, and as many."""
    root, copy = tmp_path / "store", tmp_path / "copy"
    run = Run(root)
    run.train(4)
    shutil.copytree(root / "manifests", copy / "manifests")
    run.train(meanwhile)
    shutil.copytree(
        root,
        copy,
        dirs_exist_ok=True,
        ignore=lambda folder, names: ["LOCK", "LATEST", *({"manifests"} if Path(folder) == root else ())],
    )
    run.ckpt.close()
    catalog = open_catalog(LocalFiles(copy))
    found = verify(catalog)
    if meanwhile < KEPT:
        assert newest_resumable(catalog)[0].manifest.step == 4
        again = Run(copy)
        assert again.step == 4 and torch.equal(again.weights(), run.states[4])
        again.ckpt.close()
    assert found.ok == (meanwhile == 0)  # of the others verify names what lacks its segments


def test_going_back_and_forth(tmp_path: Path) -> None:
    root, aside = tmp_path / "store", tmp_path / "aside"
    first = Run(root)
    first.train(3)
    first.ckpt.close()
    assert committed(root) == [3, 2]
    aside.mkdir()
    (newest,) = [path for path in (root / "manifests").iterdir() if path.name.startswith("00000003")]
    shutil.move(newest, aside)
    back = Run(root)
    assert back.step == 2 and torch.equal(back.weights(), first.states[2])
    back.ckpt.close()
    shutil.move(aside / newest.name, newest)
    forth = Run(root)
    assert forth.step == 3 and torch.equal(forth.weights(), first.states[3])
    forth.ckpt.close()
