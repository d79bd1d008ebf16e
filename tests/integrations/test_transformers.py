"""Test that a Trainer with several devices trains as a Trainer with a single device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode

from balanced_dp import ArgumentError, BalancedDataParallel, BalanceWarning, emulate_devices
from balanced_dp.integrations.transformers import BalancedTrainer, MemoryCallback

from .families import FAMILIES

FOUR = ["cpu"] * 4
ARGUMENTS = {
    "max_steps": 4,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
}
ACCUMULATE = {"gradient_accumulation_steps": 2}
EVALUATE = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    hf.logging.set_verbosity_error()
    # PrinterCallback would print the Trainer's logs.
    monkeypatch.setattr(hf.PrinterCallback, "on_log", lambda *args, **kwargs: None)


def samples(family: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    return [FAMILIES[family].sample(index) for index in range(start, start + count)]


def make_trainer(folder, trainer_class=BalancedTrainer, family="gpt2", batch_size=4, **options):
    """Make a Trainer for a small model, and 21 training samples.

    With four devices and the default batch size, batches have 16 samples, and the last batch of an
    epoch has 5.
    """
    torch.manual_seed(0)
    sizes = {f"per_device_{name}_batch_size": batch_size for name in ("train", "eval")}
    arguments = {**ARGUMENTS, **sizes, **options.pop("arguments", {})}
    if issubclass(trainer_class, BalancedTrainer):
        options = {"gpu0_bsz": 1, "device_ids": FOUR, **options}
    if "model" not in options:
        dtype = options.pop("dtype", torch.double)
        options["model"] = FAMILIES[family].make_model().to(dtype)
    options = {
        "args": TrainingArguments(str(folder), **arguments),
        "train_dataset": samples(family, 21),
        "eval_dataset": samples(family, 19, start=100),
        **options,
    }
    return trainer_class(**options)


def alone(folder: Any, **options: Any) -> Any:
    return make_trainer(folder, Trainer, batch_size=16, **options)


def history(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_training(one: Any, several: Any, tolerance: float = 1e-9) -> None:
    for trainer in (one, several):
        trainer.train()
    assert len(history(one, "loss")) == len(history(one, "grad_norm")) == one.state.max_steps
    for name in ("loss", "grad_norm", "eval_loss"):
        # The logged losses are rounded only by their summation in float32.
        torch.testing.assert_close(history(several, name), history(one, name), rtol=2e-6, atol=2e-6)
    found = {name: value.cpu() for name, value in several.model.state_dict().items()}
    torch.testing.assert_close(found, one.model.state_dict(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_as_on_one_device(family, tmp_path):
    one, several = (make(tmp_path, family=family) for make in (alone, make_trainer))
    assert_same_training(one, several)
    expected, found = (trainer.predict(trainer.eval_dataset) for trainer in (one, several))
    assert several.parallel_model.chunk_sizes == (1, 1, 1, 0)  # 19 = 16 + 3
    pairs = [p if isinstance(p, tuple) else (p,) for p in (found.predictions, expected.predictions)]
    for ours, theirs in zip(*pairs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


def test_spread_parameters_train_as_on_one_device(tmp_path):
    with emulate_devices(4) as devices:
        options = {"gpu0_bsz": None, "device_ids": devices, "spread": True}
        spread = make_trainer(tmp_path, arguments=EVALUATE, **options)
        assert_same_training(alone(tmp_path, arguments=EVALUATE), spread, tolerance=1e-8)
        assert {p.device for p in spread.parallel_model.parameters()} == set(devices)
        del spread


def summed_over_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


OPTIONS = {
    # The number of items is that of the whole batch.
    "averaged": ({"arguments": {"average_tokens_across_devices": True, **ACCUMULATE}}, {}),
    "not averaged": ({"arguments": {"average_tokens_across_devices": False, **ACCUMULATE}}, {}),
    # Losses that are told the number of items may be summed.
    "summed": ({}, {"gpu0_bsz": 0, "scalar_outputs": "sum"}),
    # Losses that the Trainer computes.
    "smoothing": ({"arguments": {"label_smoothing_factor": 0.1, **ACCUMULATE}}, {}),
    "own loss": ({"compute_loss_func": summed_over_items}, {}),
    "checkpointing": ({}, {"arguments": {"gradient_checkpointing": True}}),
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(("options", "ours"), OPTIONS.values(), ids=OPTIONS)
def test_options_train_as_on_one_device(options, ours, tmp_path):
    several = make_trainer(tmp_path, **{**options, **ours})
    assert_same_training(alone(tmp_path, **options), several, tolerance=1e-6)


@pytest.mark.parametrize("steps", [1, 2])
def test_chunks_without_a_label_that_counts(steps, tmp_path):
    """All labels of sample 0, the chunk of device 0, and of the second batch are ignored."""
    first = samples("gpt2", 16)
    assert not first[0]["labels"].ne(-100).any() and first[1]["labels"].ne(-100).any()
    arguments = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": steps}
    options = {"arguments": arguments, "train_dataset": [*first, *([first[0]] * 16)]}
    assert_same_training(alone(tmp_path, **options), make_trainer(tmp_path, **options))


def test_the_balancing_loss_of_experts_warns(tmp_path):
    """It is a product of means over the batch."""
    trainer = make_trainer(tmp_path, family="mixtral", arguments={"max_steps": 1})
    trainer.model.config.output_router_logits = True
    trainer.model.router_aux_loss_coef = 1.0
    with pytest.warns(BalanceWarning, match="All of it but its cross entropies is averaged"):
        trainer.train()


@pytest.fixture
def gathered(monkeypatch) -> list[Any]:
    """A list that gets an entry for each forward pass of a ``BalancedDataParallel``.

    The entry is the set of names of the gathered outputs, or their number if they have no names.
    """
    names: list[Any] = []
    call = BalancedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        names.append(set(output) if isinstance(output, dict) else len(output))
        return output

    monkeypatch.setattr(BalancedDataParallel, "forward", forward)
    return names


class Scorer(nn.Module):
    """A model that takes a target and returns the value of ``loss`` and the logits."""

    def __init__(self, loss: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*layers or [nn.Linear(3, 4)])
        self.loss = loss

    def forward(self, x: Any, target: Any) -> tuple[Any, Any]:
        logits = self.layer(x)
        return self.loss(logits, target), logits


def sample_mean(logits: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(logits, target, reduction="sum") / len(logits)


@pytest.mark.parametrize(
    ("loss", "options"),
    [(nn.CrossEntropyLoss(), {}), (sample_mean, {"loss_weight": lambda x, target: len(x)})],
)
def test_labels_and_losses_of_ones_own(loss, options, gathered, tmp_path):
    labels = [torch.tensor(-100 if i % 3 == 0 else i % 4) for i in range(21)]
    data = [{"x": torch.randn(3), "target": label} for label in labels]
    trainers = []
    for make, given in ((alone, {}), (make_trainer, options)):
        torch.manual_seed(0)
        given = {"model": Scorer(loss), "arguments": {"label_names": ["target"]}, **given}
        trainers.append(make(tmp_path, train_dataset=data, **given))
    assert_same_training(*trainers, tolerance=1e-5)
    assert gathered == [1] * 4  # the loss of a tuple


class LogitLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class BalancedLogitLoss(BalancedTrainer, LogitLoss):
    pass


class LogitLossOnTop(BalancedTrainer):
    compute_loss = LogitLoss.compute_loss


@pytest.mark.parametrize("trainer_class", [BalancedLogitLoss, LogitLossOnTop])
def test_trainers_of_ones_own_see_logits(trainer_class, tmp_path):
    several = make_trainer(tmp_path, trainer_class, arguments=EVALUATE)
    one = make_trainer(tmp_path, LogitLoss, batch_size=16, arguments=EVALUATE)
    assert_same_training(one, several, tolerance=1e-6)  # the model's own loss is in float32


def test_logits_gather_only_if_they_are_needed(gathered, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.evaluate()  # without compute_metrics, only the loss is needed
    trainer.train()
    trainer.evaluate()
    assert gathered == [{"loss"}] * 8
    gathered.clear()
    trainer.predict(trainer.eval_dataset)
    assert gathered == [{"loss", "logits"}] * 2
    trainer.compute_loss(trainer.model, next(iter(trainer.get_eval_dataloader())), True, None)


@pytest.mark.parametrize(
    ("logging", "steps"), [({"logging_strategy": "epoch"}, [2, 4]), ({}, [1, 2, 3, 4])]
)
def test_the_memory_callback_logs_peaks(logging, steps, tmp_path):
    with emulate_devices(4):
        trainer = make_trainer(tmp_path, device_ids=None, arguments=logging)
        trainer.add_callback(MemoryCallback(trainer))
        trainer.train()
        assert trainer.args.device == torch.device("lazy", 0)
        records = [e for e in trainer.state.log_history if "memory/imbalance" in e]
        assert [record["step"] for record in records] == steps
        assert all(value > 0 for value in records[0].values())  # of the first step, too
        assert {f"memory/lazy:{i}/peak_MiB" for i in range(4)} <= records[-1].keys()
        del trainer


def test_replicas_run_in_bfloat16(tmp_path):
    dtypes = []
    options = {"arguments": {"bf16": True}, "dtype": torch.float}
    one, several = (make(tmp_path, **options) for make in (alone, make_trainer))
    layer = several.model.transformer.h[0].mlp
    layer.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    for trainer in (one, several):
        trainer.train()
    torch.testing.assert_close(history(several, "loss"), history(one, "loss"), rtol=1e-2, atol=1e-2)
    assert set(dtypes) == {torch.bfloat16}
    dtypes.clear()
    logits = []
    several.preprocess_logits_for_metrics = lambda given, labels: logits.append(given) or given
    several.predict(several.eval_dataset)
    assert set(dtypes) == {torch.bfloat16}
    assert {given.dtype for given in logits} == {torch.float32}  # as without a wrapper


def test_checkpoints_are_those_of_the_bare_model(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **EVALUATE}
    whole = make_trainer(tmp_path, arguments=arguments)
    whole.train()
    checkpoint = tmp_path / "checkpoint-4"
    model = hf.GPT2LMHeadModel.from_pretrained(checkpoint)
    assert not any(name.startswith("module.") for name in model.state_dict())
    for make in (make_trainer, alone):
        resumed = make(tmp_path / "resumed", arguments=arguments)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        torch.testing.assert_close(history(resumed, "loss"), history(whole, "loss"))
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())


def test_a_resumed_run_starts_with_what_auto_found(tmp_path):
    layers = nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1)  # activations fill the first device
    options = {
        "model": Scorer(nn.MSELoss(), *layers),
        "train_dataset": [{"x": torch.ones(64), "target": torch.ones(1)}] * 300,
        "batch_size": 100,
        "gpu0_bsz": "auto",
        "device_ids": None,
    }
    found = []
    for max_steps, resumes in ((16, False), (17, True)):
        saves = {"save_strategy": "steps", "save_steps": 16, "max_steps": max_steps}
        with emulate_devices(3):
            trainer = make_trainer(tmp_path, arguments=saves, **options)
            trainer.train(resume_from_checkpoint=resumes)
            found.append(trainer.parallel_model.chunk_sizes)
            del trainer
            options["model"].cpu()
    assert found[0][0] < 90 and found[1] == found[0]


def test_one_wrapper_trains_and_evaluates(tmp_path):
    trainer = make_trainer(tmp_path, gpu0_bsz=2)
    assert trainer.parallel_model is None
    assert len(next(iter(trainer.get_train_dataloader()))["labels"]) == 16
    trainer.evaluate(samples("gpt2", 16))
    wrapper = trainer.parallel_model
    assert wrapper.chunk_sizes == (2, 5, 5, 4)
    for _ in range(2):
        trainer.train()
    assert trainer.parallel_model is trainer.model_wrapped is wrapper
    assert wrapper.module is trainer.model
    assert trainer._wrap_model(wrapper) is wrapper


def test_weights_and_broadcast_reach_the_wrapper(tmp_path):
    options = {"device_weights": [1, 1, 2, 4], "broadcast": "position_ids"}
    trainer = make_trainer(tmp_path, gpu0_bsz=None, **options)
    positions, collate = torch.arange(12)[None], trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "position_ids": positions}
    trainer.train()
    assert trainer.parallel_model.chunk_sizes == (1, 1, 1, 2)


def test_the_arguments_of_the_caller_are_unchanged(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = BalancedTrainer(Scorer(nn.MSELoss()), args, gpu0_bsz=1, device_ids=FOUR)
    sizes = [(a.n_gpu, a.train_batch_size, a.eval_batch_size) for a in (trainer.args, args)]
    assert sizes == [(1, 32, 32), (0, 8, 8)]


COMPILED = pytest.param("compiled", marks=pytest.mark.slow)


@pytest.mark.parametrize("reason", ["no device", "one device", "quantized", COMPILED, "launch"])
def test_models_that_are_not_wrapped(reason, tmp_path, monkeypatch):
    device_ids = {"one device": ["cpu"], "quantized": FOUR, "compiled": FOUR}.get(reason)
    if reason == "launch":
        monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    arguments = {"remove_unused_columns": False}
    trainer = make_trainer(tmp_path, batch_size=16, device_ids=device_ids, arguments=arguments)
    trainer.model.is_loaded_in_8bit = reason == "quantized"
    if reason == "compiled":  # its loss would be averaged
        trainer.model = torch.compile(trainer.model, backend="eager")
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.parallel_model is None


def test_devices_that_are_refused(tmp_path, monkeypatch, no_accelerator):
    with pytest.raises(ArgumentError, match="device 0 does not exist"):
        make_trainer(tmp_path, device_ids=[0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(hf.GPT2LMHeadModel, "hf_device_map", {"a": 0, "b": 1}, raising=False)
        with pytest.raises(ArgumentError, match="with a device_map"):
            make_trainer(tmp_path)
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(ArgumentError, match="omit device_ids in a distributed launch"):
        make_trainer(tmp_path)
