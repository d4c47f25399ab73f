"""One model of `bench.gpu` without the queue: its forward pass, the embedder's loop, and what the cores prepare for it.

All models have random weights. `alone` runs in a process of its own, so that a fault of the device ends one model.
"""

from __future__ import annotations

import itertools
import os
import tarfile
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedTokenizerFast

from embq.core.errors import EmbqError
from embq.core.models import CPU_DECODES, REFERENCE, ModelConfig
from embq.core.units import Sample
from embq.lab.image_stages import Tried, decode
from embq.worker.embedders.base import PendingVectors
from embq.worker.embedders.device.hardware import free_memory
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.registry import load
from embq.worker.embedders.text import forward
from embq.worker.meter.meter import Throughput
from embq.worker.stages.batching import Batch, Batcher

TOKENS, SHORTEST = 256, 4
"""Tokens of a text: of the longest, and of the shortest of the mixed ones."""
WORDS = ("the", "of", "and", "in", "to", "was", "he", "is", "as", "for", "on", "with", "that", "it", "his", "by", "at")
VOCABULARY = 30_522
"""Vocabulary of BERT; the words of the texts are in it, and the rest has names only."""

SHORT_S = 0.3
"""For which each number of rows is timed; the best one then for as long as is asked."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

Pass = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Scale:
    """Extent of a measurement.

    Attributes:
        pictures: that differ; as many texts.
        image_rows, text_rows: rows of one pass that are tried for the best.
    """

    pictures: int = 2_048
    per_shard: int = 1_024
    run_s: float = 15.0
    forward_s: float = 2.0
    loop_s: float = 3.0
    prepare_s: float = 2.0
    most_rows: int = 400_000
    image_rows: tuple[int, ...] = (128, 256, 512, 1024)
    text_rows: tuple[int, ...] = (64, 128, 256, 512)
    peak_side: int = 8_192


QUICK = Scale(
    pictures=32,
    per_shard=16,
    run_s=0.5,
    forward_s=0.2,
    loop_s=0.2,
    prepare_s=0.2,
    most_rows=64,
    image_rows=(4, 8),
    text_rows=(4, 8),
    peak_side=512,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Speed of a model alone on data that is on the device.

    Attributes:
        rows_per_s: at the best number of rows.
        rows: of that pass.
        flops: of one row, counted by torch; a multiplication and an addition are two.
    """

    rows_per_s: float
    rows: int
    flops: float


@dataclass(frozen=True, slots=True)
class ImageCase:
    """A vision tower of open_clip."""

    name: str
    kind: str = "images"

    def config(self, folder: Path, precision: str) -> ModelConfig:
        """In embq."""
        del folder
        spec = f"open_clip:{self.name}?init=random"
        return ModelConfig(spec=spec, modalities=("image",), precision=precision, decode=CPU_DECODES[0])

    def forward(self, device: str, dtype: torch.dtype, sizes: Sequence[int], seconds: float) -> Forward:
        """Rate for images that are decoded, normalised and on the device."""
        model: Any = open_clip.create_model(self.name).to(device=device, dtype=dtype).eval()
        height, width = _pair(model.visual.image_size)

        def passes(rows: int) -> Pass:
            numbers = torch.randn(rows, 3, height, width, device=device, dtype=dtype)
            return lambda: model.encode_image(numbers, normalize=False)

        return _forward(passes, sizes, device, seconds)


@dataclass(frozen=True, slots=True)
class TextCase:
    """A model with a mean over its states, for texts of `TOKENS` tokens: an architecture of transformers."""

    name: str
    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "texts"

    def weights(self) -> PretrainedConfig:
        """Sizes of the model, for the vocabulary of `word_pieces`. ValueError: this transformers does not know it."""
        return AutoConfig.for_model(self.architecture, vocab_size=VOCABULARY, use_cache=False, **self.settings)

    def config(self, folder: Path, precision: str) -> ModelConfig:
        """In embq; the model is written to a folder in `folder`."""
        path = folder / self.name
        if not path.exists():
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                AutoModel.from_config(self.weights()).save_pretrained(path)
            word_pieces().save_pretrained(path)
        return ModelConfig(
            spec=f"hf:{path}?max_length={TOKENS}", modalities=("text",), precision=precision, decode=REFERENCE
        )

    def forward(self, device: str, dtype: torch.dtype, sizes: Sequence[int], seconds: float) -> Forward:
        """Rate for ids that are on the device."""
        trunk: Any = AutoModel.from_config(self.weights()).to(device=device, dtype=dtype).eval()

        def passes(rows: int) -> Pass:
            ids = torch.randint(5, VOCABULARY, (rows, TOKENS), device=device)
            return lambda: trunk(input_ids=ids).last_hidden_state.float().mean(1)

        return _forward(passes, sizes, device, seconds)


Case = ImageCase | TextCase

MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
"""Sizes of all-MiniLM-L6-v2."""
SPECIAL = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
NOMIC = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
"""Sizes of nomic-embed-text-v1.5."""
GEMMA = {
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 1152,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
}
"""Sizes of EmbeddingGemma-300m."""
QWEN3 = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
}
"""Sizes of Qwen3-Embedding-0.6B."""

CASES: tuple[Case, ...] = (
    ImageCase("ViT-B-32"),
    ImageCase("ViT-B-16"),
    ImageCase("ViT-L-14"),
    TextCase("MiniLM-L6", "bert", MINILM),
    TextCase("DistilBERT", "distilbert"),
    TextCase("BERT-base", "bert"),
    TextCase("ModernBERT-base", "modernbert", SPECIAL),
    TextCase("nomic-v1.5", "nomic_bert", {**NOMIC, **SPECIAL}),
    TextCase("Gemma-300m", "gemma3_text", {**GEMMA, **SPECIAL}),
    TextCase("Qwen3-0.6B", "qwen3", {**QWEN3, **SPECIAL}),
)

TINY: tuple[Case, ...] = (
    ImageCase("ViT-S-32-alt"),
    TextCase(
        "tiny",
        "qwen3",
        {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 64,
            **SPECIAL,
        },
    ),
)
"""To see on any machine that all of it works."""


def ceiling(device: str, precision: str, scale: Scale) -> tuple[str, float]:
    """The device's name, and its FLOP per second in a product of square matrices: as much as it does in practice."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    side = scale.peak_side
    with torch.inference_mode():
        one, other = (torch.randn(side, side, device=device, dtype=DTYPES[precision]) for _ in range(2))
        return name, 2.0 * side**3 * _per_s(lambda: one @ other, device, scale.forward_s)


def alone(
    case: Case, device: str, precision: str, folder: Path, scale: Scale, *, prepares: bool = False
) -> dict[str, Any]:
    """The figures of one model without the queue, and how fast samples are prepared for it where `prepares`.

    Raises RuntimeError, which can be pickled, for each error of the model or the device.
    """
    try:
        rows = scale.image_rows if case.kind == "images" else scale.text_rows
        figures: dict[str, Any] = {"forward": asdict(case.forward(device, DTYPES[precision], rows, scale.forward_s))}
        free_memory(device)
        embedder = loaded(case, device, precision, folder)
        samples = samples_of(case, folder, scale)
        figures["loop"] = loop(embedder, embedder.prepare(samples), scale.loop_s)
        if prepares:
            one, every = (
                decode(embedder, samples, threads, scale.prepare_s, Tried(), _nothing) for threads in (1, cores())
            )
            figures["prepare"] = {
                "per_s_one_thread": round(one.per_s, 1),
                "per_s_one_process": round(every.per_s, 1),
            }
        if case.kind == "texts":
            mixed = embedder.prepare(_texts(mixed_lengths(scale.pictures)))
            figures["loop_mixed"] = loop(embedder, mixed, scale.loop_s)
            if figures["loop_mixed"]["path"] == "flat":
                embedder.flatten(None)
                figures["loop_mixed_padded"] = loop(embedder, mixed, scale.loop_s)
            with unittest.mock.patch.object(forward, "kernels_for_any_shape", return_value=nullcontext()):
                figures["loop_mixed_cudnn"] = loop(embedder, mixed, scale.loop_s)
    except (RuntimeError, ValueError, EmbqError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}"[:2000]) from None
    return figures


def prepare_alone(meet: Any, case: Case, folder: Path, scale: Scale) -> float:
    """Samples that one thread of this process prepares per second while others do the same: they meet before."""
    torch.set_num_threads(1)
    embedder = load(case.config(folder, "fp32"), "cpu")
    samples = samples_of(case, folder, scale)
    embedder.prepare(samples[:1])
    meet.wait()
    return decode(embedder, samples, 1, scale.prepare_s, Tried(), _nothing).per_s


def loaded(case: Case, device: str, precision: str, folder: Path) -> Any:
    """The embedder, tuned as in a worker process."""
    config = case.config(folder, precision)
    embedder = load(config, device)
    tune(embedder, config, device=device)
    return embedder


def loop(embedder: Any, prepared: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Rows and tokens per second of the embedder's passes over prepared samples, cut and begun as in a worker."""
    throughput = Throughput()
    batcher = Batcher(embedder, throughput)
    turns = itertools.cycle(prepared)
    flying: list[Any] = []
    rows = tokens = 0
    dict(embedder.embed(prepared[:2]))
    began, since = time.perf_counter(), time.monotonic()
    while not rows or time.perf_counter() - began < seconds:
        some = list(itertools.islice(turns, max(embedder.window, embedder.batch_size)))
        batcher.add(Batch(some, some, some, [embedder.length(row) for row in some]))
        for batch in itertools.chain.from_iterable(_windows(batcher)):
            vectors = embedder.embed(batch.prepared)
            flying.append(vectors)
            while len(flying) > (vectors.ahead if isinstance(vectors, PendingVectors) else 0):
                dict(flying.pop(0))
            lengths = sum(batch.tokens)
            throughput.batch_done(len(batch), lengths, since=since)
            rows, tokens = rows + len(batch), tokens + lengths
    for vectors in flying:
        dict(vectors)
    taken = time.perf_counter() - began
    path = "flat" if embedder.cost is sum else "padded"
    return {"rows_per_s": round(rows / taken, 1), "tokens_per_s": round(tokens / taken), "path": path}


def _windows(batcher: Batcher) -> Iterator[Iterator[Batch]]:
    while len(batcher):
        yield batcher.batches()


def samples_of(case: Case, folder: Path, scale: Scale) -> list[Sample]:
    """The pictures in `folder`, or texts of `TOKENS` tokens."""
    if case.kind == "texts":
        return _texts([TOKENS] * scale.pictures)
    images = []
    for path in sorted((folder / "pictures").iterdir()):
        with tarfile.open(path) as shard:
            images += [taken.read() for member in shard if (taken := shard.extractfile(member))]
    return [Sample(ordinal=number, key=str(number), image=image) for number, image in enumerate(images)]


def _texts(lengths: Sequence[int]) -> list[Sample]:
    return [Sample(ordinal=number, key=str(number), text=text) for number, text in enumerate(texts_of(lengths))]


def mixed_lengths(count: int) -> list[int]:
    """Lengths of so many texts, in tokens: short ones are many, long ones hold most tokens."""
    lengths = np.random.default_rng(0).lognormal(4.0, 0.9, size=count)
    return np.clip(lengths, SHORTEST, TOKENS).astype(int).tolist()


def texts_of(lengths: Sequence[int]) -> list[str]:
    """Texts of so many tokens, special ones included: each word is one token of `word_pieces`."""
    random = np.random.default_rng(1)
    return [" ".join(random.choice(WORDS, size=max(1, length - 2))) for length in lengths]


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


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _forward(passes: Callable[[int], Pass], sizes: Sequence[int], device: str, seconds: float) -> Forward:
    """At the best number of rows of those that fit; the error of the first where none fits."""
    # Without gradients, and by some kernels, torch computes an attention in a step that its counter does not know.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        passes(1)()
    speeds: dict[int, float] = {}
    # Only one row has gradients: their state of a full batch takes more memory than there is.
    with torch.inference_mode():
        for rows in sizes:
            try:
                speeds[rows] = rows * _per_s(passes(rows), device, min(seconds, SHORT_S))
            except torch.OutOfMemoryError:
                if not speeds:
                    raise
                break
        best = max(speeds, key=lambda rows: speeds[rows])
        rate = best * _per_s(passes(best), device, seconds)
    return Forward(rows_per_s=round(rate, 1), rows=best, flops=float(counter.get_total_flops()))


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


def _pair(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _nothing() -> None:
    """A heartbeat that `decode` calls now and then."""
