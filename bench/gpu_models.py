"""The models of `bench.gpu`, with random weights: what a pass of each computes without embq, and its spec in embq."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, BertConfig, DistilBertConfig, PretrainedConfig, PreTrainedTokenizerFast

from bench.gpu_text import TOKENS, WORDS
from worker.embedders.image_path import ImagePath

VOCABULARY = 30_522
"""Of BERT; the words of the texts are in it, and the rest has names only."""

SHORT_S = 0.3
"""For which each number of rows is timed; the best one then for as long as is asked."""

Pass = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a model alone does on data that is on the device.

    Attributes:
        rows_per_s: of the plain pass, at the best number of rows.
        best_per_s: the same by the way that a trial found faster, where it did (`worker.embedders.image_path`).
        rows: of that pass.
        flops: of one row, counted by torch; a multiplication and an addition are two.
    """

    rows_per_s: float
    best_per_s: float
    rows: int
    flops: float


@dataclass(frozen=True, slots=True)
class ImageCase:
    """A vision tower of open_clip."""

    name: str

    def spec(self, folder: Path) -> str:
        """In embq."""
        del folder
        return f"open_clip:{self.name}?init=random"

    def forward(self, device: str, dtype: torch.dtype, sizes: Sequence[int], seconds: float) -> Forward:
        """Of images that are decoded, normalised and on the device."""
        model: Any = open_clip.create_model(self.name).to(device=device, dtype=dtype).eval()
        height, width = _pair(model.visual.image_size)

        def encode(numbers: torch.Tensor) -> torch.Tensor:
            vectors: torch.Tensor = model.encode_image(numbers, normalize=False)
            return vectors

        def batch(rows: int) -> torch.Tensor:
            return torch.randn(rows, height, width, 3, device=device, dtype=dtype).permute(0, 3, 1, 2)

        def passes(rows: int) -> Pass:
            numbers = batch(rows).contiguous()
            return lambda: encode(numbers)

        rows, plain = _best(passes, sizes, device, seconds)
        best = plain
        if device.startswith("cuda"):
            path, numbers = ImagePath(model.visual, encode), batch(rows)
            path.try_ways(numbers, compile_s=0.0, model=self.name)
            best = max(best, rows * _per_s(lambda: path(numbers), device, seconds))
        return Forward(rows_per_s=plain, best_per_s=best, rows=rows, flops=_flops(passes(1)))


@dataclass(frozen=True, slots=True)
class TextCase:
    """An encoder with a mean over its states, for texts of `TOKENS` tokens."""

    name: str
    config: PretrainedConfig

    def spec(self, folder: Path) -> str:
        """In embq; the model is written to a folder in `folder`."""
        path = folder / self.name
        if not path.exists():
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                AutoModel.from_config(self.config).save_pretrained(path)
            word_pieces().save_pretrained(path)
        return f"hf:{path}?max_length={TOKENS}"

    def forward(self, device: str, dtype: torch.dtype, sizes: Sequence[int], seconds: float) -> Forward:
        """Of ids that are on the device."""
        trunk: Any = AutoModel.from_config(self.config).to(device=device, dtype=dtype).eval()

        def passes(rows: int) -> Pass:
            ids = torch.randint(5, VOCABULARY, (rows, TOKENS), device=device)
            return lambda: trunk(input_ids=ids).last_hidden_state.float().mean(1)

        rows, plain = _best(passes, sizes, device, seconds)
        return Forward(rows_per_s=plain, best_per_s=plain, rows=rows, flops=_flops(passes(1)))


Case = ImageCase | TextCase

IMAGES = tuple(map(ImageCase, ("ViT-B-32", "ViT-B-16", "ViT-L-14")))

MINILM = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
"""The architecture of all-MiniLM-L6-v2."""

TEXTS = (
    TextCase("MiniLM-L6", MINILM),
    TextCase("DistilBERT", DistilBertConfig()),
    TextCase("BERT-base", BertConfig()),
)

TINY = (
    ImageCase("ViT-S-32-alt"),
    TextCase("tiny", BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)),
)
"""To see on any machine that all of it works."""


def word_pieces() -> PreTrainedTokenizerFast:
    """A tokeniser of BERT's kind and size, for which each of `WORDS` is one token."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    names += [f"[unused{number}]" for number in range(VOCABULARY - len(names))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, mask_token="[MASK]", **named)


@torch.inference_mode()
def measured_peak(device: str, dtype: torch.dtype, side: int, seconds: float) -> float:
    """FLOP per second of a product of square matrices, which is as much as a device does in practice."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * side**3 * _per_s(lambda: one @ other, device, seconds)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


@torch.inference_mode()
def _best(passes: Callable[[int], Pass], sizes: Sequence[int], device: str, seconds: float) -> tuple[int, float]:
    """(rows, rows per second) at the best number of rows of those that fit."""
    speeds = {}
    for rows in sizes:
        try:
            speeds[rows] = rows * _per_s(passes(rows), device, min(seconds, SHORT_S))
        except torch.OutOfMemoryError:
            break
    best = max(speeds, key=lambda rows: speeds[rows])
    return best, best * _per_s(passes(best), device, seconds)


@torch.inference_mode()
def _per_s(run: Pass, device: str, seconds: float) -> float:
    """Passes per second, after one that does not count."""
    run()
    _wait(device)
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        # A GPU is waited for only now and then, so that it is never waited for in vain.
        for _ in range(5 if device.startswith("cuda") else 1):
            run()
            count += 1
        _wait(device)
    return count / (time.perf_counter() - began)


def _flops(run: Pass) -> float:
    # Without gradients torch computes an attention in one step of its own, which its counter does not know.
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
