"""A report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2
from markupsafe import Markup

from ..tuning import Report
from .tables import (
    candidate_table,
    device_table,
    how_measured,
    lines,
    origin_table,
    summary,
    title,
)


def report_html(reports: Sequence[Report]) -> str:
    """Returns a page with a section for each report: words, tables and plots, no network."""
    from . import plots  # only where it is needed: it imports matplotlib, which takes a while

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balanced_dp.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [
        {
            "title": title(report),
            "gpu0_bsz": report.plan.gpu0_bsz,
            "line": lines(report),
            "summary": summary(report),
            "how_measured": how_measured(report),
            "devices": device_table(report),
            "candidates": candidate_table(report),
            "origin": origin_table(report),
            "plots": [
                (heading, Markup(plot(report)))  # SVG that matplotlib escaped
                for heading, plot in (
                    ("The peak of each device, for each gpu0_bsz", plots.peaks_plot),
                    ("What fills each device", plots.breakdown_plot),
                    ("Batch size and speed", plots.batch_plot),
                    ("Predicted and measured", plots.prediction_plot),
                )
            ],
        }
        for report in reports
    ]
    return environment.get_template("page.html").render(sections=sections)
