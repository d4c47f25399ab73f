"""From the vectors that a model gives to what a unit stores: rows of the run's type, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from core.rows.vectors import Fault, similarities, stored
from core.units import Sample
from worker.work import UnitWork


def store(work: UnitWork, samples: Sequence[Sample], vectors: dict[str, np.ndarray]) -> None:
    """Add the vectors of some samples of a unit to its rows, in the type and length that the run stores; those of which
    one cannot be stored to its failures.

    Args:
        vectors: output -> float32 (len(samples), d).
    """
    rows, model = work.record.rows, work.record.model
    made = [(output, *stored(block, rows)) for output, block in vectors.items()]
    for column, (image, text) in model.compared.items() if rows.similarity else ():
        made.append((column, *similarities(vectors[image], vectors[text])))
    faults: dict[int, Fault] = {}  # of each sample the first
    for name, _, wrong in made:
        faults = (_named(wrong, name) if model.members else wrong) | faults
    kept = {name: values for name, values, _ in made}
    if faults:
        for i, fault in sorted(faults.items()):
            work.add_failure(samples[i], fault.code, fault.message)
        good = [i for i in range(len(samples)) if i not in faults]
        samples = [samples[i] for i in good]
        kept = {name: block[good] for name, block in kept.items()}
    if samples:
        work.add_rows(samples, kept)


def _named(faults: Mapping[int, Fault], name: str) -> dict[int, Fault]:
    """Faults that say whose they are, where there are several models."""
    return {i: replace(fault, message=f"{name}: {fault.message}") for i, fault in faults.items()}
