"""Render a report as a self-contained HTML page."""

from __future__ import annotations

import re

import jinja2
from markupsafe import Markup, escape

from ..tuning.report import Report
from . import tables


def report_html(report: Report) -> str:
    """Return a page with text, tables and plots of a report, which needs no network."""
    from .plots import report_plots  # matplotlib is slow to import

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balanced_dp.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    drawings = {}
    for index, (heading, (description, svg)) in enumerate(report_plots(report).items()):
        # Ids get a prefix, to be unique in the page; matplotlib has escaped what it drew.
        text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"plot-{index}-", svg)
        label = f'<svg role="img" aria-label="{escape(description)}" '
        drawings[heading] = Markup(text.replace("<svg ", label, 1))
    page = environment.get_template("page.html")
    return page.render(report=report, tables=tables, drawings=drawings)
