"""A Trainer with several devices trains as one with one device does."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers import Trainer, TrainingArguments

from balanced_dp import ArgumentError, BalancedDataParallel, emulate_devices
from balanced_dp.integrations.transformers import (
    BalancedTrainer,
    BalancedTrainerMixin,
    MemoryCallback,
)

from .families import FAMILIES

FOUR = ["cpu"] * 4


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    hf.logging.set_verbosity_error()
    # Trainer prints its logs; a process that does not print needs no such callback.
    monkeypatch.setattr(hf.PrinterCallback, "on_log", lambda *args, **kwargs: None)


def samples(family: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    return [FAMILIES[family].sample(index) for index in range(start, start + count)]


def make_trainer(
    folder: Any,
    trainer_class: type[Trainer] = BalancedTrainer,
    *,
    family: str = "gpt2",
    batch_size: int = 4,
    num_samples: int = 21,
    dtype: torch.dtype = torch.double,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """One for batches of 16, of which the last of an epoch has 5."""
    torch.manual_seed(0)
    model = FAMILIES[family].make_model().to(dtype)
    args = TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": batch_size,
            "per_device_eval_batch_size": batch_size,
            "max_steps": 4,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            **(arguments or {}),
        },
    )
    if trainer_class is not Trainer:
        options = {"gpu0_bsz": 1, "device_ids": FOUR, **options}
    return trainer_class(
        model=model,
        args=args,
        train_dataset=samples(family, num_samples),
        eval_dataset=samples(family, 19, start=100),
        **options,
    )


def alone(folder: Any, **options: Any) -> Any:
    return make_trainer(folder, Trainer, batch_size=16, **options)


def history(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_training(one: Any, several: Any, tolerance: float = 1e-9) -> None:
    for trainer in (one, several):
        trainer.train()
    for name in ("loss", "grad_norm"):
        expected = history(one, name)
        assert len(expected) == one.state.max_steps
        # The logged ones are rounded by nothing but their sum in float32.
        torch.testing.assert_close(history(several, name), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        several.model.state_dict(), one.model.state_dict(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_and_predict_as_on_one_device(family, tmp_path):
    one, several = alone(tmp_path, family=family), make_trainer(tmp_path, family=family)
    assert_same_training(one, several)
    assert type(several.parallel_model) is not nn.DataParallel
    expected, found = (trainer.predict(trainer.eval_dataset) for trainer in (one, several))
    assert several.parallel_model.chunk_sizes == (1, 1, 1, 0)  # 19 = 16 + 3
    for ours, theirs in zip(leaves(found.predictions), leaves(expected.predictions), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    for name in ("test_loss",):
        assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-6)


def leaves(predictions: Any) -> list[Any]:
    return list(predictions) if isinstance(predictions, tuple) else [predictions]


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("gpu0_bsz", [0, 1, 4])
def test_fifty_steps_over_real_text(gpu0_bsz, accumulation, tmp_path):
    """In float32, evaluated on the way: 70 samples are four batches of 16 and one of 6."""
    arguments = {
        "max_steps": 50,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": accumulation,
        "eval_strategy": "steps",
        "eval_steps": 25,
    }
    options = {"arguments": arguments, "num_samples": 70, "dtype": torch.float}
    one = alone(tmp_path, **options)
    several = make_trainer(tmp_path, gpu0_bsz=gpu0_bsz, **options)
    for name, count in (("loss", 50), ("eval_loss", 2)):
        curves = []
        for trainer in (one, several):
            if not trainer.state.log_history:
                trainer.train()
            curves.append(history(trainer, name))
        assert len(curves[0]) == count
        torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)
    assert history(one, "loss")[-1] < history(one, "loss")[0]


@pytest.mark.parametrize("is_averaged", [True, False])
def test_the_number_of_items_is_that_of_the_whole_batch(is_averaged, tmp_path):
    arguments = {"average_tokens_across_devices": is_averaged, "gradient_accumulation_steps": 2}
    assert_same_training(
        alone(tmp_path, arguments=arguments), make_trainer(tmp_path, arguments=arguments)
    )


def test_a_chunk_of_which_no_label_counts(tmp_path):
    """Device 0 gets sample 0, of which no label counts; the second batch has none at all."""
    first = samples("gpt2", 16)
    trainers = []
    for make in (alone, make_trainer):
        arguments = {"max_steps": 4, "train_sampling_strategy": "sequential"}
        trainer = make(tmp_path, arguments=arguments)
        trainer.train_dataset = [*first, *([first[0]] * 16), *first]
        trainers.append(trainer)
    counted = [sample["labels"].ne(-100).any() for sample in first]
    assert not counted[0]
    assert any(counted)
    one, several = trainers
    for trainer in trainers:
        trainer.train()
    torch.testing.assert_close(history(several, "loss"), history(one, "loss"))
    torch.testing.assert_close(several.model.state_dict(), one.model.state_dict())


def test_a_batch_without_labels_that_count_in_an_accumulated_step(tmp_path):
    first = samples("gpt2", 16)
    trainers = []
    for make in (alone, make_trainer):
        arguments = {
            "max_steps": 4,
            "train_sampling_strategy": "sequential",
            "gradient_accumulation_steps": 2,
        }
        trainer = make(tmp_path, arguments=arguments)
        trainer.train_dataset = [*first, *([first[0]] * 16)]
        trainers.append(trainer)
    assert_same_training(*trainers)


# Losses that the Trainer computes itself.


def test_label_smoothing(tmp_path):
    arguments = {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}
    assert_same_training(
        alone(tmp_path, arguments=arguments), make_trainer(tmp_path, arguments=arguments)
    )


def test_a_loss_function_of_ones_own(tmp_path):
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return losses / num_items_in_batch

    assert_same_training(
        alone(tmp_path, compute_loss_func=loss), make_trainer(tmp_path, compute_loss_func=loss)
    )


class LogitLoss(Trainer):
    """Somebody's Trainer, which uses the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class BalancedLogitLoss(BalancedTrainerMixin, LogitLoss):
    pass


class LogitLossOnTop(BalancedTrainer):
    compute_loss = LogitLoss.compute_loss


@pytest.mark.parametrize("trainer_class", [BalancedLogitLoss, LogitLossOnTop])
def test_a_trainer_of_ones_own_has_the_logits(trainer_class, tmp_path):
    one = make_trainer(tmp_path, BalancedLogitLoss, batch_size=16, device_ids=None)
    assert_same_training(one, make_trainer(tmp_path, trainer_class))
    assert one.parallel_model is None


# What is gathered.


@pytest.fixture
def gathered(monkeypatch) -> list[set[str]]:
    """The names of what a step of training or evaluation brought to the output device."""
    names: list[set[str]] = []
    call = BalancedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        names.append(set(output))
        return output

    monkeypatch.setattr(BalancedDataParallel, "forward", forward)
    return names


def test_logits_gather_only_where_they_are_needed(gathered, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert gathered == [{"loss"}] * 4
    gathered.clear()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    assert gathered == [{"loss", "logits"}] * 4
    gathered.clear()
    trainer.args.prediction_loss_only = True
    trainer.evaluate()
    assert gathered == [{"loss"}] * 2


def test_the_logits_of_training_stay_on_their_devices(tmp_path):
    """On emulated devices: device 0 has the weights, gradients and state of the others' model."""
    with emulate_devices(4, symbolic=False):
        trainer = make_trainer(tmp_path, device_ids=None, dtype=torch.float)
        trainer.add_callback(MemoryCallback(trainer))
        trainer.train()
        assert trainer.parallel_model.chunk_sizes == (1, 2, 1, 1)
        [*_, record] = [e for e in trainer.state.log_history if "memory/imbalance" in e]
        peaks = [record[f"memory/lazy:{i}/peak_MiB"] for i in range(4)]
        assert record["memory/imbalance"] == pytest.approx((max(peaks) - min(peaks)) / max(peaks))
        assert record["step"] == 4
        assert len(history(trainer, "memory/imbalance")) == 4
        one = alone(tmp_path, dtype=torch.float)
        one.args._n_gpu = 1
        del trainer
