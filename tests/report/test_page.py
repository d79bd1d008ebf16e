"""Test the page of a report: its structure, and how it looks in a real browser."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from balanced_dp.report import report_html
from balanced_dp.report.plots import FIRST, OTHER, SECOND, THIRD, USES, draw_uses, report_plots

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PHONE = 400


@pytest.fixture(scope="module")
def pages(report, unlike) -> list[str]:
    return [report_html(each) for each in (report, unlike)]


@pytest.mark.slow
def test_the_structure_for_screen_readers(report, pages):
    text = pages[0]
    assert "<script" not in text == report_html(report)
    page = ElementTree.fromstring(text.removeprefix("<!doctype html>"))
    assert page.get("lang") == "en"
    assert page.findtext("head/title").startswith("<script>alert(1)")
    assert page.find("head/meta[@name='viewport']").get("content").startswith("width=device-width")
    headings = [element.tag for element in page.iter() if element.tag in ("h1", "h2", "h3", "h4")]
    assert headings == ["h1", "h2", "h2", "h2", "h2"]
    ids = [element.get("id") for element in page.iter() if element.get("id")]
    links = [value for e in page.iter() for name, value in e.items() if name.endswith("href")]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    assert {link[0] for link in links} == {"#", "d"}  # within the page, and data:
    for box in page.findall(".//div[@class='scroll']"):
        assert box.get("aria-label") == box.findtext("table/caption")
        assert (box.get("tabindex"), box.get("role")) == ("0", "region")
        assert {header.get("scope") for header in box.findall("table/thead/tr/th")} == {"col"}
        assert all(row.find("th").get("scope") == "row" for row in box.findall("table/tbody/tr"))
    marked = page.findall(".//tr[@class='marked']")
    assert [row.findtext("th/span") for row in marked] == [" (marked)"] * 3
    plots = page.findall(".//figure")
    assert [plot.find("div").get("role") for plot in plots] == ["img"] * 2
    assert all(p.find("div").get("aria-label").startswith(p.findtext("figcaption")) for p in plots)


def test_plots_are_of_the_best_option(report, unlike):
    """They were of another one, with outputs gathered."""
    best, even = report.best, report.even
    assert not best.gather
    peaks, uses = report_plots(report).values()
    assert f">the best: {best.chunk_sizes[0]}<" in peaks
    assert "device (left: option 1, right: even split)" in uses
    draw_uses(axes := Figure().subplots(), report)
    for first, option in (0, best), (report.num_devices, even):
        heights = [uses.patches[first].get_height() for uses in axes.containers]
        assert sum(heights) == pytest.approx(option.peak_bytes[0] / 2**20, rel=0.05)
    for options, bars in (report.options, "left: option 1, right: option 2"), ([even], "option 1"):
        fastest = replace(report, goal="speed", options=tuple(options))
        assert fastest.best is even and f"device ({bars})" in [*report_plots(fastest).values()][1]
    out = tuple(replace(o, out_of_memory="out") if o.is_even else o for o in unlike.options)
    assert len(report_plots(replace(unlike, options=out))) == 2


def test_plots_can_be_read_on_a_phone(pages):
    plots = re.findall(r"<svg.*?</svg>", "".join(pages), re.DOTALL)
    assert len(plots) == 4
    for svg in plots:
        [width] = re.findall(r'viewBox="0 0 ([\d.]+) ', svg)
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert len(sizes) >= 10
        assert min(sizes) * (PHONE - 40) / float(width) >= 11


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as ``"#1a2b3c"``, from 0 to 1.

    Source: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio
    """
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_stand_out_on_both_grounds(pages):
    page = "".join(pages)
    colours = {FIRST, SECOND, THIRD, OTHER, *USES.values()}
    for block in re.findall(r":root \{(.*?) \}", page, re.DOTALL)[:2]:  # light and dark
        scheme = dict(re.findall(r"--([\w-]+): (#\w+);", block)) | {"white": "#ffffff"}
        ground = scheme["white" if scheme["ground"] == "#fff" else "ground"]
        pairs = [(scheme[name], ground, 4.5) for name in ("ink", "soft", "focus")]
        pairs += [(scheme["ink"], scheme["mark"], 4.5), *((c, ground, 3) for c in colours)]
        for first, second, least in pairs:
            low, high = sorted(map(luminance, (first, second)))
            assert (high + 0.05) / (low + 0.05) >= least, (first, second)
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert {*re.findall(r"(?:fill|stroke): (#\w+)", drawings)} <= {"#ffffff", "#b0b0b0", *colours}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")
def test_the_page_in_a_browser(report, pages, tmp_path):
    """Nothing is printed, and nothing comes from a network."""
    sync_api = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "report.html"
    file.write_text(pages[0], encoding="utf-8")

    def opened(width, **options):
        page = browser.new_page(viewport={"width": width, "height": 900}, **options)
        events = []
        for name in ("console", "pageerror", "dialog"):
            page.on(name, lambda event: events.append(str(event)))
        page.on("request", lambda request: events.append(request.url.partition(":")[0]))
        page.goto(file.as_uri())
        assert {*events} <= {"file", "data"}
        return page

    with sync_api.sync_playwright() as playwright:
        # As root, which CI may be, Chromium runs without its sandbox only.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1240, PHONE):
            look_at(opened(width), report, width)
        # The page's policy forbids what wait_for_function does, too.
        scroll_by_keyboard(opened(PHONE, bypass_csp=True))
        print_on_paper(opened(680, color_scheme="dark"))
        browser.close()


def look_at(page, report, width):
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
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def scroll_by_keyboard(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "scroll"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.activeElement.scrollLeft > 0")


def print_on_paper(page):
    """Check that a dark page is printed with light colours, and within the width of A4 paper."""
    colours = """[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('figure svg text')).fill]"""
    assert page.evaluate(colours) == ["rgb(21, 24, 29)", "rgb(232, 234, 237)"]
    page.emulate_media(media="print")
    assert page.evaluate(colours) == ["rgb(255, 255, 255)", "rgb(28, 32, 36)"]
    assert max(t.bounding_box()["width"] for t in page.locator("table").all()) <= 680
