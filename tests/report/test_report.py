"""Test reports as files and as text, and the comparison of two reports."""

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
    load_report,
    report_html,
    report_json,
    report_markdown,
    save_report,
    tables,
)
from balanced_dp.report.compare import METRICS

from ..tuning.measured import option
from ..tuning.measured import report as report_of


def test_a_file_gives_back_the_report(report, unlike, tmp_path):
    """Links are followed, an older file is replaced, and a pipe is written to."""
    (tmp_path / "link.json").symlink_to("real.json")
    for saved in (report, unlike):
        save_report(saved, tmp_path / "link.json")
        assert load_report(tmp_path / "real.json") == saved
    assert (tmp_path / "link.json").is_symlink() and len([*tmp_path.iterdir()]) == 2
    os.mkfifo(tmp_path / "pipe")
    read = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    save_report(report, tmp_path / "pipe")
    assert json.loads(read.communicate()[0])["schema"] == 5
    with pytest.raises(ArgumentError, match="cannot be written: No such file"):
        save_report(report, tmp_path / "none" / "report.json")


ALL = r"(?s)\A.*"


@pytest.mark.parametrize(
    ("pattern", "by", "message"),
    [
        (ALL, "", "is not a report, or is truncated: "),
        (r"(?s).{99}\Z", "", "is not a report, or is truncated: "),
        (ALL, "[" * 100_000, "is not a report"),
        (ALL, '{"a": 1}', "is JSON, but not a report of balanced-dp"),
        (ALL, "[]", "is JSON, but not a report"),
        ('"schema": 5', '"schema": 2', "has version 2 of the report format"),
        ('"peak_bytes"', '"other"', r"is not a report: options\.0\.peak_bytes: Field required"),
        (r'"gpu0_bsz": \d+', '"gpu0_bsz": "few"', r"options\.\d\.gpu0_bsz: Input should be a"),
        ('"batch_size": 24', '"batch_size": 23', "no option has batch_size 23"),
    ],
)
def test_other_files_are_refused(report, tmp_path, pattern, by, message):
    text = re.sub(pattern, by, report_json(report), count=1)
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ReportError, match=message):
        load_report(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text() == text


def test_markdown_has_the_answer(report, unlike):
    text = report_markdown(report)
    assert f"BalancedDataParallel\n# option 1\nmodel = {report.best.line}" in text
    assert text.startswith("# \\<script\\>alert(1)\\</script\\>, ") and "<script>" not in text
    assert text.count("\n| **") == 3  # the best, the peak, the best
    assert f"device_weights=[{unlike.best.chunk_sizes[0]}, " in report_markdown(unlike)


def test_reports_are_compared(report):
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


LIMITS = ("peak", "peak:", "other:5%", "peak:-5%", "peak:5%%", "peak 5", "peak:5")


@pytest.mark.parametrize(
    ("change", "limits", "message"),
    [
        *(({}, limits, "--fail takes limits on peak, ") for limits in LIMITS),
        ({"workload": "b"}, "", "cannot be compared: workload was <script>.* and is b;"),
        ({"batch_size": 48}, "", "batch_size was 24 and is 48"),
        ({"capacity_bytes": (1, 1)}, "", "num_devices was 4 and is 2"),
        ({"is_trainer": True}, "max_batch:5%", " on peak, speed, such as peak:5%, got 'max_batch"),
    ],
)
def test_comparisons_that_are_refused(report, change, limits, message):
    with pytest.raises(ArgumentError, match=message):
        compare_reports(report, replace(report, **change), limits)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
def test_any_name_stays_text(name):
    renamed = report_of([EVEN, SMALLER], [90] * 2, workload=name)
    assert "DataParallel\n# option 1\nmodel = " in report_markdown(renamed)
    assert json.loads(report_json(renamed))["workload"] == name


def test_names_cannot_command_a_terminal(report, tmp_path):
    record = json.loads(report_json(report)) | {"workload": "$x$ \ud800 \x1b[2J" + "n" * 300}
    (tmp_path / "a.json").write_text(json.dumps(record))
    loaded = load_report(tmp_path / "a.json")
    for text in report_html(loaded), report_markdown(loaded).replace("\\", ""), report_json(loaded):
        assert "$x$ \ufffd \ufffd[2Jnnn" in text and "\x1b" not in text


def test_out_of_memory_has_no_peak(report):
    failed = replace(report.even, out_of_memory="CUDA out of memory", ran_out=0)
    shown = replace(report, options=(failed, *report.options[1:]), goal="speed")
    assert "of nn.DataParallel, device 0 runs out of memory." in tables.verdict(shown)
    gathered = tuple(option for option in shown.options if option.kind == (True, False))
    rows = tables.candidate_table(replace(shown, options=gathered)).rows
    assert [row[2] for row in rows].count("out of memory") == 1


USES = ({"activation": 40}, {"activation": 40})
EVEN = option((8, 8), (100, 50), seconds=0.25, uses=USES)
SMALLER = option((6, 10), (70, 60), seconds=0.375, uses=USES)


def test_speed_and_samples_on_accelerators():
    shown = report_of([EVEN, SMALLER], [90] * 2, mode="real")
    assert tables.verdict(shown).startswith("With the even split of nn.DataParallel, the batch d")
    table = tables.option_table(shown)
    assert table.rows[0][3:5] == ["0.80", "42.7"] and "costs speed" in table.caption


@pytest.mark.parametrize(
    ("wrapped", "line"),
    [
        # It was told to write model = ..., which would have been another model.
        ("net.body = nn.DataParallel(net.head)", "net.body = BalancedDataParallel(6, net.head)"),
        ("net = Own(DataParallel(make()))", "net = Own(BalancedDataParallel(6, make()))"),
        # The line lost dim, so batches were split along another dimension.
        ("m = nn.DataParallel(m, dim=1); f(m)", "m = BalancedDataParallel(6, m, dim=1)\nf(m)"),
        # The line lost dim, as the regular expression for gpu0_bsz knew no operators.
        ("m = BalancedDataParallel(b // len(c), m, 1)", "m = BalancedDataParallel(6, m, 1)"),
        ("m = Balanced(module=m, gpu0_bsz=int(f(2)))", "m = Balanced(module=m, gpu0_bsz=6)"),
        ("m = BalancedDataParallel(*values)", "model = BalancedDataParallel(6, model)"),
    ],
)
def test_a_script_is_told_the_line(wrapped, line):
    place = f"train.py:3: {wrapped}"
    shown = report_of([EVEN, SMALLER], [90] * 2, wrapped_at=(place,))
    imports = ["from balanced_dp import BalancedDataParallel"] * ("BalancedD" not in wrapped)
    assert tables.lines(shown) == "\n".join([f"# {place}", "# option 1", *imports, line])


def test_a_script_has_a_criterion_or_trainer():
    place = "train.py:3: model = DataParallel(model)"
    apart = [replace(option, gather=False) for option in (EVEN, SMALLER)]  # it has a criterion, too
    shown = report_of(apart, [90] * 2, wrapped_at=(place,))
    assert "Criterion" not in tables.lines(shown) + " ".join(tables.summary(shown))
    more = option((8, 8), (90, 50), uses=({"activation": 5}, {"activation": 3}))  # of its loss
    outputs, apart = replace(more, uses=({"gathered output": 9}, {})), replace(more, gather=False)
    alike = replace(more, uses=({"activation": 3}, {"activation": 3}))
    for one, why in (more, "(if"), (outputs, "s fill 10%"), (apart, ""), (alike, ""):
        *found, _ = report_of([one], [99] * 2, wrapped_at=(place,)).not_tried
        assert len(found) == bool(why) and why in "".join(found)
    assert len(report_of([more], [99] * 2, is_trainer=True).not_tried) == 1
    by_trainer = report_of([EVEN, SMALLER], [100] * 2, is_trainer=True)
    first, last = tables.lines(by_trainer).split("# option 2\n")
    assert first == "# option 1\ntrainer = Trainer(...)  # unchanged\n"
    assert last.endswith("import BalancedTrainer\ntrainer = BalancedTrainer(gpu0_bsz=6, ...)")
    assert "class Balanced(BalancedTrainer, MyTrainer)" in " ".join(tables.summary(by_trainer))


def test_the_even_split_of_the_same_batch():
    """The row of the even split was that of another batch, or did not say gather=False."""
    apart = [replace(EVEN, gather=False), replace(SMALLER, gather=False, peak_bytes=(50, 50))]
    shown = tables.device_table(report_of([EVEN, *apart], [60] * 2))
    assert "gather=False" in shown.title and shown.rows[-1][0] == "peak, even split, gather=False"
    larger = option((7, 13), (80, 85))
    shown = tables.device_table(report_of([EVEN, SMALLER, larger], [90] * 2, goal="batch"))
    assert shown.rows[0][1:] == ("7", "13") and shown.rows[-1][0] == "full"


def test_without_an_option_it_says_what_lacks():
    lacking = report_of([EVEN, SMALLER], [65, 65])
    text = report_markdown(lacking)
    assert "A batch of 16 does not fit: with BalancedDataParallel(6, model), device" in text
    assert "device 0 needs 70 B and lacks 5 B; no other batch was measured" in text
    assert "option 1" not in text and "```python" not in text and "--reserve" not in text
    kept = replace(lacking, reserve_bytes=2, wrapped_at=("train.py:3: model",)).what_lacks()
    assert re.search(r"lacks 7 B, as 2 B of .* \(--reserve\); no other .* the changes below$", kept)
    assert 'class="line"' not in report_html(lacking)
