"""The page in a real browser, at 12 layers and at 126: nothing sticks out, nothing is cut, no text lies on another.

The page runs no script, so a page of the test's holds it in a frame, measures it there and writes down what it found.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.report.page import build_report
from tests.support.seen_runs import SeenRun
from tests.support.stores import FakeLayer

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: how the page looks is not checked"),
]

MEASURE = """
const found = {};
const crosses = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, root = page.documentElement, problems = [];
  if (root.scrollWidth > root.clientWidth) problems.push(`page: ${root.scrollWidth} > ${root.clientWidth}`);
  for (const box of page.querySelectorAll(".check, .figures > div, .verdict, .verdict li, .missing, header, footer"))
    if (box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1)
      problems.push(`cut: ${box.className}: ${box.textContent.slice(0, 60)}`);
  for (const picture of page.querySelectorAll("svg")) {
    const edge = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([text, place], index) => {
      if (place.left < edge.left - 1 || place.right > edge.right + 1 || place.bottom > edge.bottom + 1
          || place.top < edge.top - 1)
        problems.push(`out of its picture: ${text}`);
      for (const [other, where] of texts.slice(index + 1))
        if (crosses(place, where)) problems.push(`${text} lies on ${other}`);
    });
  }
  found[frame.name] = {
    problems, tables: page.querySelectorAll("table.layers tbody tr").length,
    svgs: page.querySelectorAll("svg").length, texts: page.querySelectorAll("svg text").length,
    seen: page.querySelector(".verdict .title").getBoundingClientRect().top < 200,
  };
}
document.body.textContent = JSON.stringify(found);
"""


def a_run(root: Path, layers: int, *, hurt: bool) -> Path:
    """A page of a run of so many layers, with everything on it that a page may have."""
    names = ("embed_tokens", *(f"model.decoder.layers.{i}" for i in range(layers)), "norm", "lm_head")
    run = SeenRun(root, [FakeLayer(name, 64) for name in names])
    for step in range(10, 400, 10):
        turn = [name for i, name in enumerate(names) if i % 4 == step // 10 % 4]
        run.save(step, layers=turn, drift=0.001 * (1 + step % 170))
    run.fail(400)
    run.decide(410, sick=(3, 4), skipped="withheld")
    run.restart(380, 390)
    newest = [run.save(step, layers=names[:5]) for step in (390, 400, 600)][-1]
    if hurt:
        run.store.payload(newest).unlink()
    page = root.parent / f"{root.name}.html"
    build_report(root, None, root.parent, verify=hurt, clock=lambda: run.at(7e4)).write(page)
    return page


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pages")
    pages = {"12": a_run(folder / "twelve", 12, hurt=False), "126": a_run(folder / "many", 126, hurt=True)}
    frames = "".join(
        f'<iframe name="{name} at {width}" width="{width}" height="900" src="{path.name}"></iframe>'
        for name, path in pages.items()
        for width in (1280, 1920, 800, 420)
    )
    harness = folder / "harness.html"
    harness.write_text(f"<body>{frames}<script>onload = () => {{ {MEASURE} }}</script></body>")
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            harness.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    body = re.search(r"<body>(.*)</body>", done.stdout, re.S)
    assert body is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(body[1]))
    return found


@pytest.mark.parametrize("width", [1280, 1920, 800, 420])
@pytest.mark.parametrize("layers", ["12", "126"])
def test_nothing_sticks_out_is_cut_or_overlaps(measured: dict[str, Any], layers: str, width: int) -> None:
    found = measured[f"{layers} at {width}"]
    assert found["problems"] == []
    assert found["svgs"] == 3 and found["tables"] == int(layers) + 3 and found["texts"] > 50
    assert found["seen"], "the verdict is what one sees first"
