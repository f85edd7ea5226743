"""The documentation builds strictly; all pages are reached, all links lead somewhere, nothing comes from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.site import DOCS, ROOT, Page, build, parsed

pytestmark = pytest.mark.slow

Pages = dict[str, Page]
"""By path in the site."""

PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
MARKUP = re.compile(r"(^|\n)(- |\d+\. |\||#+ |```)|\]\(|\*\*")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    out = tmp_path_factory.mktemp("site")
    done = build(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(out: Path) -> Pages:
    return {str(path.relative_to(out)): parsed(path) for path in sorted(out.rglob("*.html")) if path.name != "404.html"}


def target(page: str, link: str) -> tuple[str, str]:
    """(path in the site, anchor) of a link on a page."""
    parts = urlsplit(link)
    path = Path("/site") / Path(page).parent / unquote(parts.path) if parts.path else Path("/site") / page
    return str(Path(*path.parts[:1]).joinpath(path).resolve().relative_to("/site")), unquote(parts.fragment)


def internal(page: Page) -> list[str]:
    return [link for link in page.links if not urlsplit(link).scheme]


def test_every_page_is_built_and_reached_from_the_first(pages: Pages) -> None:
    written = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert set(pages) == written
    reached, new = set(), {"index.html"}
    while new:
        reached |= new
        new = {target(page, link)[0] for page in new for link in internal(pages[page])} & set(pages) - reached
    assert reached == written


def test_every_link_and_anchor_leads_somewhere(out: Path, pages: Pages) -> None:
    wrong = []
    for name, page in pages.items():
        for link in internal(page):
            path, anchor = target(name, link)
            path = path if (out / path).is_file() else f"{path}/index.html".removeprefix("./")
            if not (out / path).is_file() or (anchor and path in pages and anchor not in pages[path].ids):
                wrong.append((name, link))
    assert wrong == []


def test_nothing_is_loaded_from_elsewhere(out: Path, pages: Pages) -> None:
    for name, page in pages.items():
        assert page.loads
        for link in page.loads:
            assert link.startswith("data:") or not (urlsplit(link).scheme or urlsplit(link).netloc), (name, link)
            if not link.startswith("data:"):
                assert (out / target(name, link)[0]).is_file(), (name, link)
    for sheet in [*out.rglob("*.css"), *out.rglob("*.svg")]:
        assert not re.search(r"""(@import|url\(|(href|src)=)\s*['"]?\s*(https?:)?//""", sheet.read_text()), sheet


def test_no_markup_is_left_in_the_text(pages: Pages) -> None:
    """GitHub takes a list or a table right after a paragraph, the site's Markdown does not."""
    left = [(name, text) for name, page in pages.items() for text in page.paragraphs if MARKUP.search(text)]
    assert left == []


@pytest.mark.parametrize("name", ["index.md", "start.md", "huggingface.md", "fsdp2.md"])
def test_python_on_the_start_pages_compiles(name: str) -> None:
    blocks = PYTHON.findall((DOCS / name).read_text())
    assert blocks
    for block in blocks:
        compile(block, name, "exec")


@pytest.mark.parametrize(
    "added", ["[gone](gone.md)", "[gone](start.md#gone)", "![gone](images/gone.png)"], ids=["page", "anchor", "image"]
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, added: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# Index\n\n[start](start.md) {added}\n")
    (tmp_path / "docs/start.md").write_text("# Start\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0].replace("extra_css: [site.css]", "")
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "gone" in done.stderr


def test_a_page_that_is_not_in_the_navigation_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("index", "lost"):
        (tmp_path / f"docs/{name}.md").write_text(f"# {name}\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0].replace("extra_css: [site.css]", "")
    (tmp_path / "mkdocs.yml").write_text(f"{config}\nnav: [index.md]\n")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "lost.md" in done.stderr
