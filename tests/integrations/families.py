"""Small models of several families with random weights, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from balanced_dp.tuning.workload import encoded_text

WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Family:
    """A model, and a function that makes the sample with a given index."""

    make_model: Callable[[], nn.Module]
    sample: Callable[[int], dict[str, Any]]


def text(index: int, length: int = 12) -> Tensor:
    """Return an excerpt of real text as indices of its characters."""
    encoded, _ = encoded_text()
    return encoded[index * 37 : index * 37 + length]


def with_ignored_labels(labels: Tensor, index: int) -> Tensor:
    """Set a few labels to -100, and all labels of some samples."""
    labels = labels.clone()
    labels[: index % 5] = -100
    return labels * 0 - 100 if index % 6 == 0 else labels


def causal(index: int) -> dict[str, Any]:
    return {"input_ids": text(index), "labels": with_ignored_labels(text(index), index)}


def pixels(index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def made(model_class: Any, **config: Any) -> Callable[[], nn.Module]:
    """Return the function that makes a small model of a class."""
    return lambda: model_class(model_class.config_class(**config))


def of_text(model_class: Any, **config: Any) -> Callable[[], nn.Module]:
    """Return the function that makes a small model of characters."""
    return made(model_class, vocab_size=encoded_text()[1], **config)


def bert(model_class: Any, num_labels: int = 3) -> Callable[[], nn.Module]:
    shape = {"intermediate_size": 32, "max_position_embeddings": 32, "num_labels": num_labels}
    return of_text(model_class, **shape, **WIDTH, **NO_DROPOUT)


GPT2 = of_text(
    hf.GPT2LMHeadModel,
    n_positions=32,
    n_embd=16,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    loss_type="ForCausalLMLoss",
    **TOKENS,
)
LLAMA = {"intermediate_size": 32, "num_key_value_heads": 1, **WIDTH, **TOKENS}
MIXTRAL = of_text(
    hf.MixtralForCausalLM,
    num_local_experts=4,
    experts_implementation="eager",  # the grouped one does not support float64
    num_experts_per_tok=2,
    **LLAMA,
)
T5 = of_text(
    hf.T5ForConditionalGeneration,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
VIT = made(
    hf.ViTForImageClassification,
    intermediate_size=32,
    image_size=16,
    patch_size=8,
    num_labels=3,
    **WIDTH,
    **NO_DROPOUT,
)
WHISPER = of_text(
    hf.WhisperForConditionalGeneration,
    num_mel_bins=8,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    max_source_positions=10,
    max_target_positions=32,
    dropout=0.0,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
    **TOKENS,
)
FAMILIES = {
    "gpt2": Family(GPT2, causal),
    "llama": Family(of_text(hf.LlamaForCausalLM, **LLAMA), causal),
    "mixtral": Family(MIXTRAL, causal),
    "bert masked": Family(
        bert(hf.BertForMaskedLM),
        lambda index: causal(index) | {"attention_mask": torch.ones(12, dtype=torch.long)},
    ),
    "bert classification": Family(
        bert(hf.BertForSequenceClassification),
        lambda index: {"input_ids": text(index), "labels": index % 3},
    ),
    "bert answers": Family(
        bert(hf.BertForQuestionAnswering, num_labels=2),
        lambda index: {
            "input_ids": text(index),
            "start_positions": index % 5,
            "end_positions": 5 + index % 7,
        },
    ),
    "t5": Family(T5, lambda index: causal(index) | {"input_ids": text(index + 500, 9)}),
    "vit": Family(
        VIT, lambda index: {"pixel_values": pixels(index, 3, 16, 16), "labels": index % 3}
    ),
    "whisper": Family(
        WHISPER,
        lambda index: {
            "input_features": pixels(index, 8, 20).double(),
            "labels": causal(index)["labels"],
        },
    ),
}
