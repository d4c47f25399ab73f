"""The stub: vectors that a verifier can recompute from the bytes alone."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import DeviceFullError, ModelError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from embq.worker.embedders.stub import stub_vector
from tests.support.picture_files import encoded


def stub(spec: str, *modalities: str, precision: str = "fp32") -> ModelConfig:
    return ModelConfig(spec=spec, modalities=modalities or ("text",), precision=precision)


def test_a_vector_can_be_recomputed_from_the_bytes_and_survives_float16() -> None:
    embedder = load(stub("stub:384", "image", "text"), "cpu")
    samples = [Sample(ordinal=n, key=str(n), image=bytes([n]) * n, text=f"text {n}") for n in range(9)]
    vectors = embedder.embed(embedder.prepare(samples))
    for number, sample in enumerate(samples):
        np.testing.assert_array_equal(vectors["image"][number], stub_vector(bytes([number]) * number, 384))
        np.testing.assert_array_equal(vectors["text"][number], stub_vector(f"text {number}".encode(), 384))
        assert sample.ordinal == number
    for rows in vectors.values():
        assert np.array_equal(rows.astype(np.float16).astype(np.float32), rows)
        assert -1 < rows.min() < -0.9
        assert 0.9 < rows.max() < 1
        assert (rows != 0).all()


def test_the_values_never_change_between_versions() -> None:
    assert (stub_vector(b"embq", 4) * 2048).tolist() == [-717, 1863, 1053, -1423]


def test_a_worker_process_that_loads_the_stub_imports_no_library_that_takes_long() -> None:
    code = (
        "import sys, embq.worker.process; "
        "from embq.core.models import ModelConfig; from embq.worker.embedders.registry import load; "
        "load(ModelConfig(spec='stub:8', modalities=('text',), precision='fp32'), 'cpu'); "
        "print({'torch', 'PIL', 'transformers', 'open_clip', 'fsspec', 'pyarrow.compute'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_time_of_a_batch_is_what_the_spec_says() -> None:
    embedder = load(stub("stub:8?ms_per_sample=4&ms_per_batch=20"), "cpu")
    batch = embedder.prepare([Sample(ordinal=n, key=str(n), text="a") for n in range(10)])
    started = time.perf_counter()
    embedder.embed(batch)
    assert time.perf_counter() - started >= 0.060


def test_speed_parameters_do_not_change_the_fingerprint_and_the_dimension_does() -> None:
    fingerprint = load(stub("stub:8"), "cpu").fingerprint
    assert load(stub("stub:8?ms_per_sample=1&batch_size=3"), "cuda").fingerprint == fingerprint
    assert load(stub("stub:9"), "cpu").fingerprint != fingerprint
    assert load(stub("stub:8", precision="bf16"), "cpu").fingerprint != fingerprint
    assert load(stub("stub:8", "image"), "cpu").fingerprint != fingerprint


def test_a_stub_may_stand_for_a_device_with_little_memory() -> None:
    embedder = load(stub("stub:8?max_tokens=6"), "cpu")
    short, long = embedder.prepare([Sample(ordinal=0, key="a", text="a b"), Sample(ordinal=1, key="b", text="a b c")])
    assert len(embedder.embed([short, short, short])["text"]) == 3
    for batch in ([long, short, short], [short] * 4):
        with pytest.raises(DeviceFullError, match="6 padded tokens"):
            embedder.embed(batch)
    assert embedder.fingerprint == load(stub("stub:8"), "cpu").fingerprint


def test_the_batch_size_can_be_set() -> None:
    assert load(stub("stub:8?batch_size=7"), "cpu").batch_size == 7


@pytest.mark.parametrize(
    "query", ["ms_per_sample=fast", "ms_per_sample=-1", "ms_per_batch=inf", "batch_size=0", "batch_size=x", "speed=3"]
)
def test_a_wrong_parameter_is_refused_with_a_next_step(query: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(stub(f"stub:8?{query}"), "cpu")
    assert query.partition("=")[0] in caught.value.message
    assert caught.value.next_step


def test_a_million_samples_take_seconds_not_minutes() -> None:
    embedder = load(stub("stub:384"), "cpu")
    samples = [Sample(ordinal=n, key=str(n), text=f"a caption of usual length, number {n}") for n in range(64)]
    started = time.process_time()
    for _ in range(100):
        embedder.embed(embedder.prepare(samples))
    assert (time.process_time() - started) / 6400 < 60e-6


def test_images_are_decoded_where_the_spec_asks_for_it_and_give_the_same_vectors() -> None:
    good = encoded(Image.new("RGB", (4, 4), (9, 99, 200)), "JPEG")
    cut, none = good[:-20], b"no image"
    samples = [Sample(ordinal=n, key=str(n), image=data) for n, data in enumerate((good, cut, none))]
    looking, plain = load(stub("stub:8?decode=1", "image"), "cpu"), load(stub("stub:8", "image"), "cpu")

    prepared = looking.prepare(samples)

    assert [getattr(one, "code", "") for one in prepared] == ["", "truncated", "unidentified"]
    same = plain.embed(plain.prepare(samples[:1]))
    np.testing.assert_array_equal(looking.embed(prepared[:1])["image"], same["image"])
    assert looking.fingerprint == plain.fingerprint
    with pytest.raises(ModelError, match="unknown decode"):
        load(stub("stub:8?decode=2", "image"), "cpu")


def test_a_simulated_device_takes_as_much_longer_as_it_is_slower() -> None:
    waited = []
    for device in ("sim:10", "sim:2.5"):
        embedder = load(stub("stub:8?ms_per_token=20"), device)
        batch = embedder.prepare([Sample(ordinal=0, key="a", text="five words of a text")])
        assert [embedder.length(ready) for ready in batch] == [5]
        began = time.monotonic()
        embedder.embed(batch)
        waited.append(time.monotonic() - began)
    assert waited[0] >= 0.01
    assert waited[1] >= 0.04
