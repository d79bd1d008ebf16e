"""Kernels for emulated tensors: factories, copies, sums of gradients, dropout, attention, RNNs.

The kernels are registered with torch's dispatcher when the first ``emulate_devices`` context is
entered.
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
from torch.utils._pytree import tree_flatten, tree_unflatten

from .ledger import Label
from .machine import Machine, current_machine, label_of_results
from .symbolic import CPU, META, is_known, is_unknown_dtype, require_known
from .tensor import (
    HANDLERS,
    PROVISIONAL,
    EmulatedTensor,
    Wrapped,
    elem_of,
    operator,
    set_label,
    wrap_elem,
)

aten = torch.ops.aten


@cache
def register_kernels() -> torch.library.Library:
    """Register the kernels of this file with torch's dispatcher, unless this was done before.

    Each call returns the library that holds the kernels. Torch would remove the kernels if this
    library were deallocated, but the cache of this function keeps it.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", partial(_make, torch.empty), "Lazy")
    library.impl("empty_strided", partial(_make, torch.empty_strided), "Lazy")
    # Called by torch.tensor([tensor, ...]).
    library.impl("_local_scalar_dense", lambda tensor: elem_of(tensor).item(), "Lazy")
    # Called by torch.tensor(..., device="lazy:0").
    library.impl("_copy_from", lambda source, target, *_: _copy_(target, source), "Lazy")
    # Called by forward-mode autograd to create zero tangents.
    library.impl("_efficientzerotensor", partial(_make, torch.zeros), "Lazy")
    for overload in ("", ".periodic", ".beta"):
        library.impl(f"kaiser_window{overload}", partial(_make, torch.kaiser_window), "Lazy")
    for triangle in (torch.tril_indices, torch.triu_indices):
        library.impl(triangle.__name__, partial(_make, triangle, dtype=torch.int64), "Lazy")
    kernels: dict[Any, Callable[..., Any]] = {
        aten.scaled_dot_product_attention.default: _attention,
        aten.ctc_loss.Tensor: _ctc_loss,
    }
    for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
        kernels[packet.input] = partial(_recurrent, packet.input)
    for func, kernel in kernels.items():
        library.impl(func, kernel, "AutogradLazy")
    library.impl(aten.linear.default, _linear, "AutogradLazy", with_keyset=True)
    # For backends other than the CPU and CUDA, torch computes these two operators with several
    # others. Here each runs as one operator, as on CUDA.
    for func in (aten.silu_backward.default, aten.mish_backward.default):
        kernels[func] = operator(func)
        library.impl(func, kernels[func], "Lazy")
    HANDLERS.update(
        kernels
        | {
            aten._to_copy.default: _to_copy,
            aten.copy_.default: _copy_,
            aten.linear.default: operator(aten.linear.default),
            aten.linear_backward.default: _linear_backward,
            aten.add.Tensor: _add,
            # Torch postpones these two operations: it only sets the conjugate bit or the negative
            # bit of a tensor. Emulated tensors have no such bits, so both operations are computed.
            aten._conj.default: operator(aten.conj_physical.default),
            aten._neg_view.default: operator(aten.neg.default),
            aten._pack_padded_sequence.default: _pack_padded_sequence,
            aten.histc.default: _histc,
            aten.native_dropout.default: _native_dropout,
            aten.rand_like.default: partial(_filled, aten.uniform_.default),
            aten.randn_like.default: partial(_filled, aten.normal_.default),
            aten.randint_like.default: partial(_filled, aten.random_.to),
            aten.randint_like.low_dtype: partial(_filled, getattr(aten.random_, "from")),
        }
    )
    return library


def _make(factory: Callable[..., Tensor], *args: Any, **kwargs: Any) -> EmulatedTensor:
    """Create a tensor with ``factory``, and return it wrapped in an emulated tensor.

    Factories such as ``torch.empty`` have no tensor argument, so the dispatcher calls this function
    and not ``__torch_dispatch__``.
    """
    machine = current_machine()
    device, _, _ = (kwargs.pop(name, None) for name in ("device", "layout", "pin_memory"))
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    backing = META if machine.symbolic and is_unknown_dtype(dtype) else CPU
    elem = factory(*args, device=backing, **kwargs)
    return wrap_elem(elem, machine, machine.index_of(device), Label.OTHER)


# Copies are the only operators that involve two devices.


def _to_copy(self: EmulatedTensor, **kwargs: Any) -> torch.Tensor:
    """Return a copy of ``self`` with another dtype, layout or device, as ``Tensor.to`` does."""
    machine = current_machine()
    elem = elem_of(self)
    dtype = kwargs.get("dtype") or elem.dtype
    target = kwargs.pop("device", None) or self.device
    if target.type == "meta":
        return torch.empty_strided(elem.size(), elem.stride(), dtype=dtype, device=META)
    if target.type == "cpu":
        elem = _readable(elem, machine)
    else:
        target = machine.devices[machine.index_of(target)]
    machine.record_copy(self.device, target, elem.numel() * dtype.itemsize)
    to_copy = operator(aten._to_copy.default)
    copied: Tensor = (to_copy.on_shapes if machine.symbolic else to_copy.func)(elem, **kwargs)
    if target.type == "cpu":
        return copied
    return wrap_elem(copied, machine, target.index, _copy_label(self, target.index, machine))


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy ``source`` into ``target``, as ``Tensor.copy_`` does.

    At least one of the two tensors is on an emulated device.
    """
    machine = current_machine()
    source_elem = elem_of(source) if isinstance(source, EmulatedTensor) else source
    machine.record_copy(source.device, target.device, source.numel() * target.dtype.itemsize)
    if not isinstance(target, EmulatedTensor):
        return target.copy_(_readable(source_elem, machine))
    target_elem = elem_of(target)
    if is_known(target_elem):
        require_known(source_elem, "copying it into an integer tensor")
        target_elem.copy_(source_elem)
    if not isinstance(source, EmulatedTensor):
        label = Label.PARAMETER if isinstance(source, torch.nn.Parameter) else Label.INPUT
        set_label(target, label, over=(Label.OTHER,))
    elif source.device != target.device:
        set_label(target, _copy_label(source, target.get_device(), machine))
    return target


def _readable(elem: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Return ``elem``, the tensor that an emulated tensor wraps, after checking that it has values.

    In symbolic mode, ``elem`` may have a shape but no values. If ``machine.reads_unknown_as_nan``
    is true, a floating-point or complex ``elem`` without values is replaced by a tensor of NaN.

    Raises:
        SymbolicValueError: ``elem`` has no values and is not replaced.
    """
    if machine.reads_unknown_as_nan and not is_known(elem) and is_unknown_dtype(elem.dtype):
        return torch.full(elem.shape, math.nan, dtype=elem.dtype, device=CPU)
    require_known(elem, "copying it to the CPU")
    return elem


def _copy_label(source: EmulatedTensor, index: int, machine: Machine) -> Label:
    """Return the label (what the memory is used for) of a copy of ``source`` on device ``index``.

    The first of these cases that applies decides the label:

    - The running autograd node receives gradients of leaf tensors: "gradient". If the label of
      ``source`` is provisional ("activation" or "other"), it is changed to "gradient", too.
    - The copy is on the device of ``source``: the label of the running operator's results, for
      example "activation".
    - The label of ``source`` is not provisional, for example "parameter": the same label.
    - A backward pass is running: the label of the running operator's results.
    - ``source`` is on device 0, which scatters inputs: "input".
    - ``source`` is on any other device: "gathered output".
    """
    label = label_of_results(machine)
    if label is Label.GRADIENT:
        set_label(source, label)
        return label
    known, is_in_backward = source._blocks[0].label, torch._C._current_graph_task_id() != -1
    if source.get_device() == index or (known in PROVISIONAL and is_in_backward):
        return label
    if known not in PROVISIONAL:
        return known
    return Label.GATHERED_OUTPUT if source.get_device() else Label.INPUT


_ENGINE = torch.autograd._engine_run_backward.__code__  # type: ignore[attr-defined]


def _add(self: Any, other: Any, **kwargs: Any) -> Any:
    """Add two tensors. A sum of gradients takes no extra memory if it takes none on CUDA.

    On CUDA, autograd's engine adds gradients in place unless other tensors share their memory. Here
    the engine adds gradients out of place, because they are instances of a tensor subclass. So for
    a moment, the sum exists together with the gradients that were added. If the engine would add in
    place on CUDA, the sum counts toward the peak only when the ``DeviceLedger`` of the device is
    used next. By then, the engine has usually freed the gradients.

    If the engine adds two gradients, they are gradients of the same tensor. If one of them has the
    label "gradient", both are gradients of a leaf tensor. So the label of the other one and of the
    sum is set to "gradient", too.
    """
    thread = current_machine().thread
    is_engine = sys._getframe(2).f_code is _ENGINE  # frame 1 is __torch_dispatch__
    thread.is_adding_gradients = (
        is_engine
        and not torch.is_grad_enabled()
        and self.layout is torch.strided
        and self.untyped_storage().nbytes() == self.nbytes
        and _num_references(elem_of(self)) == _num_references(torch.empty(0, device=CPU))
    )
    try:
        total = operator(aten.add.Tensor)(self, other, **kwargs)
    finally:
        thread.is_adding_gradients = False
    if is_engine:
        blocks = [*self._blocks, *other._blocks, *total._blocks]
        if any(block.label is Label.GRADIENT for block in blocks):
            for block in blocks:
                block.label = Label.GRADIENT
    return total


def _num_references(elem: Tensor) -> int:
    return torch._C._storage_Use_Count(elem.untyped_storage()._cdata)


def _histc(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a histogram. Integer inputs are supported, as on CUDA, but unlike on the CPU."""
    return operator(aten.histc.default)(input.to(torch.double), *args, **kwargs).to(input.dtype)


# Random numbers come from the generator of the emulated device, so that the results of replicas
# that run in threads are reproducible.


def _filled(fill_: torch._ops.OpOverload, input: EmulatedTensor, *args: Any, **kwargs: Any) -> Any:
    return operator(fill_)(operator(aten.empty_like.default)(input, **kwargs), *args)


def _native_dropout(input: EmulatedTensor, p: float, train: bool | None) -> Any:
    """Apply dropout with a bool mask, as CUDA's fused kernel does."""
    wrapped = Wrapped()
    elem = wrapped.unwrap(input)
    if train is False or p == 0 or not is_known(elem):
        return operator(aten.native_dropout.default)(input, p, train)
    generator = wrapped.machine.generators[wrapped.index]
    # Each draw of 64 bits gives four numbers of 16 bits, so p is rounded to a multiple of 2**-16.
    # With rand, the mask would take three times as long, and with bernoulli_, five times.
    draws = torch.empty((elem.numel() + 3) // 4, dtype=torch.int64, device=CPU)
    numbers = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[: elem.numel()]
    mask = numbers.view(elem.shape) >= min(round(p * 2**16), 2**16 - 1) - 2**15
    return wrapped.wrap(((elem * mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask))


def _pack_padded_sequence(input: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """Pack a padded sequence. Lengths and batch sizes are CPU tensors, as with CUDA."""
    if isinstance(lengths, EmulatedTensor):
        raise RuntimeError(f"'lengths' is on {lengths.device}; it must be on the CPU: use .cpu()")
    wrapped, pack = Wrapped(), aten._pack_padded_sequence.default
    data, batch_sizes = pack(wrapped.unwrap(input), lengths, batch_first)
    return wrapped.wrap(data), batch_sizes


def _ctc_loss(log_probs: Tensor, targets: Tensor, *given: Any) -> Any:
    """Compute the CTC loss, after converting the lengths of the sequences to lists.

    Torch's operator converts the lengths itself if they are plain tensors, but not if they are
    instances of a tensor subclass.
    """
    lengths, options = [length.tolist() for length in given[:2]], given[2:]
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, *options)


# On most backends, torch computes a linear layer with up to five operators, and its gradients with
# up to ten. Here, one operator computes the layer, and another one its gradients, in as much memory
# as torch's operators take. Each operator goes through Python, so fewer operators are faster: with
# torch's operators, a training step of BERT took a tenth longer.

_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradNestedTensor)
"""The dispatch key of torch's autograd kernel that runs ``linear`` as one operator."""


def _linear(keys: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # If linear runs as one operator, it saves its input and its weight for the backward pass. If
    # torch decomposes it, the resulting operators save the same tensors only if both tensors
    # require gradients and the input is contiguous.
    saves_both = input.requires_grad and weight.requires_grad and input.is_contiguous()
    has_rows = weight.dim() == 2 and weight.numel() and (bias is None or bias.dim() == 1)
    # Dispatch modes, such as that of selective checkpointing, expect the operators of the
    # decomposition. If linear runs as one operator, it does not support forward-mode AD.
    is_seen = torch._C._len_torch_dispatch_stack() or torch.autograd.forward_ad._current_level >= 0
    # Complex inputs need torch's operators, because _linear_backward does not conjugate.
    if saves_both and has_rows and not is_seen and input.is_floating_point():
        return aten.linear.default.redispatch(keys | _AUTOGRAD, input, weight, bias)
    return aten.linear.default.decompose(input, weight, bias)


def _linear_backward(input: Tensor, grad: Tensor, weight: Tensor, mask: list[bool]) -> Any:
    if not grad.is_contiguous():
        # Torch's operators copy grad, free the original, and then compute the gradients. Here
        # autograd holds the original until this function returns. So the next line makes a copy
        # that is freed at once. As with torch's operators, the peak then includes a moment when
        # original and copy both exist, but the gradients are computed while only one of them does.
        grad.reshape(-1, grad.size(-1))
    wrapped = Wrapped()
    x, g, w = wrapped.unwrap((input, grad, weight))
    rows, grads = x.reshape(-1, x.size(-1)), g.reshape(-1, g.size(-1))
    of_input = (grads @ w).view(x.shape) if mask[0] else None
    of_weight = grads.t() @ rows if mask[1] else None
    of_bias = grads.sum(0) if mask[2] else None
    return wrapped.wrap((of_input, of_weight, of_bias))


# Attention that takes as much memory as CUDA's fused kernels. For the backward pass, the fused
# kernels save the output and the log-sum-exp of each row, but not the attention matrix. Source:
# FlashAttention, https://arxiv.org/abs/2205.14135.


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
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = zero.masked_fill_(attn_mask.logical_not(), -math.inf)
    generator = current_machine().generators[query.get_device()]
    seed = int(torch.randint(2**31, (), generator=generator, device=CPU)) if dropout_p else 0
    run = partial(_attend, options=(dropout_p, is_causal, scale, seed))
    return _fused(run, math.prod(query.shape[:3]), query, key, value, attn_mask)[0]


def _is_fusable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Return whether a fused attention kernel supports the arguments.

    If it does not, ``_attention`` calls the math kernel.

    Source: the checks of ``use_flash_attention_cpp`` in aten/src/ATen/native/transformers/
    sdp_utils_cpp.cpp, torch 2.13. The checks for CUDA are the same.
    """
    if not all(t.dim() == 4 and t.numel() and t.stride(-1) == 1 for t in (q, k, v)):
        return False
    if mask is not None and (mask.requires_grad or is_causal):
        return False
    return k.shape == v.shape == (*q.shape[:2], k.size(2), q.size(3))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: tuple[Any, ...]
) -> tuple[Tensor]:
    """Compute attention on the CPU.

    The CPU's fused kernel has no dropout. So with dropout, the attention weights are computed
    separately, and dropout is applied to them.
    """
    dropout_p, is_causal, scale, seed = options
    if not is_known(q):
        return (torch.empty_like(q),)
    if not dropout_p:
        output = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)
    else:
        weights = aten._scaled_dot_product_attention_math(
            q, k, k[..., :0], mask, 0.0, is_causal, scale=scale
        )[1]
        generator = torch.Generator().manual_seed(seed)
        kept = torch.empty_like(weights).bernoulli_(1 - dropout_p, generator=generator)
        output = torch.matmul(weights * kept / (1 - dropout_p), v)
    return (torch.empty_like(q).copy_(output),)


# All steps of a recurrent layer run in one kernel, as with cuDNN. If the steps ran as separate
# operators, each operator would go through Python: an LSTM took three times as long on one emulated
# device, and eight times as long on four.


def _recurrent(func: torch._ops.OpOverload, *args: Any) -> Any:
    """Run an LSTM, a GRU or an RNN: the operator ``func(input, states, weights, *options)``.

    All time steps run in one kernel. But if the layer has dropout (``options[2]`` is not 0) or
    autocast is on, the time steps run one after another, as separate operators.
    """
    (inputs, spec), weights, options = tree_flatten(args[:3]), args[2], args[3:]
    if options[2] or torch.is_autocast_enabled(args[0].device.type):
        return func.decompose(*args)

    def run(*elems: Any) -> Any:
        return func(*tree_unflatten(elems, spec), *options)

    # For each sample and time step, the backward pass of an LSTM reads six saved numbers for each
    # unit: four gates, cell and output. An LSTM's weights have eight rows for each unit. For all
    # kinds of layers, the number of rows is used as an upper bound of the saved numbers.
    num_rows = sum(weight.size(0) for weight in weights if weight.dim() == 2)
    num_kept = args[0].shape[:-1].numel() * num_rows * torch.is_grad_enabled()
    return _fused(run, num_kept, *inputs)


class _Fused(torch.autograd.Function):
    """An autograd function that runs an operator with as much memory as a fused CUDA kernel.

    The backward pass computes the operator again to get the gradients.

    Args:
        run: function that computes the operator's outputs on the CPU.
        num_kept: how many numbers the fused kernel saves for the backward pass, in addition to the
            inputs and the output.
        inputs: the inputs of the operator, each a tensor or None.
    """

    @staticmethod
    def forward(ctx: Any, run: Any, num_kept: int, *inputs: Any) -> Any:
        wrapped = Wrapped()
        elems = wrapped.unwrap(inputs)
        dtype = torch.promote_types(elems[0].dtype, torch.float32)
        outputs, kept = wrapped.wrap((run(*elems), elems[0].new_empty(num_kept, dtype=dtype)))
        ctx.run = run
        ctx.save_for_backward(*inputs, outputs[0], kept)  # cuDNN saves no final states, either
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # As with cuDNN, differentiating twice is an error. once_differentiable raises the error
        # only if a gradient requires grad, so all gradients are made to require grad.
        given = [g.detach().requires_grad_() for g in grads] if torch.is_grad_enabled() else grads
        return _Fused._backward(ctx, *given)

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        inputs = ctx.saved_tensors[: len(needs)]  # checkpointing allows reading them only once
        wrapped = Wrapped()
        elems: list[Any] = [x if x is None else x.detach() for x in wrapped.unwrap(inputs)]
        targets: dict[int, Any] = {i: torch.empty_like(inputs[i]) for i, n in enumerate(needs) if n}
        if is_known(elems[0]):
            leaves = [elems[i].requires_grad_() for i in targets]
            with torch.enable_grad():
                outputs = ctx.run(*elems)
            gradients = torch.autograd.grad(outputs, leaves, wrapped.unwrap(grads))
            for target, gradient in zip(targets.values(), gradients, strict=True):
                elem_of(target).copy_(gradient)
        return None, None, *map(targets.get, range(len(needs)))


_fused: Any = _Fused.apply  # torch gives this method no types
