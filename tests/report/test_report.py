"""Test reports as files and as Markdown, and their comparison."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ArgumentError, ReportError
from balanced_dp.report import (
    compare_reports,
    load_reports,
    report_html,
    report_json,
    report_markdown,
    save_report,
    tables,
)
from balanced_dp.report.compare import METRICS
from balanced_dp.tuning.report_types import Alternative


def test_a_file_gives_back_what_was_saved(report, unlike, tmp_path):
    for saved in (report, unlike):
        save_report(saved, tmp_path / "report.json")
        assert load_reports(tmp_path / "report.json") == (saved,)
        save_report(saved, tmp_path / "report.json")  # over an older one
    assert os.listdir(tmp_path) == ["report.json"]  # noqa: PTH208


def test_json_names_what_scripts_read(report):
    record = json.loads(report_json(report))
    assert record["schema"] == 4
    assert {"created", "command", "versions", "machine"} == record["origin"].keys()
    assert {"python", "torch", "balanced-dp", "nvidia-ml-py"} == record["origin"]["versions"].keys()
    assert {"first_laws", "idle_laws", "other_laws"} <= record["model"].keys()
    plan = record["plan"]
    for name in ("chunk_sizes", "predicted_bytes", "capacity_bytes"):
        assert len(plan[name]) == 4
        assert all(type(value) is int for value in plan[name])
    assert {"gpu0_bsz", "max_batch_size", "even_max_batch_size"} <= plan.keys()
    assert len(record["measurements"]) == report.model.num_points


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no report, or a truncated one: "),
        (lambda text: "", "is no report, or a truncated one: "),
        (lambda text: '{"a": 1}', "is JSON, but neither a report of balanced-dp nor one of pytest"),
        (lambda text: "[]", "is JSON, but neither"),
        (lambda text: text.replace('"schema": 4', '"schema": 2'), "has version 2 of a report's"),
        (lambda text: text.replace('"schema": 4', '"schema": "x"'), "has version 'x' of a"),
        (
            lambda text: text.replace('"max_batch_size"', '"other"', 1),
            r"is no report: plan\.max_batch_size: Field required",
        ),
        (
            lambda text: re.sub(r'"gpu0_bsz": \d+', '"gpu0_bsz": "few"', text, count=1),
            r"is no report: plan\.gpu0_bsz: Input should be a valid integer",
        ),
        (
            lambda text: '{"benchmarks": [{"extra_info": {}}], "machine_info": {}}',
            "holds 1 benchmarks and none of them a sweep over gpu0_bsz; run",
        ),
        (lambda text: "[" * 100_000, "is no report"),
        (lambda text: '{"benchmarks": ["a"], "machine_info": null}', "no report: benchmarks.0: "),
        (
            lambda text: '{"benchmarks": [{"extra_info": {"balanced_dp": {}}}], "machine_info": 1}',
            r"no report: benchmarks\.0\.extra_info\.balanced_dp\.measurement: Field required",
        ),
    ],
)
def test_a_foreign_file_is_told_and_left_alone(report, tmp_path, change, message):
    path = tmp_path / "report.json"
    text = change(report_json(report))
    path.write_text(text)
    with pytest.raises(ReportError, match=message):
        load_reports(path)
    assert path.read_text() == text


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ReportError, match="cannot be read: No such file"):
        load_reports(tmp_path / "none.json")
    with pytest.raises(ReportError, match="cannot be read: Is a directory"):
        load_reports(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReportError, match="is no report, or a truncated one: 'utf-8' codec"):
        load_reports(tmp_path / "binary")


def test_a_link_stays_one_and_a_pipe_is_written_to(report, tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    save_report(report, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_reports(tmp_path / "real.json") == (report,)
    os.mkfifo(tmp_path / "pipe")
    read = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    save_report(report, tmp_path / "pipe")
    assert read.communicate()[0] == report_json(report)
    assert (tmp_path / "pipe").is_fifo()


def test_a_write_that_fails_leaves_the_old_file(report, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ArgumentError, match="cannot be written: No space left on device"):
        save_report(report, path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(ArgumentError, match="cannot be written: No such file"):
        save_report(report, tmp_path / "none" / "report.json")


def test_markdown_has_the_line_the_tables_and_nothing_to_run(report, unlike):
    text = report_markdown(report)
    assert f"```python\n# option 1\nmodel = {report.line}\n" in text
    assert "<script>" not in text.replace("\\<script\\>", "")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    marked = [row for row in rows if row.startswith("| **")]
    assert len(marked) == 3  # the best, the bottleneck, the least full
    assert f"device_weights=[{unlike.plan.weighted.chunk_sizes[0]}" in report_markdown(unlike)


def test_the_page_is_the_same_each_time_and_needs_nothing_else(report):
    page = report_html([report])
    assert page == report_html([report])
    assert "<script" not in page
    links = set(re.findall(r"(?:src|href)=\"(.)", page))
    assert links == {"#", "d"}  # within the page, and data:


def test_a_report_is_compared_with_another(report):
    report, worse = replace(report, goal="headroom"), replace(report, goal="speed")
    assert worse.best.is_data_parallel and not report.best.is_data_parallel
    same = compare_reports(report, report, "peak:0%, imbalance:0, max_batch:0%,speed:0%")
    assert [found.metric for found in same] == list(METRICS)
    assert not any(found.failed for found in same)
    found = {c.metric: c for c in compare_reports(report, worse, "peak:5%,imbalance:0.05")}
    assert found["peak"].failed
    assert found["peak"].worsened == pytest.approx(
        max(report.even.peak_bytes) / max(report.best.peak_bytes) - 1
    )
    assert found["imbalance"].failed
    assert found["max_batch"].worsened > 0
    assert not found["max_batch"].failed  # not asked
    assert not any(c.failed for c in compare_reports(worse, report, "peak:0%,max_batch:0"))
    assert not compare_reports(report, worse, "peak:999999999")[0].failed


@pytest.mark.parametrize("limits", ["peak", "peak:", "other:5%", "peak:-5%", "peak:5%%", "peak 5"])
def test_limits_that_cannot_be_read_are_refused(report, limits):
    with pytest.raises(ArgumentError, match="--fail takes METRIC:NUMBER or METRIC:NUMBER% of peak"):
        compare_reports(report, report, limits)


def test_different_workloads_are_not_compared(report, unlike):
    with pytest.raises(ArgumentError, match="cannot be compared: the workload is <script>"):
        compare_reports(report, unlike)
    larger = replace(report, plan=replace(report.plan, batch_size=48))
    with pytest.raises(ArgumentError, match="batch size is 24 in the first and 48 in the second"):
        compare_reports(report, larger)


@given(st.text(max_size=30))
def test_any_name_stays_text(report, name):
    renamed = replace(report, workload=name)
    assert "\n\n```python\n# option 1\nmodel = " in report_markdown(renamed)
    assert json.loads(report_json(renamed))["workload"] == name


def test_a_batch_that_was_not_searched_beyond_is_said_to_be_a_bound(report):
    plan = report.plan
    endless = replace(report, options=[replace(o, max_batch_size=2**24) for o in report.options])
    endless = replace(endless, alternatives=())
    cells = {row[3] for row in tables.option_table(endless).rows}
    assert plan.max_batch_size < 2**24
    assert cells == {"16777216 or more"}
    unmeasured = replace(report, options=[replace(o, measured=None) for o in report.options])
    assert "its peaks are predicted." in " ".join(tables.summary(unmeasured))
    assert "predicted." not in " ".join(tables.summary(report))


def test_what_could_not_be_measured_is_named(report):
    failed = [Alternative(False, spread, reason="too large") for spread in (False, True)]
    text = " ".join(tables.summary(replace(report, alternatives=failed)))
    for what in ("The loss on each device", "Parameters on all devices"):
        assert f"{what} cannot be measured: too large." in text


def test_what_ran_out_of_memory_has_no_peak(report):
    failed = replace(report.even, status="oom", out_of_memory="CUDA out of memory")
    shown = replace(report, even=failed)
    assert "even split" in tables.device_table(report).headers
    assert "even split" not in tables.device_table(shown).headers
    assert tables.bottleneck(failed, shown.plan.budgets) == "out of memory"


def test_without_an_option_the_plan_is_shown(report):
    lacking = replace(report, alternatives=(), plan=replace(report.plan, reserve_bytes=19 * 2**20))
    text = report_markdown(lacking)
    assert "No split fits: with gpu0\\_bsz=" in text
    assert "option 1" not in text
    assert "```python" not in text
    assert f"What each device holds with gpu0\\_bsz={report.plan.gpu0_bsz}" in text
    assert "Options that fit" not in report_html([lacking])
