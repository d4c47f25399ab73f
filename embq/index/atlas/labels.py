"""Labels of clusters: the words that set the captions of a cluster apart from all others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

CAPTIONS = 2_000
"""Captions of each cluster that are looked at: more change no label."""

WORDS = 3
"""Words of a label."""

COMMON, SPREAD = 0.05, 0.5
"""A word in more than COMMON of the captions of SPREAD of the clusters is a word of the language."""

_RUN = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")
"""Scripts that put no spaces between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""


def words(text: str) -> set[str]:
    """The different words of a text, in lower case; of scripts without spaces, pairs of characters."""
    tokens: set[str] = set()
    for run in _RUN.findall(text.casefold()):
        if _UNSPACED.search(run):
            for piece in _UNSPACED.findall(run):
                tokens.update(piece[at : at + 2] for at in range(len(piece) - 1))
        elif len(run) > 2:
            tokens.add(run)
    return tokens


def labels(texts: Sequence[Sequence[str]]) -> list[str]:
    """A label for each cluster, "" for one of whose texts no word is typical.

    Class-based tf-idf: a word counts once for each text. Its weight in a cluster is p log(p / q), where p and q are its
    shares of the cluster's texts and of all; of a single cluster it is p.

    Args:
        texts: of each cluster, or of a sample of it.
    """
    counts = [Counter(word for text in cluster_texts for word in words(text)) for cluster_texts in texts]
    sizes = np.array([max(1, len(cluster_texts)) for cluster_texts in texts], np.float64)
    overall: Counter[str] = Counter()
    spread: Counter[str] = Counter()
    for count, size in zip(counts, sizes, strict=True):
        overall.update(count)
        spread.update(word for word, times in count.items() if times > COMMON * size)
    # With few clusters, half of them may be about one thing.
    most = max(2.0, SPREAD * len(texts))
    cluster_labels = []
    for count, size in zip(counts, sizes, strict=True):
        weights = {
            word: times / size * (np.log(times / size / (overall[word] / sizes.sum())) if len(texts) > 1 else 1.0)
            for word, times in count.items()
            if times > 1 or size < 5
            if spread[word] <= most
        }
        best = sorted(weights, key=lambda word: (-weights[word], word))
        cluster_labels.append(", ".join(_different(best)))
    return cluster_labels


def _different(best: Sequence[str]) -> list[str]:
    """The first WORDS words of which none begins with another: "test, tests" says one thing twice."""
    chosen: list[str] = []
    for word in best:
        if not any(word.startswith(other) or other.startswith(word) for other in chosen):
            chosen.append(word)
        if len(chosen) == WORDS:
            break
    return chosen
