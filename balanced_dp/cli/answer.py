"""What the run of a script tells: the sentences and the lines of code below its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import InfeasiblePlanError
from ..integrations.replacements import WrappedAt
from ..planning.estimates import with_loss_on_each_device, with_spread
from ..planning.split_planner import Plan, Planner, check_fits, utilizations
from ..report import tables
from ..split import even_share, split_batch
from ..tuning.loop_recorder import LoopRecorder
from ..tuning.measurement import Measurement
from ..tuning.report_types import Report
from ..tuning.split_search import SplitSearch
from ..units import format_bytes
from .script import replaced_calls

_FAR = 4
"""Predictions for batches that are larger by this factor are said to be uncertain."""

_MUCH = 0.1
"""The inputs for other devices are mentioned if they are more than this part of the peak."""

_WORTH_IT = 0.9
"""An option is mentioned if the bottleneck device is less full by this factor or more."""


def how_it_ended(recorder: LoopRecorder, exit_code: int) -> Iterator[str]:
    """Yield what the measurements are of, if that is not obvious."""
    search, num_taken, num_asked = recorder.search, recorder.num_iterations, recorder.num_steps
    if num_asked is not None and num_taken >= num_asked:
        steps = "one training step" if num_asked == 1 else f"{num_asked} training steps"
        yield f"The script was ended after {steps} (--steps)."
    elif search.last is not None and not num_taken and exit_code == 0:
        yield "The script took no training step: these are the peaks of the whole run."
    elif search.last is not None and not num_taken:
        yield "These are the peaks of the first training step, which was not finished."
    if recorder.is_splitting and not search.is_over and search.report() is not None:
        yield (
            f"The search for gpu0_bsz was not over after {num_taken} training steps; with more of "
            "them it may find a better value."
        )


def why_no_plan(recorder: LoopRecorder) -> Iterator[str]:
    """Yield why there is no plan."""
    search, measured = recorder.search, recorder.search.last
    is_one_split = len(search.measurements) == 1 and recorder.num_iterations > 3
    if measured is None:
        yield "Nothing was measured: the script ran no forward pass with gradients."
    elif not any(measured.peak_bytes):
        yield "The script put no tensors on the devices."
    elif recorder.is_splitting and search.wanted is None:
        yield "Without --gpu0-bsz even, the run searches for the best value of gpu0_bsz."
    elif recorder.is_splitting and isinstance(search.wanted, int) and is_one_split:
        yield "That is the even split, so there is nothing to compare it with; lower --gpu0-bsz."
    elif recorder.is_splitting:
        yield (
            "A plan takes four training steps or more with the same batches; the script took "
            f"{recorder.num_iterations}."
        )
    elif len(search.devices) == 1:
        yield "There is one device, and nothing to split."
    elif recorder.is_balanced:
        yield (
            "The script's BalancedDataParallel is left as it is: it has device_weights, repeats a "
            "device, or the script sets its gpu0_bsz later."
        )
    elif sum(map(bool, measured.chunk_sizes)) < 2:
        yield (
            "The script splits no batch over the devices; model = torch.nn.DataParallel(model) "
            "does, and this command shows what it saves."
        )
    else:
        yield (
            "The script has a class of its own that splits batches, which runs as it is; with "
            "torch.nn.DataParallel instead, this command searches for the best split."
        )


def what_fits(
    measured: Measurement, report: Report, budgets: Sequence[int] | None
) -> Iterator[str]:
    """Yield what the measured split is like, and what fits with the best one."""
    plan = report.plan
    bottleneck, even = (tables.bottleneck(m, budgets) for m in (measured, report.even))
    yield f"The bottleneck is {bottleneck}; with the even split it is {even}."
    is_even = plan.even_max_batch_size >= plan.max_batch_size
    largest = f"is {plan.max_batch_size}, with gpu0_bsz={plan.max_batch_gpu0_bsz}"
    if is_even:
        largest = f"is {plan.even_max_batch_size}, with the even split"
    if not plan.max_batch_size:
        yield "No batch fits."
    elif budgets is None:
        yield (
            f"With {format_bytes(max(plan.budgets))} on each device, what the even split takes, "
            f"rounded up, the largest batch {largest}; --memory 11GiB says what fits on yours."
        )
    else:
        else_even = "" if is_even else f"; with the even split it is {plan.even_max_batch_size}"
        yield f"The largest batch that fits {largest}{else_even}."
    if plan.max_batch_size > _FAR * plan.batch_size:
        yield (
            f"That is computed from batches of {plan.batch_size}, which is far from it: run the "
            "script with a larger batch to be sure."
        )
    try:
        check_fits(plan, report.chosen.peak_bytes)
    except InfeasiblePlanError as error:
        yield tables.sentence(str(error))
    first, *others = utilizations(report.chosen.peak_bytes, plan.budgets)
    if plan.gpu0_bsz == 0 and first * _WORTH_IT > max(others):
        yield "Device 0 stays the fullest without samples of its own; the table shows of what."


def what_else_helps(recorder: LoopRecorder, report: Report, wraps: bool) -> Iterator[str]:
    """Yield which options would help more, with the lines to write."""
    plan = report.plan
    per_sample = _input_bytes_per_sample(report.chosen)
    input_bytes = round(per_sample * sum(plan.chunk_sizes[1:]))
    if input_bytes > _MUCH * max(report.chosen.peak_bytes):
        yield (
            f"Device 0 holds {format_bytes(input_bytes)} of inputs for the other devices: the "
            "script moves the whole batch there. Inputs that stay on the CPU go to each device."
        )
    if (weighted := plan.weighted) is not None:
        full = max(utilizations(weighted.predicted_bytes, plan.budgets))
        yield (
            f"An estimate: the fullest device is {full:.0%} full, and batches up to "
            f"{weighted.max_batch_size} fit, with weights instead of gpu0_bsz:\n"
            "    model = balanced_dp.BalancedDataParallel(None, model, "
            f"device_weights={list(weighted.chunk_sizes)})"
        )
    gathered_bytes = report.chosen.breakdown[0].get("gathered output", 0) / plan.batch_size
    model = with_loss_on_each_device(report.model, gathered_bytes, per_sample)
    num_devices = len(plan.chunk_sizes)
    best = max(utilizations(report.chosen.peak_bytes, plan.budgets))
    for spread in sorted({recorder.is_spread, True}):
        if spread > recorder.is_spread:
            model = with_spread(model, num_devices)
        planner = Planner(model, plan.budgets)
        gpu0_bsz = planner.best_gpu0_bsz(plan.batch_size)
        full = planner.utilization(plan.batch_size, gpu0_bsz)
        largest = planner.max_batch_size(planner.balanced_gpu0_bsz)
        is_even = gpu0_bsz >= planner.even_share(plan.batch_size)
        how, lines = _option(recorder, None if is_even else gpu0_bsz, spread, wraps)
        if full >= best * _WORTH_IT or largest < max(1, plan.max_batch_size) or not how:
            continue
        best = full
        needs = model.predict(split_batch(plan.batch_size, num_devices, gpu0_bsz))
        index = max(range(num_devices), key=lambda i: needs[i] / plan.budgets[i])
        yield (
            f"An estimate: {format_bytes(needs[index])} on the bottleneck device, {index}, {how} "
            f"(batches of up to {largest} would fit, these with "
            f"gpu0_bsz={planner.balanced_gpu0_bsz(largest)}):\n{lines}"
        )


def _option(
    recorder: LoopRecorder, value: int | None, spread: bool, wraps: bool
) -> tuple[str, str]:
    """Return in words how outputs are not gathered, and the lines to write."""
    how, given, criterion = [], [str(value), "model"], ""
    if not recorder.returns_loss:
        how.append("with the loss on each device")
        given.append("gather=False")
        criterion = (
            "\n    criterion = balanced_dp.BalancedCriterion(criterion)\n"
            "    # only if it treats each sample by itself; move into it what the script does to\n"
            "    # the outputs before it: docs/loss.md"
        )
    elif recorder.returns_rows:
        how.append("if forward returns the loss without other outputs")
    if spread:
        how.append("with parameters on all devices")
        given.append("spread=True")
    lines = f"    model = balanced_dp.BalancedDataParallel({', '.join(given)}){criterion}"
    if not wraps:  # a Trainer wraps the model
        lines = f"    BalancedTrainer(gpu0_bsz={value}{', spread=True' * spread}, ...)"
    return " and ".join(how), lines


def _input_bytes_per_sample(measured: Measurement) -> float:
    """Return what device 0 holds of the inputs of each sample that is on another device."""
    first, *others = measured.chunk_sizes
    held, *own = [uses.get("input", 0) for uses in measured.breakdown]
    per_sample = max((n / size for n, size in zip(own, others, strict=True) if size), default=0)
    return max(0.0, held - per_sample * first) / max(1, sum(others))


def what_to_change(
    search: SplitSearch, calls: Sequence[WrappedAt], plan: Plan, even_fits: bool
) -> str:
    """Return the lines that change the script.

    Args:
        search: what has split the script's batches.
        calls: where the script wraps its models.
        plan: the plan.
        even_fits: whether the even split is known to fit.
    """
    asked = search.wanted if isinstance(search.wanted, int) else None
    even = even_share(plan.batch_size, len(plan.chunk_sizes))
    if asked is not None and asked >= even:
        return (
            f"gpu0_bsz={asked} is the even split of batches of {plan.batch_size}, since device 0 "
            "gets at most an equal part. Without --gpu0-bsz, the run searches for the best value."
        )
    is_too_large = plan.max_batch_size < plan.batch_size
    best = plan.max_batch_gpu0_bsz if is_too_large else plan.gpu0_bsz
    gpu0_bsz = best if asked is None else asked
    if not plan.max_batch_size:
        return "No split helps if no batch fits; see docs/which_one.md for what does."
    if gpu0_bsz >= even:
        return "No value of gpu0_bsz is better here than the even split of nn.DataParallel."
    if calls and all(call.gpu0_bsz == gpu0_bsz for call in calls):
        what = "the best value here" if asked is None else "what you asked for"
        return f"gpu0_bsz={gpu0_bsz}, which the script has, is {what}."
    if calls:
        places = ", ".join(f"{call.filename}:{call.line_number}" for call in calls)
        lines = replaced_calls(calls, gpu0_bsz) or (
            f"model = balanced_dp.BalancedDataParallel({gpu0_bsz}, ...)  # in {places}"
        )
    else:  # a Trainer wraps the model
        lines = (
            "from balanced_dp.integrations.transformers import BalancedTrainer\n"
            f"trainer = BalancedTrainer(gpu0_bsz={gpu0_bsz}, ...)  # instead of Trainer(...)"
        )
    aim = f"To split with gpu0_bsz={gpu0_bsz}"
    if is_too_large:
        aim += f" smaller batches, of {plan.max_batch_size} at most"
    if any(call.gpu0_bsz == "auto" for call in calls):
        aim = (
            f'The script has gpu0_bsz="auto", which finds the value as it trains. To give '
            f"gpu0_bsz={gpu0_bsz} from the start"
        )
    elif even_fits:
        is_even = all(call.gpu0_bsz is None for call in calls)
        fits = "It fits as it is" if is_even else "The even split fits"
        aim = f"{fits}. To leave more memory free at this batch size with gpu0_bsz={gpu0_bsz}"
    return f"{aim}, and change nothing else:\n{lines}"
