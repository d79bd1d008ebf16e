"""Small models of several families with random weights, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from balanced_dp.tuning.workloads import encoded_text

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


def vocabulary() -> int:
    return encoded_text()[1]


def with_ignored_labels(labels: Tensor, index: int) -> Tensor:
    """Set a few labels to -100, and all labels of some samples."""
    labels = labels.clone()
    labels[: index % 5] = -100
    return labels * 0 - 100 if index % 6 == 0 else labels


def causal(index: int) -> dict[str, Any]:
    return {"input_ids": text(index), "labels": with_ignored_labels(text(index), index)}


def masked(index: int) -> dict[str, Any]:
    return {
        "input_ids": text(index),
        "attention_mask": torch.ones(12, dtype=torch.long),
        "labels": with_ignored_labels(text(index), index),
    }


def pixels(index: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(index))


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=vocabulary(),
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
    return hf.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=vocabulary(), intermediate_size=32, num_key_value_heads=1, **WIDTH, **TOKENS
    )
    return hf.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=vocabulary(),
        intermediate_size=32,
        num_key_value_heads=1,
        num_local_experts=4,
        experts_implementation="eager",  # the grouped one does not support float64
        num_experts_per_tok=2,
        **WIDTH,
        **TOKENS,
    )
    return hf.MixtralForCausalLM(config)


def bert_config(num_labels: int = 3) -> hf.BertConfig:
    return hf.BertConfig(
        vocab_size=vocabulary(),
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=num_labels,
        **WIDTH,
        **NO_DROPOUT,
    )


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=vocabulary(),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = hf.ViTConfig(
        intermediate_size=32, image_size=16, patch_size=8, num_labels=3, **WIDTH, **NO_DROPOUT
    )
    return hf.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=vocabulary(),
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
    return hf.WhisperForConditionalGeneration(config)


FAMILIES = {
    "gpt2": Family(gpt2, causal),
    "llama": Family(llama, causal),
    "mixtral": Family(mixtral, causal),
    "bert masked": Family(lambda: hf.BertForMaskedLM(bert_config()), masked),
    "bert classification": Family(
        lambda: hf.BertForSequenceClassification(bert_config()),
        lambda index: {"input_ids": text(index), "labels": index % 3},
    ),
    "bert tokens": Family(
        lambda: hf.BertForTokenClassification(bert_config()),
        lambda index: {
            "input_ids": text(index),
            "labels": with_ignored_labels(text(index) % 3, index),
        },
    ),
    "bert answers": Family(
        lambda: hf.BertForQuestionAnswering(bert_config(num_labels=2)),
        lambda index: {
            "input_ids": text(index),
            "start_positions": index % 5,
            "end_positions": 5 + index % 7,
        },
    ),
    "t5": Family(t5, lambda index: causal(index) | {"input_ids": text(index + 500, 9)}),
    "vit": Family(
        vit, lambda index: {"pixel_values": pixels(index, 3, 16, 16), "labels": index % 3}
    ),
    "whisper": Family(
        whisper,
        lambda index: {
            "input_features": pixels(index, 8, 20).double(),
            "labels": causal(index)["labels"],
        },
    ),
}
