"""Pages that name tests and files of the repository name such as exist."""

from __future__ import annotations

import re

import pytest

from tests.support.site import DOCS, ROOT

NAMED = re.compile(r"`((?:tests|notebooks|examples|deploy|benchmarks|store|monitor|merger|policies)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("*.md")))
def test_named_files_exist(page: str) -> None:
    missing = [name for name in NAMED.findall((DOCS / page).read_text()) if not (ROOT / name).is_file()]
    assert missing == []


def test_every_guarantee_names_tests() -> None:
    text = (DOCS / "guarantees.md").read_text().partition("## What is not promised")[0]
    promises = re.split(r"^\*\*(?=G\d\.)", text, flags=re.MULTILINE)[1:]
    assert [promise[:3] for promise in promises] == [f"G{i}." for i in range(1, 9)]
    assert all(NAMED.search(promise) for promise in promises)
