"""Small models of several families of the package transformers, with their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from balanced_dp.tuning.workload import encoded_text

SIZES = {
    16: "hidden_size d_model image_size",
    2: """num_hidden_layers num_attention_heads num_layers num_heads encoder_layers decoder_layers
        encoder_attention_heads decoder_attention_heads num_experts_per_tok eos_token_id""",
    32: """intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim n_positions max_target_positions
        max_position_embeddings""",
    8: "d_kv patch_size num_mel_bins",
    10: "max_source_positions",
    4: "num_local_experts",
    1: "num_key_value_heads bos_token_id decoder_start_token_id",
    3: "num_labels",
    0: """hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop dropout
        dropout_rate pad_token_id""",
    None: "suppress_tokens begin_suppress_tokens",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
"""Sizes for the configurations of all families. A family ignores names that it does not have."""


@dataclass(frozen=True)
class Family:
    """A function that makes a model, and a function that makes the sample with a given index."""

    make_model: Callable[[], nn.Module]
    sample: Callable[[int], dict[str, Any]]


def text(index: int, length: int = 12) -> Tensor:
    """Return an excerpt of real text as indices of characters; ``index`` chooses the excerpt."""
    encoded, _ = encoded_text()
    return encoded[index * 37 : index * 37 + length]


def with_ignored_labels(labels: Tensor, index: int) -> Tensor:
    """Return a copy of the labels of a sample in which a few or, for some samples, all are -100."""
    labels = labels.clone()
    labels[: index % 5] = -100
    return labels * 0 - 100 if index % 6 == 0 else labels


def causal(index: int) -> dict[str, Any]:
    return {"input_ids": text(index), "labels": with_ignored_labels(text(index), index)}


def pixels(index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def made(model_class: Any, **config: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a small model of ``model_class`` with random weights."""
    config = {"vocab_size": encoded_text()[1], **SMALL, **config}
    return lambda: model_class(model_class.config_class(**config))


FAMILIES = {
    "gpt2": Family(made(hf.GPT2LMHeadModel, loss_type="ForCausalLMLoss"), causal),
    "llama": Family(made(hf.LlamaForCausalLM), causal),
    # The grouped implementation does not support float64.
    "mixtral": Family(made(hf.MixtralForCausalLM, experts_implementation="eager"), causal),
    "bert masked": Family(
        made(hf.BertForMaskedLM),
        lambda index: causal(index) | {"attention_mask": torch.ones(12, dtype=torch.long)},
    ),
    "bert classification": Family(
        made(hf.BertForSequenceClassification),
        lambda index: {"input_ids": text(index), "labels": index % 3},
    ),
    "bert answers": Family(
        made(hf.BertForQuestionAnswering, num_labels=2),
        lambda index: {
            "input_ids": text(index),
            "start_positions": index % 5,
            "end_positions": 5 + index % 7,
        },
    ),
    "t5": Family(
        made(hf.T5ForConditionalGeneration, decoder_start_token_id=0),
        lambda index: causal(index) | {"input_ids": text(index + 500, 9)},
    ),
    "vit": Family(
        made(hf.ViTForImageClassification),
        lambda index: {"pixel_values": pixels(index, 3, 16, 16), "labels": index % 3},
    ),
    "whisper": Family(
        made(hf.WhisperForConditionalGeneration, num_key_value_heads=2),
        lambda index: {
            "input_features": pixels(index, 8, 20).double(),
            "labels": causal(index)["labels"],
        },
    ),
}
