"""Write reports as JSON, Markdown and HTML. Requires the extra ``report``."""

try:
    from .compare import Comparison, compare_reports
    from .documents import report_html, report_markdown
    from .json_file import load_report, report_json, save_report
except ModuleNotFoundError as error:  # only reports need jinja2 and pydantic
    raise ImportError(
        f"balanced_dp.report needs {error.name}, which is part of the extra 'report': "
        "pip install '.[report]' in a clone",
        name=error.name,
    ) from error

__all__ = [
    "Comparison",
    "compare_reports",
    "load_report",
    "report_html",
    "report_json",
    "report_markdown",
    "save_report",
]
