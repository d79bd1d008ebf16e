"""Reports as files, Markdown and HTML. Needs the extra ``report``: pydantic, jinja2, matplotlib."""

from .compare import Comparison, compare_reports
from .file import load_reports, rank_report_json, report_json, save_report
from .html import report_html
from .markdown import report_markdown

__all__ = [
    "Comparison",
    "compare_reports",
    "load_reports",
    "rank_report_json",
    "report_html",
    "report_json",
    "report_markdown",
    "save_report",
]
