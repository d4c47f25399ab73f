"""Kernels for attention within each text of a flat batch, and their registration with transformers."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from embq.worker.embedders.text.flat_batch import FlatTexts

NAME = "embq_varlen"
"""Name of the attention in transformers. It has no mask function there, and for such a name no mask is made at all
(`masking_utils._preprocess_mask_arguments`, "For TGI/vLLM backends, or other custom attention")."""

LEAST_CAPABILITY = (8, 0)
"""Least capability of a CUDA device for the kernel of torch, which fails late on older ones."""


Window = tuple[int | None, int | None]
EVERYWHERE: Window = (None, None)
CAUSAL: Window = (None, 0)


class Kernel(Protocol):
    """Computes attention of tokens to the tokens of the same text.

    Args:
        query, key, value: of shape (tokens, heads, dim of a head). Key and value may have fewer heads, each of them for
            as many heads of the query in a row.
        texts: where each text begins.
        scale: what scores are multiplied by; None for 1 / sqrt(dim of a head).
        window: a token looks at this many tokens before it and after it; None for all.

    Returns:
        of shape (tokens, heads of the query, dim of a head of the value).
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        texts: FlatTexts,
        scale: float | None,
        window: Window,
    ) -> torch.Tensor: ...


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """`attend_by_length` on CPUs, that of torch (since 2.10) for half precision on CUDA, else none.

    all-MiniLM-L6-v2 takes 7.5 ms of a Zen 4 core for a docstring in any batch of 16 or more, and with padding 7.9 ms in
    batches of one length, 18 ms in others.
    """
    if device.type == "cpu":
        return attend_by_length
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return _kernel_of_torch(varlen_attn)


def _kernel_of_torch(varlen_attn: Callable[..., Any]) -> Kernel:
    """`varlen_attn`, which got some of its options after 2.10, by its flash kernel.

    On Hopper and Blackwell, torch 2.14 prefers cuDNN for texts of more than 128 tokens, and 2.15 for all. cuDNN makes a
    plan for each shape, and each flat batch has another one. Up to 2.12 there is only the flash kernel.
    """
    accepted = inspect.signature(varlen_attn).parameters

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        texts: FlatTexts,
        scale: float | None,
        window: Window,
    ) -> torch.Tensor:
        options: dict[str, Any] = {}
        if scale is not None and scale != query.shape[-1] ** -0.5:
            options["scale"] = scale
        if key.shape[1] != query.shape[1]:
            if "enable_gqa" in accepted:
                options["enable_gqa"] = True
            else:
                key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        if "window_size" in accepted:
            # 2.14 has no other way to keep cuDNN out, which knows no windows. One over the longest text is none to the
            # flash kernel, which takes it for -1.
            options["window_size"] = tuple(texts.longest if reach is None else reach for reach in window)
        elif window == CAUSAL:
            options["is_causal"] = True
        elif window != EVERYWHERE:
            options["window_size"] = window
        if missing := options.keys() - accepted:
            raise NotImplementedError(f"this torch has no {' and '.join(sorted(missing))} in varlen_attn")
        starts, longest = texts.starts, texts.longest
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which 2.15 heeds
            output: torch.Tensor = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
        return output

    return attend


def attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    texts: FlatTexts,
    scale: float | None,
    window: Window,
) -> torch.Tensor:
    """The kernel of CPUs: torch's usual attention, of neighbouring texts of one length at once. For any device."""
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    is_grouped = key.shape[1] != query.shape[1]
    end = 0
    for length, alike in itertools.groupby(texts.lengths.tolist()):
        shape = (sum(1 for _ in alike), length)
        start, end = end, end + math.prod(shape)
        q, k, v = (tensor[start:end].view(*shape, *tensor.shape[1:]).transpose(1, 2) for tensor in (query, key, value))
        near = None
        left, right = (length if reach is None else reach for reach in window)
        if left < length - 1 or 0 < right < length - 1:
            places = torch.arange(length, device=query.device)
            ahead = places - places[:, None]
            near = (ahead >= -left) & (ahead <= right)
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=near, is_causal=near is None and right == 0, scale=scale, enable_gqa=is_grouped
        )
        output[start:end].view(*shape, *output.shape[1:]).copy_(attended.transpose(1, 2))
    return output


class AttentionWithinTexts:
    """Has the models of a transformers config use `_attend` while any thread is inside.

    Only then: a padded batch needs its mask, and under this name gets none. So no padded pass of a model is computed
    beside flat ones: `device.network.Network` waits for these before it recomputes in fp32.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._inside = 0
        self._previous: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                AttentionInterface.register(NAME, _attend)
                self._previous, self._config._attn_implementation = self._config._attn_implementation, NAME
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._config._attn_implementation = self._previous


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    embq_texts: FlatTexts,
    embq_kernel: Kernel,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, with tensors of shape (1, heads, tokens, dim of a head).

    The model hands `embq_texts` and `embq_kernel` down from its call; one that does not ends here with a TypeError.
    """
    del unused
    if attention_mask is not None:
        raise ValueError(f"a mask of shape {tuple(attention_mask.shape)} for a batch without padding")
    if softcap is not None or s_aux is not None:
        raise ValueError("scores are capped, or there are sinks, which no kernel here computes")
    # transformers counts the token itself: its window reaches one less to each side.
    reach = None if sliding_window is None else sliding_window - 1
    looks_back = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as `sdpa_attention_forward`
    output = embq_kernel(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        texts=embq_texts,
        scale=scaling,
        window=(reach, 0 if looks_back else reach),
    )
    return output.unsqueeze(0), None
