"""Cache of models whose vectors without torch were verified against the library, with their fingerprints.

A fingerprint hashes what a library makes of a folder, which takes as long as loading it. So a model is loaded once;
both implementations embed some texts, and where they agree, a note keeps the fingerprint. Its name hashes what
identifies the files: name, size and time of each, and the content of all but the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from embq.core.errors import OutputError, SampleError
from embq.core.models import ModelConfig, ModelSpec
from embq.core.settings import cache_folder
from embq.core.storage.durable import overwrite
from embq.core.units import content_hash
from embq.worker.embedders.query.sentence import LightSentence

NOTE_VERSION = 1
"""Goes up when `LightSentence` computes in another way."""

CLOSE = 1e-5
"""Most by which a number of a vector may differ, for vectors of length 1; longer ones may differ by more."""

TEXTS = (
    "a",
    "How do I run several things at the same time?",
    "Straße, naïve café, Ελληνικά, русский текст, 漢字かな交じり文, العربية, עברית, हिन्दी, emoji 🙂🚀",
    "  white\tspace \n\n at all ends and a zero\u200bwidth one  ",
    "special [CLS] words [SEP] of [MASK] tokenisers </s> <s> [PAD]",
    "def mean(values):\n    return sum(values) / len(values)  # 12.5 % of 3,481 @ x_1",
    "a text that is longer than any model of this kind reads, " * 200,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 8,
)
"""Texts that both implementations embed."""

READ_WHOLE = (".json", ".txt")
"""Files that are small and may be written anew with the same size at the same time, as a test does."""

NOT_COUNTED = ("batch_size", "tokens")
"""Parameters of a spec that change no vector."""


def note_path(folder: Path, rows: ModelConfig, spec: ModelSpec) -> Path:
    """Path of the note for the model of a folder, with its present files.

    Args:
        rows: the config whose fingerprint is noted.
        spec: that of the query, with its prompt.

    Raises OSError if the folder cannot be read.
    """
    files = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.is_file():
            status = path.stat()
            content = path.read_text("latin-1") if path.suffix in READ_WHOLE else ""
            files.append([str(path.relative_to(folder)), status.st_size, status.st_mtime_ns, status.st_ino, content])
    specs = [[pair for pair in own.params if pair[0] not in NOT_COUNTED] for own in (ModelSpec.parse(rows.spec), spec)]
    described = {name: value for name, value in rows.describe().items() if name != "spec"}
    name = content_hash([NOTE_VERSION, str(folder.resolve()), files, described, specs])
    return cache_folder() / "models" / f"{name[:32]}.json"


def read_note(note: Path) -> str | None:
    """The fingerprint of a note; None if there is none."""
    try:
        return str(json.loads(note.read_bytes())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prove(light: LightSentence, embed: Callable[[str], np.ndarray], note: Path, fingerprint: str) -> bool:
    """True if both ways give the same vectors; then it is noted, if the cache folder can be written.

    Args:
        embed: the library's way.
        fingerprint: that of the config of `note_path`.
    """
    for text in TEXTS:
        try:
            expected, given = embed(text), light.text(text)
        except SampleError:
            return False
        scale = max(1.0, float(np.linalg.norm(expected)))
        if expected.shape != given.shape or not np.abs(expected - given).max() <= CLOSE * scale:
            return False
    with suppress(OSError, OutputError):
        note.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"fingerprint": fingerprint}).encode()
        overwrite(note, content)
    return True
