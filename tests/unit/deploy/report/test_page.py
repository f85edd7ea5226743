"""``driftpoint report``: the page of real stores. Its figures are those of the store, and nothing on it is believed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deploy.report.history import read_history
from deploy.report.page import build_report, render
from store.catalog import mark_suspect
from store.names import Unit
from tests.support.cli import Here
from tests.support.processes import holding_lock
from tests.support.seen_runs import SeenRun
from tests.support.stores import FakeLayer, StoreBuilder, flip_byte

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src="http://example.org/x.png" onerror=alert(1)>',
    "</title></style><b>",
    "{{ 7 * 7 }}",
    "a\u202eb\x1b[31m\x00",
    "x" * 300,
    "$x_{$",
)


class Page(HTMLParser):
    """What a browser would see: text, tags, and every attribute."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._text: list[str] = []
        self._style = False
        self.feed(html)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if not self._style:
            self._text.append(data)


@pytest.fixture
def run(tmp_path: Path) -> SeenRun:
    return SeenRun(tmp_path / "store", retention={"keep_last": 5})


def page(run: SeenRun, now: float = 605) -> Page:
    return Page(html(run, now))


def html(run: SeenRun, now: float = 605) -> str:
    return render(build_report(run.root, None, run.root.parent, verify=False, clock=lambda: run.at(now)))


def test_the_figures_are_those_of_the_store(run: SeenRun) -> None:
    saves = [run.save(570), run.save(580, layers=("layers.0",)), run.save(600, layers=("layers.1", "norm"))]
    run.store.prove(saves[0])
    text = page(run).text
    payloads = [run.store.payload(save).stat().st_size for save in saves]
    history = read_history(run.trace)
    assert (history.totals.saves, history.totals.written) == (3, sum(payloads))
    besides = payloads[0] - run.full
    assert history.totals.full == pytest.approx(3 * (run.full + besides), rel=0.2), "run state and headers count, too"
    for wanted in (
        "A restart now resumes at step 580",
        "step 600, 5.0 s ago",
        "composite: layers up to 30 steps old, drift up to 0.0100",
        "step 570 a job resumed from it and completed a step",
        "3 commits steps 570 to 600",
        "keeps the last 5, and older ones at increasing distances",
        "Saves 3 of 3 decisions",
        "5 layers, 392 parameters",
    ):
        assert wanted in text, wanted


def test_the_json_tells_the_same(here: Here, run: SeenRun, tmp_path: Path) -> None:
    written = sum(run.store.payload(run.save(step)).stat().st_size for step in (580, 590, 600))
    answer = here("report", run.root, "--json", "-o", tmp_path / "page.html", "--memory", tmp_path)
    assert (answer.code, answer.json["level"]) == (0, "good")
    assert (answer.json["saves"], answer.json["bytes_written"]) == (3, written)
    assert answer.json["stall_seconds"] == 1.5
    assert answer.json["out"] == str(tmp_path / "page.html")
    assert "bit for bit" in Page((tmp_path / "page.html").read_text()).text


def test_without_out_it_is_written_beside_the_store(here: Here, run: SeenRun) -> None:
    run.save(600)
    answer = here("report", run.root)
    assert answer.code == 0
    assert Path(f"{run.root}.report.html").read_text().startswith("<!DOCTYPE html>")
    assert f"{run.root}.report.html" in answer.out.replace("\n", "")


def test_the_certificate_is_row_by_row_what_show_says(here: Here, run: SeenRun) -> None:
    run.save(580)
    run.save(600, layers=("layers.0",), drift=0.0321)
    shown = here("show", run.root, "--json").json
    rows = re.findall(r'<tr><th title="([^"]*)">.*?</tr>', html(run), re.S)
    assert rows == list(dict.fromkeys(unit["layer"] for unit in shown["units"]))
    cells = re.findall(r'<td class="n group (\w+)">(\d+)!?</td><td class="n \w+">(\w+)</td>', html(run))
    assert [(int(step), age) for _, step, age in cells] == [
        (unit["step"], str(unit["staleness"])) for unit in shown["units"]
    ]


def test_nothing_is_fetched_and_nothing_runs(run: SeenRun) -> None:
    run.save(590)
    run.save(600)
    source, found = html(run), page(run)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "foreignobject"} & {*found.tags}
    assert not {"src", "xlink:href", "srcset", "background", "action"} & {name for name, _ in found.attributes}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    references = [value or "" for name, value in found.attributes if name == "href"]
    pictures = [value for value in references if re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=\s]+", value)]
    assert len(pictures) == 6, "two heat maps of three slots"
    assert all(value.startswith("#") for value in references if value not in pictures)
    for picture in pictures:
        source = source.replace(picture, "")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", source)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in source


def test_hostile_names_are_text(tmp_path: Path) -> None:
    run = SeenRun(tmp_path / "store <b>&", [FakeLayer(name) for name in HOSTILE])
    run.save(590)
    run.decide(600, sick=tuple(range(len(HOSTILE))))
    run.fail(610, reason="<script>alert(2)</script>")
    mark_suspect(run.store.files, run.store.store_id, run.save(620), "<script>alert(3)</script>")
    source, found = html(run), page(run)
    assert not {"script", "img", "b><img"} & {*found.tags}
    assert "{{ 7 * 7 }}" in found.text and "<script>alert(1)</script>" in found.text
    assert not {"\u202e", "\x1b", "\x00"} & {*source}
    assert "store <b>&" in found.text
    assert "<script>alert(2)</script>" in found.text and "<script>alert(3)</script>" in found.text


def test_without_a_trace_it_says_what_is_missing(here: Here, run: SeenRun) -> None:
    run.save(600)
    run.trace.unlink()
    found = page(run)
    assert "Missing history" in found.text and f"no drift trace at {run.trace}" in found.text
    assert "svg" not in found.tags
    assert here("report", run.root, "--json").json["missing"].startswith("There is no drift trace")
    answer = here("report", run.root, "--trace", run.root.parent / "other.jsonl")
    assert (answer.code, "other.jsonl" in answer.err) == (2, True)


def test_a_trace_elsewhere_is_taken_where_it_is_named(here: Here, run: SeenRun) -> None:
    run.save(600)
    elsewhere = run.trace.rename(run.root.parent / "elsewhere.jsonl")
    assert here("report", run.root, "--trace", elsewhere, "--json").json["saves"] == 1


def test_a_trace_of_another_store_is_not_shown(run: SeenRun, tmp_path: Path) -> None:
    other = SeenRun(tmp_path / "other")
    other.save(600)
    other.restart(600, 600)
    other.decide(900)
    run.save(600)
    run.trace.write_bytes(other.trace.read_bytes())
    found = page(run)
    assert "it belongs to another store" in found.text and "svg" not in found.tags


def test_an_empty_store_has_a_page(here: Here, tmp_path: Path) -> None:
    store = StoreBuilder(tmp_path / "store")
    answer = here("report", store.root)
    assert answer.code == 13
    text = Page(Path(f"{store.root}.report.html").read_text()).text
    assert "Nothing is saved in this store yet" in text


@pytest.mark.parametrize("damage", ["head", "manifest", "payload", "all"])
def test_a_damaged_store_has_a_page_that_says_so(here: Here, run: SeenRun, damage: str) -> None:
    old, new = run.save(590), run.save(600)
    if damage == "head":
        flip_byte(run.root / "STORE.json", 20)
    elif damage == "manifest":
        flip_byte(run.store.manifest(new), 100)
    elif damage == "payload":
        flip_byte(run.store.payload(new), -1)
    else:
        run.store.payload(old).unlink()
        run.store.payload(new).unlink()
    answer = here("report", run.root, "--verify", "--json")
    codes = {"head": 13, "manifest": 12, "payload": 12, "all": 13}
    assert answer.code == codes[damage]
    text = Page(Path(f"{run.root}.report.html").read_text()).text
    wanted = {
        "head": "STORE.json does not match its own checksum",
        "manifest": "step 590, not the newest commit",
        "payload": "1 commit damaged",
        "all": "None of 2 commits can be resumed",
    }
    assert wanted[damage] in text
    assert answer.json["level"] == ("bad" if damage in ("head", "all") else "look")


def test_where_it_cannot_be_written(here: Here, run: SeenRun) -> None:
    run.save(600)
    answer = here("report", run.root, "-o", run.root.parent / "no" / "page.html")
    assert (answer.code, "name another file with --out" in answer.err) == (1, True)
    assert not list(run.root.parent.glob("page.html*"))


def test_a_job_that_has_nothing_yet(run: SeenRun) -> None:
    run.decide(10)
    with holding_lock(run.root):
        text = page(run, 12).text
    assert "Not safe" in text and "restart at step 0" in text


def test_incidents_in_their_order(run: SeenRun) -> None:
    run.save(500)
    layer = Unit("layers.0", "fp32")
    run.save(510, without=(layer,))
    run.fail(520)
    for step in (530, 540, 550):
        run.decide(step, sick=(1,), skipped="withheld" if step == 550 else None)
    for step in (560, 570, 580):
        run.decide(step, drift=None, skipped="busy" if step != 570 else None)
    run.restart(500, 510)
    run.decide(510, preempted=True)
    found = [(one.kind, one.step, one.until, one.times) for one in read_history(run.trace).incidents]
    assert found == [
        ("withheld", 510, None, 1),
        ("save failed", 520, None, 1),
        ("not finite", 530, 550, 3),
        ("skipped", 550, None, 1),
        ("skipped", 560, 580, 2),
        ("restart", 500, None, 1),
        ("preempted", 510, None, 1),
    ]
    text = page(run).text
    assert "layers.0/fp32 contained NaN or Inf when the save was written" in text
    assert "epoch 2 resumed at step 500, from the commit of step 510: 80 steps repeated" in text


def test_lines_that_cannot_be_read_are_counted_and_told(run: SeenRun) -> None:
    run.save(600)
    with run.trace.open("ab") as file:
        file.write(b'{"kind":"decision","step":\nnonsense\n{"kind":"later"}\n')
    assert read_history(run.trace).skipped == 3
    assert "3 of its lines could not be read" in page(run).text


def test_much_damage_is_told_in_a_few_lines(tmp_path: Path) -> None:
    run = SeenRun(tmp_path / "store", layers=40)
    run.save(590)
    newest = run.save(600)
    run.store.save(610, layers=("norm",))
    run.store.payload(newest).unlink()
    run.trace.unlink()
    source = html(run)
    assert source.count('<td class="kind">damage</td>') == 9
    assert f"driftpoint status --json {run.root} lists all" in Page(source).text
