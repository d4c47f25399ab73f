"""Constants of `embq plan`: measured ones with their sources, and published figures of cards."""

from __future__ import annotations

from typing import NamedTuple

MEASURED = {
    # The broker: ms of CPU of an operation beside 1,000 devices, and of a unit; bytes.
    "report_ms": (0.025, "fleet.json:growth/1000/report/broker_ms"),
    "beat_ms": (0.029, "fleet.json:growth/1000/beat/broker_ms"),
    "look_ms": (0.04, "fleet.json:growth/1000/look/broker_ms"),
    "tick_ms": (0.816, "fleet.json:growth/1000/tick/broker_ms"),
    "unit_ms": (0.61, "fleet.json:one_text/broker"),
    "looks_per_unit": (3.54, "fleet.json:rows/2/looks_per_unit"),
    # The simulated thousand took more than the sum of its operations: their quotient scales every plan.
    "simulated_share": (0.231, "fleet.json:rows/2/broker_share"),
    "computed_share": (0.122, "fleet.json:computed_share"),
    "waiting_unit_bytes": (2.67, "enqueue.json:rows/0/broker_bytes_per_unit"),
    "leased_unit_bytes": (1_648, "sizing.json:broker/hinted_unit_bytes"),
    "worker_bytes": (2_040, "sizing.json:broker/further_worker_bytes"),
    # CPU of a worker: us for an image of this size in bytes; cores at a rate of texts of 256 tokens.
    "image_us": (1_354, "image_feeding.json:rows/1/cpu_us/decode"),
    "image_bytes": (45_314, "images.json:sets/1/bytes_each"),
    "text_cores": (8.07, "gpu_profile_text.json:runs/0/process/cores"),
    "texts_per_s": (12_645.4, "gpu_profile_text.json:runs/0/rows_per_s"),
    # A row of `NUMBER_BYTES` of numbers, sent and stored; rows that a writer writes, or ms for a unit of a worker's.
    "sent_bytes": (1_563, "sizing.json:row_bytes/6/bytes_per_row"),
    "parquet_part_ms": (1.511, "storing.json:units/4/ms_per_unit"),
    "arrow_part_ms": (1.615, "storing.json:units/5/ms_per_unit"),
}
for at, (name, stored_bytes, rows_per_s) in enumerate(
    (("parquet", 1_544, 69_115), ("arrow", 1_628, 109_590), ("hdf5", 1_691, 141_899), ("npy", 1_552, 136_268))
):
    MEASURED[f"{name}_bytes"] = (stored_bytes, f"storing.json:sustained/{at}/bytes_per_row")
    MEASURED[f"{name}_rows_per_s"] = (rows_per_s, f"storing.json:sustained/{at}/rows_per_s")
"""Name -> value, and FILE:PATH of it: a file in bench/results, and the way to the value in its `figures`."""
NUMBER_BYTES, TEXT_TOKENS = 1_536, 256


class Reference(NamedTuple):
    """Rows per second of a model on one H100 in bf16 that never waits, its source, and FLOP of a sample.

    Texts have `TEXT_TOKENS`.
    """

    model: str
    modality: str
    dims: int
    flop: float
    rows_per_s: float
    source: str


REFERENCES = tuple(
    Reference(model, modality, dims, flop, rate, f"{file}:models/{model}/{what}/rows_per_s")
    for model, modality, dims, flop, rate, file, what in (
        ("ViT-B-32", "image", 512, 8_817_623_040, 30_516, "gpu.json", "loop"),
        ("ViT-L-14", "image", 768, 162_025_537_536, 2_606.4, "gpu_without_native.json", "run"),
        ("DistilBERT", "text", 768, 22_951_231_488, 8_547.1, "gpu_texts.json", "run"),
        ("nomic-v1.5", "text", 768, 60_397_993_984, 3_308.7, "gpu_texts.json", "run"),
    )
)


def value(name: str) -> float:
    """Value of a measured constant."""
    return MEASURED[name][0]


def files(*names: str) -> str:
    """The files that constants are from."""
    return ", ".join(dict.fromkeys(file_of(MEASURED[name][1]) for name in names))


def file_of(source: str) -> str:
    """The file of a source."""
    return f"bench/results/{source.partition(':')[0]}"
