"""Render reports as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from ..tuning.report_types import Report
from . import tables


def report_html(reports: Sequence[Report]) -> str:
    """Return a page with text, tables and plots of each report, which needs no network."""
    from .plots import report_plots  # matplotlib is slow to import

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balanced_dp.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html")
    return page.render(reports=reports, tables=tables, report_plots=report_plots)
