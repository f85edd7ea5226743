"""The documentation site: building it, and what its pages point to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_LOADING_RELS = {"stylesheet", "preload", "prefetch", "modulepreload", "icon", "shortcut", "manifest", "preconnect"}


def build(out: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """``mkdocs build --strict`` into ``out``."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", out],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@dataclass
class Page(HTMLParser):
    """What one built page loads and links to, the anchors it has, and the text of its paragraphs."""

    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    paragraphs: list[str] = field(default_factory=list)
    pre: int = 0
    paragraph: list[str] | None = None

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of what the tag points to."""
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        self.loads += [found[name] for name in ("src", "srcset", "poster", "data") if found.get(name)]
        if tag == "link" and _LOADING_RELS & set(found.get("rel", "").split()):
            self.loads.append(found.get("href", ""))
        elif tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "p":
            self.paragraph = []
        if tag in ("pre", "code"):
            self.pre += 1

    def handle_endtag(self, tag: str) -> None:
        """Close what was open."""
        if tag == "p" and self.paragraph is not None:
            self.paragraphs.append("".join(self.paragraph))
            self.paragraph = None
        if tag in ("pre", "code"):
            self.pre -= 1

    def handle_data(self, data: str) -> None:
        """Text of the paragraph, if it is no code."""
        if self.paragraph is not None and not self.pre:
            self.paragraph.append(data)


def parsed(path: Path) -> Page:
    """One built page."""
    page = Page()
    page.feed(path.read_text())
    return page
