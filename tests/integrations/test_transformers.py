"""A Trainer with several devices is equivalent to one with a single device."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.training_args import ParallelMode

from balanced_dp import (
    ArgumentError,
    BalancedDataParallel,
    BalanceWarning,
    emulate_devices,
)
from balanced_dp.integrations.transformers import (
    BalancedTrainer,
    MemoryCallback,
)

from .families import FAMILIES

FOUR = ["cpu"] * 4
ACCUMULATION = {"gradient_accumulation_steps": 2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    hf.logging.set_verbosity_error()
    # PrinterCallback would print the Trainer's logs.
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
    model: nn.Module | None = None,
    data: list[dict[str, Any]] | None = None,
    **options: Any,
) -> Any:
    """Make a Trainer with batches of 16; the last one of an epoch has 5."""
    torch.manual_seed(0)
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
        model=FAMILIES[family].make_model().to(dtype) if model is None else model,
        args=args,
        train_dataset=samples(family, num_samples) if data is None else data,
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
    assert len(history(one, "loss")) == len(history(one, "grad_norm")) == one.state.max_steps
    for name in ("loss", "grad_norm", "eval_loss"):
        # The logged losses are rounded only by their summation in float32.
        torch.testing.assert_close(history(several, name), history(one, name), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        several.model.state_dict(), one.model.state_dict(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_as_on_one_device(family, tmp_path):
    one, several = alone(tmp_path, family=family), make_trainer(tmp_path, family=family)
    assert_same_training(one, several)
    assert type(several.parallel_model) is not nn.DataParallel
    expected, found = (trainer.predict(trainer.eval_dataset) for trainer in (one, several))
    assert several.parallel_model.chunk_sizes == (1, 1, 1, 0)  # 19 = 16 + 3
    for ours, theirs in zip(leaves(found.predictions), leaves(expected.predictions), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    loss = expected.metrics["test_loss"]
    assert found.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)


def leaves(predictions: Any) -> list[Any]:
    return list(predictions) if isinstance(predictions, tuple) else [predictions]


def test_twenty_steps_with_spread_parameters(tmp_path):
    arguments = {
        "max_steps": 20,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 10,
    }
    options = {"arguments": arguments, "num_samples": 70}
    one = alone(tmp_path, **options)
    one.train()
    expected = one.model.state_dict()
    with emulate_devices(4) as devices:
        spread = make_trainer(tmp_path, gpu0_bsz=None, device_ids=devices, spread=True, **options)
        spread.train()
        assert set(spread.parallel_model.homes().values()) == set(devices)
        for name in ("loss", "eval_loss", "grad_norm"):
            torch.testing.assert_close(
                history(spread, name), history(one, name), rtol=1e-6, atol=1e-6
            )
        found = {name: value.cpu() for name, value in spread.model.state_dict().items()}
        del spread
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def summed_over_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A loss function of one's own."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("options", "ours", "tolerance"),
    [
        # The number of items is that of the whole batch.
        ({"arguments": {"average_tokens_across_devices": True, **ACCUMULATION}}, {}, 1e-9),
        ({"arguments": {"average_tokens_across_devices": False, **ACCUMULATION}}, {}, 1e-9),
        # Losses that are told the number of items may be summed.
        ({}, {"gpu0_bsz": 0, "scalar_outputs": "sum"}, 1e-6),
        # Losses that the Trainer computes.
        ({"arguments": {"label_smoothing_factor": 0.1, **ACCUMULATION}}, {}, 1e-9),
        ({"compute_loss_func": summed_over_items}, {}, 1e-9),
        ({}, {"arguments": {"gradient_checkpointing": True}}, 1e-9),
        ({"arguments": {"eval_strategy": "steps", "eval_steps": 2, **ACCUMULATION}}, {}, 1e-9),
    ],
    ids=["averaged", "not averaged", "summed", "smoothing", "own loss", "checkpointing", "eval"],
)
def test_options_train_as_on_one_device(options, ours, tolerance, tmp_path):
    several = make_trainer(tmp_path, **{**options, **ours})
    assert_same_training(alone(tmp_path, **options), several, tolerance)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_chunks_without_a_label_that_counts(accumulation, tmp_path):
    """All labels of sample 0, the chunk of device 0, and of the second batch are ignored."""
    first = samples("gpt2", 16)
    counted = [sample["labels"].ne(-100).any() for sample in first]
    assert not counted[0]
    assert any(counted)
    arguments = {
        "train_sampling_strategy": "sequential",
        "gradient_accumulation_steps": accumulation,
    }
    trainers = [make(tmp_path, arguments=arguments) for make in (alone, make_trainer)]
    for trainer in trainers:
        trainer.train_dataset = [*first, *([first[0]] * 16)]
    assert_same_training(*trainers)


def test_the_balance_of_experts_warns(tmp_path):
    """The balancing loss is a product of means over the batch."""
    trainer = make_trainer(tmp_path, family="mixtral", arguments={"max_steps": 1})
    trainer.model.config.output_router_logits = True
    trainer.model.router_aux_loss_coef = 1.0
    with pytest.warns(BalanceWarning, match="it uses Mul, other than with a number"):
        trainer.train()


@pytest.fixture
def gathered(monkeypatch) -> list[Any]:
    """Return the names, or the number, of the outputs that a step gathers."""
    names: list[Any] = []
    call = BalancedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = call(self, *args, **kwargs)
        names.append(set(output) if isinstance(output, dict) else len(output))
        return output

    monkeypatch.setattr(BalancedDataParallel, "forward", forward)
    return names


class Scorer(nn.Module):
    """A custom model with unusual labels and an unusual loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.loss = loss

    def forward(self, x: Any, target: Any) -> tuple[Any, Any]:
        logits = self.layer(x)
        return self.loss(logits, target), logits


def sample_mean(logits: Any, target: Any) -> Any:
    losses = nn.functional.cross_entropy(logits, target, reduction="none")
    return losses.sum() / len(logits)


def squared(logits: Any, target: Any) -> Any:
    return (logits - target[:, None]).square().mean()


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (nn.CrossEntropyLoss(), {}),
        (sample_mean, {"loss_weight": lambda x, target: len(x)}),
        (nn.CrossEntropyLoss(reduction="sum"), {"scalar_outputs": "sum"}),
        (squared, {}),  # float labels all count, -100 as well
    ],
)
def test_own_labels_and_losses(loss, options, gathered, tmp_path):
    torch.manual_seed(0)
    data = [
        {"x": torch.randn(3), "target": torch.tensor(-100 if i % 3 == 0 else i % 4)}
        for i in range(21)
    ]
    if loss is squared:
        data = [{**row, "target": row["target"].float() / 50} for row in data]
    given = {"model": Scorer(loss), "data": data, "arguments": {"label_names": ["target"]}}
    one = alone(tmp_path, **copy.deepcopy(given))
    several = make_trainer(tmp_path, **given, **options)
    assert_same_training(one, several, tolerance=1e-5)
    assert gathered == [1] * 4  # the loss of a tuple


def test_the_arguments_of_the_caller_are_unchanged(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = BalancedTrainer(Scorer(nn.MSELoss()), args, gpu0_bsz=1, device_ids=FOUR)
    sizes = [(a.n_gpu, a.train_batch_size, a.eval_batch_size) for a in (trainer.args, args)]
    assert sizes == [(1, 32, 32), (0, 8, 8)]


def test_processes_of_a_launch_are_not_wrapped(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    trainer = make_trainer(tmp_path, device_ids=None)
    trainer.evaluate()
    assert trainer.parallel_model is None
    with pytest.raises(ArgumentError, match="leave device_ids out in a distributed launch"):
        make_trainer(tmp_path)


class LogitLoss(Trainer):
    """A custom Trainer that uses the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class BalancedLogitLoss(BalancedTrainer, LogitLoss):
    pass


class LogitLossOnTop(BalancedTrainer):
    compute_loss = LogitLoss.compute_loss


@pytest.mark.parametrize("trainer_class", [BalancedLogitLoss, LogitLossOnTop])
def test_own_trainers_see_logits(trainer_class, tmp_path):
    one = make_trainer(tmp_path, BalancedLogitLoss, batch_size=16, device_ids=None)
    # The model's own loss is in float32.
    several = make_trainer(tmp_path, trainer_class)
    assert_same_training(one, several, tolerance=1e-6)
    for trainer in (one, several):
        trainer.evaluate()
    torch.testing.assert_close(history(several, "eval_loss"), history(one, "eval_loss"))
    assert one.parallel_model is None


# Gathered outputs.


def test_logits_gather_only_where_they_are_needed(gathered, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert gathered == [{"loss"}] * 4
    gathered.clear()
    trainer.evaluate()  # without compute_metrics, the loss is all
    assert gathered == [{"loss"}] * 2
    gathered.clear()
    trainer.predict(trainer.eval_dataset)
    assert gathered == [{"loss", "logits"}] * 2


@pytest.mark.parametrize(
    ("logging", "steps"),
    [
        ({}, [1, 2, 3, 4]),
        ({"logging_steps": 2}, [2, 4]),
        ({"logging_strategy": "epoch"}, [2, 4]),
    ],
)
def test_the_memory_callback(logging, steps, tmp_path):
    options = {"arguments": logging, "dtype": torch.float, "num_samples": 21}
    with emulate_devices(4):
        trainer = make_trainer(tmp_path, device_ids=None, **options)
        trainer.add_callback(MemoryCallback(trainer))
        trainer.train()
        assert trainer.parallel_model.chunk_sizes == (1, 2, 1, 1)
        assert trainer.args.device == torch.device("lazy", 0)
        records = [e for e in trainer.state.log_history if "memory/imbalance" in e]
        assert [record["step"] for record in records] == steps
        assert all(value > 0 for value in records[0].values())  # of the first step, too
        peaks = [records[-1][f"memory/lazy:{i}/peak_MiB"] for i in range(4)]
        spread = (max(peaks) - min(peaks)) / max(peaks)
        assert records[-1]["memory/imbalance"] == pytest.approx(spread)
        several = history(trainer, "loss")
        del trainer
    one = alone(tmp_path, **options)
    one.train()
    torch.testing.assert_close(several, history(one, "loss"), rtol=1e-5, atol=1e-5)


# Precision.


def test_replicas_run_in_bfloat16(tmp_path):
    seen = []
    arguments = {"bf16": True}
    options = {"arguments": arguments, "dtype": torch.float}
    several = make_trainer(tmp_path, **options)
    layer = several.model.transformer.h[0].mlp
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    one = alone(tmp_path, **options)
    for trainer in (one, several):
        trainer.train()
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(history(several, "loss"), history(one, "loss"), rtol=1e-2, atol=1e-2)
    seen.clear()
    logits = []
    several.preprocess_logits_for_metrics = lambda given, labels: logits.append(given) or given
    predictions = several.predict(several.eval_dataset).predictions
    assert {given.dtype for given in logits} == {torch.float32}  # as without a wrapper
    assert set(seen) == {torch.bfloat16}
    assert predictions.dtype == np.float32


# Checkpoints.


CHECKPOINTS = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": 6,
}


def test_checkpoints_are_of_the_bare_model(tmp_path):
    whole = make_trainer(tmp_path / "whole", arguments=CHECKPOINTS)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    assert (checkpoint / "model.safetensors").exists()
    model = hf.GPT2LMHeadModel.from_pretrained(checkpoint)
    assert not any(name.startswith("module.") for name in model.state_dict())
    resumed = make_trainer(tmp_path / "resumed", arguments=CHECKPOINTS)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(history(resumed, "loss"), history(whole, "loss"), rtol=0, atol=1e-9)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict())
    # Resume on one device, too.
    one = alone(tmp_path / "one", arguments=CHECKPOINTS)
    one.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(history(one, "loss"), history(whole, "loss"), rtol=1e-6, atol=1e-6)


# Models that are wrapped.


def test_one_wrapper_serves_training_and_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, arguments={"eval_strategy": "epoch"})
    assert trainer.parallel_model is None
    trainer.evaluate()
    wrapper = trainer.parallel_model
    assert isinstance(wrapper, BalancedDataParallel)
    trainer.train()
    trainer.train()
    trainer.evaluate()
    assert trainer.parallel_model is wrapper
    assert wrapper.module is trainer.model
    assert trainer.model_wrapped is wrapper
    assert not isinstance(trainer.model, nn.DataParallel)


class Wide(nn.Module):
    """A model whose activations fill the first device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1))

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(self.layers(x)[:, 0], labels)}


def test_a_resumed_run_starts_with_what_auto_found(tmp_path):
    data = [{"x": torch.ones(64), "labels": torch.ones(())}] * 300
    found = []
    for max_steps, resumes in ((12, False), (13, True)):
        with emulate_devices(3):
            trainer = make_trainer(
                tmp_path,
                batch_size=100,
                arguments={"save_strategy": "steps", "save_steps": 12, "max_steps": max_steps},
                model=Wide(),
                data=data,
                gpu0_bsz="auto",
                device_ids=None,
            )
            trainer.train(resume_from_checkpoint=resumes)
            found.append(trainer.parallel_model.chunk_sizes)
            del trainer
    assert found[0][0] < 90 and found[1] == found[0]


def test_the_batch_size_is_that_of_all_devices(tmp_path):
    trainer = make_trainer(tmp_path, gpu0_bsz=2)
    trainer.train()
    assert len(next(iter(trainer.get_train_dataloader()))["labels"]) == 16
    trainer.evaluate(samples("gpt2", 16))
    assert trainer.parallel_model.chunk_sizes == (2, 5, 5, 4)


@pytest.mark.parametrize("device_ids", [None, ["cpu"]])
def test_one_device_is_not_wrapped(device_ids, tmp_path):
    trainer = make_trainer(tmp_path, batch_size=16, device_ids=device_ids)
    assert_same_training(alone(tmp_path), trainer)
    assert trainer.parallel_model is None
    assert trainer.evaluate()["eval_loss"] > 0


def test_models_that_are_not_wrapped(tmp_path):
    trainer = make_trainer(tmp_path)
    wrapped = BalancedDataParallel(2, trainer.model, FOUR)
    assert trainer._wrap_model(wrapped) is wrapped
    trainer.model.is_loaded_in_8bit = True
    trainer.evaluate()
    assert trainer.parallel_model is None


def test_arguments_that_are_refused(tmp_path, no_accelerator):
    with pytest.raises(ArgumentError, match="device 0 does not exist"):
        make_trainer(tmp_path, device_ids=[0, 1])
    with pytest.raises(ArgumentError, match="gpu0_bsz must be at least 0, got -1"):
        make_trainer(tmp_path, gpu0_bsz=-1).train()


def test_the_model_stays_where_it_is(tmp_path, monkeypatch):
    """With exactly one GPU, the Trainer's nn.DataParallel would move the model there."""
    monkeypatch.setattr(torch.nn.DataParallel, "__init__", lambda *_: pytest.fail("made one"))
    make_trainer(tmp_path).train()


def test_a_device_map_excludes_device_ids(tmp_path, monkeypatch):
    monkeypatch.setattr(hf.GPT2LMHeadModel, "hf_device_map", {"a": 0, "b": 1}, raising=False)
    with pytest.raises(ArgumentError, match="with a model that is spread over"):
        make_trainer(tmp_path)


def test_weights_and_broadcast_reach_the_wrapper(tmp_path):
    trainer = make_trainer(
        tmp_path, gpu0_bsz=None, device_weights=[1, 1, 2, 4], broadcast="position_ids"
    )
    positions = torch.arange(12)[None]
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: {**collate(rows), "position_ids": positions}
    trainer.train()
    assert trainer.parallel_model.chunk_sizes == (1, 1, 1, 2)
