"""Test the page of a report: its structure, and how it looks in a real browser."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from balanced_dp.report import report_html
from balanced_dp.report.plots import FIRST, OTHER, SECOND, THIRD, USES, report_plots
from balanced_dp.search import fullness
from balanced_dp.units import format_bytes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PHONE = 400


class Outline(HTMLParser):
    """Collect the elements of a page and the texts in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements and data.strip():
            self.texts.append((self.elements[-1][0], data.strip()))

    def all(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.fixture(scope="module")
def page(report):
    return Outline(report_html(report))


def test_screen_readers_find_their_way(page, report):
    assert [html["lang"] for html in page.all("html")] == ["en"]
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert viewport in page.all("meta")
    assert next(text for tag, text in page.texts if tag == "title").startswith("<script>alert(1)")
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    values = [value for _, a in page.elements for name, value in a.items() if name.endswith("href")]
    assert {value[1:] for value in values if value[0] == "#"} <= set(ids)
    assert {value[0] for value in values} == {"#", "d"}  # within the page, and data:
    assert "<script" not in report_html(report) == report_html(report)


def test_tables_have_captions_and_headers(page):
    boxes = [box for box in page.all("div") if box.get("class") == "scroll"]
    numbers = [len(page.all(name)) for name in ("table", "caption", "thead", "tbody")]
    assert numbers == [len(boxes)] * 4 == [4] * 4
    assert {header["scope"] for header in page.all("th")} == {"col", "row"}
    assert all(box["tabindex"] == "0" and box["role"] == "region" for box in boxes)
    assert all(box["aria-label"] for box in boxes)
    assert [text for tag, text in page.texts if tag == "span"] == ["(marked)"] * 3


def test_plots_say_what_they_show(page, report, unlike):
    """They are of the best option; they were of another one, with outputs gathered."""
    full, uses = (drawing["aria-label"] for drawing in page.all("svg"))
    assert [drawing["role"] for drawing in page.all("svg")] == ["img", "img"]
    best, even = report.best, report.even
    assert not best.gather
    first, others = fullness(best.peak_bytes, report.budgets)
    told = f"device 0 {first:.0%}, others {others:.0%}, speed {best.speed:.2f}"
    assert f"gpu0_bsz={best.chunk_sizes[0]}: {told}" in full
    assert f"The best option is {best.line}." in full
    assert f"Device 0 holds {format_bytes(even.peak_bytes[0])} with nn.DataParallel" in uses
    assert f"and {format_bytes(best.peak_bytes[0])} with {best.line}" in uses
    for options, bars in (report.options, "Two bars"), ([even], "One bar"):
        fastest = replace(report, goal="speed", options=tuple(options))
        uses, svg = list(report_plots(fastest).values())[1]
        assert fastest.best is even and uses.startswith(f"{bars} for each device")
        assert uses.count(even.line) == 1 and ("right: option 1" in svg) == (bars == "Two bars")
    out = tuple(replace(o, out_of_memory="out") if o.is_even else o for o in unlike.options)
    assert len(report_plots(replace(unlike, options=out))) == 2


def test_plots_can_be_read_on_a_phone(report, unlike):
    for _, svg in (*report_plots(report).values(), *report_plots(unlike).values()):
        [width] = re.findall(r'viewBox="0 0 ([\d.]+) ', svg)
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert len(sizes) >= 10
        assert min(sizes) * (PHONE - 40) / float(width) >= 11


def luminance(colour: str) -> float:
    """Return the relative luminance. Source: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first: str, second: str) -> float:
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_on_both_grounds(report, unlike):
    page = report_html(report) + report_html(unlike)
    colours = {FIRST, SECOND, THIRD, OTHER, *USES.values()}
    for block in re.findall(r":root \{(.*?) \}", page, re.DOTALL)[:2]:  # light and dark
        scheme = dict(re.findall(r"--([\w-]+): (#\w+);", block))
        ground = scheme["ground"].replace("#fff", "#ffffff")[:7]
        assert min(contrast(scheme[name], ground) for name in ("ink", "soft", "focus")) >= 4.5
        assert contrast(scheme["ink"], scheme["mark"]) >= 4.5
        assert min(contrast(colour, ground) for colour in colours) >= 3
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    drawn = set(re.findall(r"(?:fill|stroke): (#\w+)", drawings))
    assert drawn <= {"#ffffff", "#b0b0b0", *colours}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # As root, which CI may be, Chromium runs without its sandbox only.
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(report, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report_html(report), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [1240, PHONE])
def test_the_page_in_a_browser(report, browser, file, width):
    page = browser.new_page(viewport={"width": width, "height": 900})
    told, requested = [], []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("dialog", lambda dialog: told.append(dialog.message))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(file.as_uri())
    assert told == []
    assert {url.split(":")[0] for url in requested} <= {"file", "data"}
    code = page.locator("pre.line")
    assert f"# option 1\nmodel = {report.best.line}" in code.inner_text()
    assert code.evaluate("pre => getComputedStyle(pre).whiteSpace") == "pre"  # no line wraps
    assert report.workload in page.locator("h1").inner_text()
    plots = page.locator("figure svg").all()
    assert len(plots) == 2
    for plot in plots:
        box = plot.bounding_box()
        assert min(box["width"], box["height"]) > 200
        assert box["x"] + box["width"] <= width
        assert plot.locator("path").count() >= 15
    marked = [row.locator("th").inner_text().split()[0] for row in page.locator("tr.marked").all()]
    assert marked == ["1", "peak", str(report.best.chunk_sizes[0])]
    for hint in page.locator("p.hint").all():
        assert hint.is_visible() == (width == PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_tables_scroll_by_keyboard(browser, file):
    # The page's policy forbids what wait_for_function does, too.
    page = browser.new_page(viewport={"width": PHONE, "height": 900}, bypass_csp=True)
    page.goto(file.as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "scroll"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.activeElement.scrollLeft > 0")
    page.close()


def test_dark_on_request_and_light_on_paper(browser, file):
    page = browser.new_page(color_scheme="dark")
    page.goto(file.as_uri())
    ground = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('figure svg text')).fill"
    assert page.evaluate(ground) == "rgb(21, 24, 29)"
    assert page.evaluate(text) == "rgb(232, 234, 237)"
    page.emulate_media(media="print")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert page.evaluate(text) == "rgb(28, 32, 36)"
    page.set_viewport_size({"width": 680, "height": 1000})  # A4 less its margins
    for table in page.locator("table").all():
        assert table.bounding_box()["width"] <= 680
    page.close()
