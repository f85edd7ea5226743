"""The numbers that begin the page on optimizers are those of its table."""

from __future__ import annotations

import re

from tests.support.site import DOCS


def test_the_cases_are_counted() -> None:
    text = (DOCS / "optimizers.md").read_text()
    ends = re.findall(r"^\| .* \| (bit for bit|refused [a-z ]+) \|$", text, re.MULTILINE)
    carried = ends.count("bit for bit")
    refused = len(ends) - carried
    said = f"{len(ends)} cases were killed and resumed: {carried} came back bit for bit, {refused} are refused"
    assert said in text.replace("\n", " ")
