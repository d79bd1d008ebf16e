"""The kernels of the emulated backend: factories, sums of gradients, dropout and attention.

They are registered with torch's dispatcher when the first ``emulate_devices`` context is entered.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .copies import copy_, to_copy
from .ledger import Label
from .machine import current_machine
from .symbolic import CPU, META, is_known, is_unknown_dtype
from .tensor import HANDLERS, EmulatedTensor, Wrapped, elem_of, operator, wrap_elem

aten = torch.ops.aten


@cache
def register_kernels() -> torch.library.Library:
    """Register the kernels; torch removes them when the returned library is deallocated."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", partial(_make, torch.empty), "Lazy")
    library.impl("empty_strided", partial(_make, torch.empty_strided), "Lazy")
    # Called by torch.tensor([tensor, ...]).
    library.impl("_local_scalar_dense", lambda tensor: elem_of(tensor).item(), "Lazy")
    # Called by torch.tensor(..., device="lazy:0").
    library.impl("_copy_from", lambda source, target, *_: copy_(target, source), "Lazy")
    # Forward mode stands in for tangents that are zero.
    library.impl("_efficientzerotensor", partial(_make, torch.zeros), "Lazy")
    for overload in ("", ".periodic", ".beta"):
        library.impl(f"kaiser_window{overload}", partial(_make, torch.kaiser_window), "Lazy")
    for triangle in (torch.tril_indices, torch.triu_indices):
        library.impl(triangle.__name__, partial(_make, triangle, dtype=torch.int64), "Lazy")
    library.impl("scaled_dot_product_attention", _attention, "AutogradLazy")
    library.impl("ctc_loss.Tensor", _ctc_loss, "AutogradLazy")
    HANDLERS.update(
        {
            aten._to_copy.default: to_copy,
            aten.copy_.default: copy_,
            aten.add.Tensor: _add,
            aten.scaled_dot_product_attention.default: _attention,
            aten.ctc_loss.Tensor: _ctc_loss,
            # Wrappers have no bit for a conjugation or a sign that is still to be computed.
            aten._conj.default: operator(aten.conj_physical.default),
            aten._neg_view.default: operator(aten.neg.default),
            aten._pack_padded_sequence.default: _pack_padded_sequence,
            aten.native_dropout.default: _native_dropout,
            aten.rand_like.default: partial(_filled, aten.uniform_.default),
            aten.randn_like.default: partial(_filled, aten.normal_.default),
            aten.randint_like.default: partial(_filled, aten.random_.to),
            aten.randint_like.low_dtype: partial(_filled, getattr(aten.random_, "from")),
        }
    )
    return library


def _make(factory: Callable[..., Tensor], *args: Any, **kwargs: Any) -> EmulatedTensor:
    """Create a tensor. The dispatcher calls this below the Python key, without a tensor."""
    machine = current_machine()
    device, _, _ = (kwargs.pop(name, None) for name in ("device", "layout", "pin_memory"))
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    backing = META if machine.symbolic and is_unknown_dtype(dtype) else CPU
    elem = factory(*args, device=backing, **kwargs)
    return wrap_elem(elem, machine, machine.index_of(device), Label.OTHER)


_ENGINE = torch.autograd._engine_run_backward.__code__  # type: ignore[attr-defined]


def _add(self: Any, other: Any, **kwargs: Any) -> Any:
    """Add tensors. Gradients that autograd's engine adds take no memory if it frees the terms.

    On CUDA it adds them in place, unless other tensors share the memory; those of subclasses it
    adds out of place.
    """
    thread = current_machine().thread
    thread.is_adding_gradients = (
        sys._getframe(2).f_code is _ENGINE  # above is __torch_dispatch__
        and not torch.is_grad_enabled()
        and self.layout is torch.strided
        and self.untyped_storage().nbytes() == self.nbytes
        and _num_references(elem_of(self)) == _num_references(torch.empty(0, device=CPU))
    )
    try:
        return operator(aten.add.Tensor)(self, other, **kwargs)
    finally:
        thread.is_adding_gradients = False


def _num_references(elem: Tensor) -> int:
    return torch._C._storage_Use_Count(elem.untyped_storage()._cdata)


# Random numbers come from the device's generator, so that replicas in threads are reproducible.


def _filled(fill_: torch._ops.OpOverload, input: EmulatedTensor, *args: Any, **kwargs: Any) -> Any:
    output = operator(aten.empty_like.default)(input, **kwargs)
    return operator(fill_)(output, *args)


def _native_dropout(input: EmulatedTensor, p: float, train: bool | None) -> Any:
    """Apply dropout with a bool mask, as CUDA's fused kernel does."""
    func = aten.native_dropout.default
    wrapped = Wrapped(func)
    elem = wrapped.unwrap(input)
    if train is False or p == 0 or not is_known(elem):
        return operator(func)(input, p, train)
    mask = torch.empty_like(elem, dtype=torch.bool)
    mask.bernoulli_(1 - p, generator=wrapped.machine.generators[wrapped.index])
    return wrapped.wrap(((elem * mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask))


def _pack_padded_sequence(
    input: EmulatedTensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Pack a sequence; lengths and batch sizes are on the CPU, as with CUDA."""
    func = aten._pack_padded_sequence.default
    wrapped = Wrapped(func)
    data, batch_sizes = func(wrapped.unwrap(input), lengths, batch_first)
    return wrapped.wrap(data), batch_sizes


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute the CTC loss with lengths read on the host, which torch omits for subclasses."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return torch.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


# Attention with the memory of CUDA's fused kernels, which save the output and the log-sum-exp of
# each row, but not the attention matrix. Source: FlashAttention, https://arxiv.org/abs/2205.14135.


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if enable_gqa:
        group_size = query.size(-3) // key.size(-3)
        key, value = (kv.repeat_interleave(group_size, -3) for kv in (key, value))
    if not _is_fusable(query, key, value, attn_mask, is_causal):
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            zero = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zero.masked_fill_(attn_mask.logical_not(), -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.size(2))
    seed = 0
    if dropout_p:
        generator = current_machine().generators[query.get_device()]
        seed = int(torch.randint(2**31, (), generator=generator, device=CPU))
    return _FusedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, attn_mask, dropout_p, is_causal, scale, seed
    )[0]


def _is_fusable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Return whether a fused kernel supports the arguments; if not, the math kernel is called.

    Source: the checks of ``use_flash_attention_cpp`` in aten/src/ATen/native/transformers/
    sdp_utils_cpp.cpp, torch 2.13. CUDA's are the same.
    """
    if not all(t.dim() == 4 and t.numel() and t.stride(-1) == 1 for t in (q, k, v)):
        return False
    if mask is not None and (mask.requires_grad or is_causal):
        return False
    batch, num_heads, _, head_dim = q.shape
    return k.shape == v.shape == (batch, num_heads, k.size(2), head_dim)


class _FusedAttention(torch.autograd.Function):
    """Attention with the memory of the fused kernel; backward computes it again."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        wrapped = Wrapped(aten.scaled_dot_product_attention.default)
        q, k, v, mask = map(wrapped.unwrap, inputs[:4])
        output: Any = torch.empty_like(inputs[0])
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        if is_known(q):
            elem_of(output).copy_(_attend(q, k, v, mask, *inputs[4:]))
        return output, wrapped.wrap(logsumexp)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.options = inputs[4:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: EmulatedTensor, _: Any) -> Any:
        wrapped = Wrapped(aten.scaled_dot_product_attention.default)
        inputs = ctx.saved_tensors[:4]  # read once: checkpoints refuse a second time
        grad, q, k, v, mask = map(wrapped.unwrap, (grad_output, *inputs))
        grads: Any = tuple(map(torch.empty_like, inputs[:3]))
        if is_known(q):
            with torch.enable_grad():
                q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                output = _attend(q, k, v, mask, *ctx.options)
            results = torch.autograd.grad(output, (q, k, v), grad)
            for target, result in zip(grads, results, strict=True):
                elem_of(target).copy_(result)
        return *grads, *[None] * 5


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> Tensor:
    """Compute attention on the CPU, whose fused kernel has no dropout."""
    dropout_p, is_causal, scale, seed = options
    if not dropout_p:
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)
    weights = aten._scaled_dot_product_attention_math(
        q, k, k[..., :0], mask, 0.0, is_causal, scale=scale
    )[1]
    generator = torch.Generator().manual_seed(seed)
    kept = torch.empty_like(weights).bernoulli_(1 - dropout_p, generator=generator)
    return torch.matmul(weights * kept / (1 - dropout_p), v)
