"""Forward passes of texts without padding, where the model, the device and the precision allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from core.errors import DeviceFullError
from core.service.log import Events
from worker.embedders.device.accuracy import PROBES, AccuracyCheck
from worker.embedders.device.errors import translated_device_errors
from worker.embedders.device.optional_paths import FLAT, PATHS
from worker.embedders.device.transfer import PinnedSender
from worker.embedders.device.trial import check_device
from worker.embedders.text.flat_attention import Kernel, attention_within_texts
from worker.embedders.text.flat_batch import FlatTexts, TokenRow, flattened

ARCHITECTURES = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert")
"""What `model_type` may be: each takes positions, hands further arguments down to its attention, has no other place
where tokens of a row meet, and is compared with its padded self in the tests."""


class FlatTrunk:
    """The states of the tokens of a flat batch.

    Args:
        trunk: a transformers model, one of `ARCHITECTURES`.
        kernel: computes attention within each text.
    """

    def __init__(self, trunk: Any, kernel: Kernel) -> None:
        self._trunk = trunk
        self._kernel = kernel

    @property
    def dtype(self) -> torch.dtype:
        """In which the trunk computes now."""
        dtype: torch.dtype = self._trunk.dtype
        return dtype

    def states(self, texts: FlatTexts) -> torch.Tensor:
        """The last hidden states: shape (tokens, dim), in the type of the model."""
        features = {"input_ids": texts.ids, "position_ids": self._positions(texts), "token_type_ids": texts.types}
        row = {name: values[None] for name, values in features.items() if values is not None}
        with attention_within_texts(self._trunk.config):
            made = self._trunk(**row, embq_texts=texts, embq_kernel=self._kernel, return_dict=True)
        states: torch.Tensor = made.last_hidden_state[0]
        return states

    def _positions(self, texts: FlatTexts) -> torch.Tensor:
        """Position ids that begin again with each text; int64 of shape (tokens,)."""
        padding = _position_of_padding(self._trunk)
        if padding is None:
            return texts.places()
        # RoBERTa counts the tokens that are not padding from there on, and a text may hold a padding token.
        counted = (texts.ids != padding).long()
        sums = counted.cumsum(0)
        before = (sums - counted)[texts.starts[:-1].long()]
        return (sums - texts.of_each(before)) * counted + padding


def is_flattenable(trunk: Any) -> bool:
    """Whether the architecture is one whose texts may lie one after the other."""
    config = getattr(trunk, "config", None)
    return getattr(config, "model_type", "") in ARCHITECTURES and not getattr(config, "is_decoder", False)


def _position_of_padding(trunk: Any) -> int | None:
    """In models of RoBERTa's kind, whose positions begin after it; None where they begin at 0."""
    padding = getattr(trunk.embeddings, "padding_idx", None)
    return padding if isinstance(padding, int) else None


LONGEST_PROBE = 512
"""Words of the longest text that is tried."""

WORDS = ("the", "device", "reads", "texts", "of", "any", "length", "long", "ones", "beside", "short", "ones")

Head = Callable[[torch.Tensor, FlatTexts], torch.Tensor]
"""Vectors of shape (texts, dim) from the states of their tokens, which have shape (tokens, dim)."""

Run = Callable[[Sequence[TokenRow]], Mapping[str, torch.Tensor]]
"""One forward pass: output -> tensor of shape (texts, dim)."""

log = Events("worker")


class FlatForward:
    """From token rows to vectors: one row of all tokens, the trunk, and what makes vectors of its states."""

    def __init__(self, trunk: Any, head: Head, kernel: Kernel, sender: PinnedSender) -> None:
        self._trunk = FlatTrunk(trunk, kernel)
        self._head = head
        self._sender = sender
        self._dtype = self._trunk.dtype

    @property
    def is_open(self) -> bool:
        """Whether the trunk computes in the type for which the kernel was chosen: not while it recomputes in fp32."""
        return self._trunk.dtype == self._dtype

    def run(self, batch: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """See `Run`."""
        texts = flattened(batch, self._sender)
        return {"text": self._head(self._trunk.states(texts), texts)}


def flat_forward(
    trunk: Any,
    head: Head | None,
    kernel: Kernel | None,
    sender: PinnedSender,
    *,
    padded: Run,
    in_fp32: Callable[[Sequence[TokenRow]], np.ndarray],
    rows: Callable[[Sequence[str]], Sequence[Any]],
    model: str,
) -> FlatForward | None:
    """The flat path of a model where there is one as good as the padded one; the log says which it is.

    Args:
        head: None where the model does something with padded states that has no flat form here.
        kernel: None where the device has none for this precision.
        padded: the other path.
        in_fp32: vectors of texts by the other path with the weights in fp32.
        rows: tokenises texts.
        model: the spec, for the log.

    Raises DeviceError where the device is broken, perhaps by the kernel.
    """
    if kernel is None or head is None or not is_flattenable(trunk):
        why = "kernel" if kernel is None else "architecture" if not is_flattenable(trunk) else "modules"
        log.info("attention", model=model, path="padded", lacks=why)
        return None
    if FLAT in PATHS.without:
        log.warning("attention", model=model, path="padded", failed="the process before this one died with it")
        return None
    path = FlatForward(trunk, head, kernel, sender)
    probes = [row for row in rows(probe_texts()) if isinstance(row, Mapping)]
    try:
        exact = torch.from_numpy(in_fp32(probes))
        with translated_device_errors(), torch.inference_mode():
            nearness = AccuracyCheck(padded(probes)["text"], exact)
    except DeviceFullError as error:
        log.warning("attention", model=model, path="padded", failed=f"no room for a trial: {error.message}")
        return None
    PATHS.try_out(FLAT)
    try:
        with torch.inference_mode():
            vectors = path.run(probes)["text"]
            why = nearness.refusal(vectors)
    except (RuntimeError, TypeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        why = f"{type(error).__name__}: {first}"[:300]
        check_device(lambda: padded(probes)["text"].cpu(), error)
    PATHS.settle(FLAT, is_taken=not why)
    if why:
        log.warning("attention", model=model, path="padded", failed=why)
        return None
    log.info("attention", model=model, path="flat", error_ratio=round(nearness.ratio(vectors), 3))
    return path


def probe_texts() -> list[str]:
    """Texts of 1 to 512 words, long ones beside short ones."""
    counts = np.geomspace(1, LONGEST_PROBE, PROBES).astype(int).tolist()
    texts = [" ".join(WORDS[(count + n) % len(WORDS)] for n in range(count)) for count in counts]
    return texts[::2] + texts[1::2][::-1]
