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

from ..tuning.measured import option
from ..tuning.measured import report as report_of


def test_a_file_gives_back_what_was_saved(report, unlike, tmp_path):
    for saved in (report, unlike):
        save_report(saved, tmp_path / "report.json")
        assert load_reports(tmp_path / "report.json") == (saved,)
        save_report(saved, tmp_path / "report.json")  # over an older one
    assert os.listdir(tmp_path) == ["report.json"]  # noqa: PTH208


def test_json_names_what_scripts_read(report):
    record = json.loads(report_json(report))
    assert record["schema"] == 5
    assert {"created", "command", "versions", "machine"} == record["provenance"].keys()
    assert len(record["options"]) == len(report.options)
    for fields in record["options"]:
        for name in ("chunk_sizes", "peak_bytes"):
            assert len(fields[name]) == 4
            assert all(type(value) is int for value in fields[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is no report, or a truncated one: "),
        (lambda text: "", "is no report, or a truncated one: "),
        (lambda text: '{"a": 1}', "is JSON, but neither a report of balanced-dp nor one of pytest"),
        (lambda text: "[]", "is JSON, but neither"),
        (lambda text: text.replace('"schema": 5', '"schema": 2'), "has version 2 of a report's"),
        (lambda text: text.replace('"schema": 5', '"schema": "x"'), "has version 'x' of a"),
        (
            lambda text: text.replace('"peak_bytes"', '"other"', 1),
            r"is no report: options\.0\.peak_bytes: Field required",
        ),
        (
            lambda text: re.sub(r'"gpu0_bsz": \d+', '"gpu0_bsz": "few"', text, count=1),
            r"is no report: options\.\d\.gpu0_bsz: Input should be a valid integer",
        ),
        (
            lambda text: text.replace('"batch_size": 24', '"batch_size": 23'),
            "is no report: nothing was measured for its batch",
        ),
        (
            lambda text: '{"benchmarks": [{"extra_info": {}}], "machine_info": {}}',
            "nor one of pytest-benchmark with a sweep over gpu0_bsz",
        ),
        (lambda text: "[" * 100_000, "is no report"),
        (lambda text: '{"benchmarks": ["a"], "machine_info": null}', "is JSON, but neither"),
        (lambda text: '{"benchmarks": [{"extra_info": {"balanced_dp": 1}}]}', "but neither"),
    ],
)
def test_a_foreign_file_is_told_and_left_alone(report, tmp_path, change, message):
    path = tmp_path / "report.json"
    text = change(report_json(report))
    path.write_text(text)
    with pytest.raises(ReportError, match=message):
        load_reports(path)
    assert path.read_text() == text


def test_links_and_pipes_are_written_to(report, tmp_path):
    (tmp_path / "link.json").symlink_to("real.json")
    save_report(report, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_reports(tmp_path / "real.json") == (report,)
    os.mkfifo(tmp_path / "pipe")
    read = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    save_report(report, tmp_path / "pipe")
    assert read.communicate()[0] == report_json(report)
    with pytest.raises(ArgumentError, match="cannot be written: No such file"):
        save_report(report, tmp_path / "none" / "report.json")


def test_markdown_has_the_answer(report, unlike):
    text = report_markdown(report)
    assert f"```python\n# option 1\nmodel = {report.best.line}" in text
    assert "<script>" not in text.replace("\\<script\\>", "")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    marked = [row for row in rows if row.startswith("| **")]
    assert len(marked) == 3  # the best, the peak, the best
    assert f"device_weights=[{unlike.best.chunk_sizes[0]}, " in report_markdown(unlike)


def test_the_page_needs_nothing_else(report):
    page = report_html([report])
    assert page == report_html([report])
    assert "<script" not in page
    links = set(re.findall(r"(?:src|href)=\"(.)", page))
    assert links == {"#", "d"}  # within the page, and data:


def test_a_report_is_compared_with_another(report):
    gathered = tuple(option for option in report.options if option.gather and not option.spread)
    report = replace(report, options=gathered)
    worse = replace(report, goal="speed")
    assert worse.best is worse.even and report.best is not report.even
    same = compare_reports(report, report, "peak:0%, max_batch:0%,speed:0%")
    assert [found.metric for found in same] == list(METRICS)
    assert not any(found.failed for found in same)
    found = {c.metric: c for c in compare_reports(report, worse, "peak:5%")}
    ratio = max(report.even.peak_bytes) / max(report.best.peak_bytes)
    assert found["peak"].failed and found["peak"].worsened == pytest.approx(ratio - 1)
    assert found["max_batch"].worsened > 0 and not found["max_batch"].failed  # not asked
    assert not any(c.failed for c in compare_reports(worse, report, "peak:0%,max_batch:0%"))


@pytest.mark.parametrize(
    "limits", ["peak", "peak:", "other:5%", "peak:-5%", "peak:5%%", "peak 5", "peak:5"]
)
def test_limits_that_cannot_be_read(report, limits):
    with pytest.raises(ArgumentError, match="--fail takes METRIC:NUMBER% of peak"):
        compare_reports(report, report, limits)


def test_different_workloads_are_not_compared(report, unlike):
    with pytest.raises(ArgumentError, match="cannot be compared: the workload is <script>"):
        compare_reports(report, unlike)
    larger = replace(report, batch_size=48)
    with pytest.raises(ArgumentError, match="batch size is 24 in the first and 48 in the second"):
        compare_reports(report, larger)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
def test_any_name_stays_text(report, name):
    renamed = replace(report, workload=name)
    assert "\n\n```python\n# option 1\nmodel = " in report_markdown(renamed)
    assert json.loads(report_json(renamed))["workload"] == name


def test_names_cannot_command_a_terminal(report, tmp_path):
    record = json.loads(report_json(report)) | {"workload": "$x$ \ud800 \x1b[2J" + "n" * 300}
    (tmp_path / "a.json").write_text(json.dumps(record))
    [loaded] = load_reports(tmp_path / "a.json")
    assert loaded.workload.startswith("$x$ \ufffd \ufffd[2Jnnn")
    assert "\x1b" not in report_html([loaded]) + report_markdown(loaded) + report_json(loaded)


def test_what_ran_out_of_memory_has_no_peak(report):
    failed = replace(report.even, out_of_memory="CUDA out of memory", ran_out=0)
    shown = replace(report, options=(failed, *report.options[1:]), goal="speed")
    assert "of nn.DataParallel device 0 runs out of memory." in tables.verdict(shown)
    gathered = tuple(option for option in shown.options if option.kind[:2] == (True, False))
    rows = tables.candidate_table(replace(shown, options=gathered)).rows
    assert [row[2] for row in rows].count("out of memory") == 1


def test_what_a_smaller_value_costs_is_said():
    measured = [
        option((8, 8, 8, 8), (100, 50, 50, 50), seconds=0.5),
        option((2, 10, 10, 10), (60, 60, 60, 60), seconds=0.75),
    ]
    shown = report_of(measured, [90] * 4, mode="real")
    [sentence] = tables.summary(shown)
    assert "its largest chunk is 10 instead of 8, 42.7 samples/s instead of 64.0" in sentence
    assert "about 0.80 of the samples" in sentence
    assert tables.verdict(shown).startswith("With the even split of nn.DataParallel the batch does")
    assert tables.option_table(shown).rows[0][3:5] == ("0.80", "42.7")


def test_a_script_is_told_where_it_wraps_its_model():
    measured = [option((8, 8), (100, 50)), option((6, 10), (70, 60))]
    shown = report_of(measured, [90] * 2, wrapped_at=("train.py:3: model = DataParallel(model)",))
    assert tables.lines(shown).splitlines() == [
        "# train.py:3: model = DataParallel(model)",
        "from balanced_dp import BalancedDataParallel",
        "# option 1",
        "model = BalancedDataParallel(6, model)",
    ]
    apart = [replace(option, gather=False) for option in measured]  # it has a criterion, too
    shown = report_of(apart, [90] * 2, wrapped_at=("train.py:3: model = Balanced(2, model)",))
    assert "Criterion" not in tables.lines(shown) + " ".join(tables.summary(shown))
    by_trainer = report_of(measured, [90] * 2, is_trainer=True)
    assert tables.lines(by_trainer) == "# option 1\ntrainer = BalancedTrainer(gpu0_bsz=6, ...)"
    assert "class Balanced(BalancedTrainer, MyTrainer)" in " ".join(tables.summary(by_trainer))


def test_without_an_option_what_lacks_is_said():
    lacking = report_of([option((8, 8), (100, 50)), option((6, 10), (70, 60))], [65, 65])
    text = report_markdown(lacking)
    assert "A batch of 16 does not fit: with the best, BalancedDataParallel(6, model), dev" in text
    assert "device 0 needs 70 B and lacks 5 B; no other batch was measured" in text
    assert "option 1" not in text and "```python" not in text
    assert 'class="line"' not in report_html([lacking])
