"""Render reports as one self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup, escape

from ..tuning.report import Report
from . import tables

if TYPE_CHECKING:
    from .plots import Plot


def report_html(reports: Sequence[Report]) -> str:
    """Return a page with text, tables and plots of each report, which needs no network."""
    from . import plots  # matplotlib is slow to import

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balanced_dp.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    page = environment.get_template("page.html")
    return page.render(reports=reports, tables=tables, plots=plots, drawing=_drawing)


def _drawing(plot: Plot, prefix: str) -> Markup:
    """Return the drawing as an image with a description; its ids get a prefix, to be unique."""
    text = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', prefix, plot.svg)
    label = f'<svg role="img" aria-label="{escape(plot.description)}" '
    return Markup(text.replace("<svg ", label, 1))  # matplotlib has escaped what it drew
