"""Render a report as a self-contained HTML page, and as Markdown."""

from __future__ import annotations

import re
from typing import Any

import jinja2
from markupsafe import Markup

from ..tuning.report import Report
from .tables import answer, provenance_table, title


def report_html(report: Report) -> str:
    """Return a report as a self-contained HTML page, with text, tables and plots."""
    from .plots import report_plots  # matplotlib is slow to import

    drawings = {
        # Ids get a prefix that makes them unique in the page. Jinja does not escape Markup,
        # and need not: Matplotlib has escaped the text of the SVG.
        heading: Markup(re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"plot-{index}-", svg))
        for index, (heading, svg) in enumerate(report_plots(report).items())
    }
    return _rendered("page.html", report, drawings=drawings)


def report_markdown(report: Report) -> str:
    """Return the text and the tables of a report as Markdown, without plots."""
    return _rendered("page.md", report)


def _rendered(template: str, report: Report, **others: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balanced_dp.report", "."),
        autoescape=True,
        finalize=_escaped if template.endswith(".md") else None,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    parts, provenance = [*answer(report)], provenance_table(report)
    page = environment.get_template(template)
    return page.render(title=title(report), parts=parts, provenance=provenance, **others)


def _escaped(text: str) -> Markup:
    """Escape ``text`` so that Markdown shows it unchanged, in one line.

    An instance of ``Markup`` is returned as it is.
    """
    if isinstance(text, Markup):
        return text
    return Markup(re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text).replace("\n", " "))
