"""One run with several models: the row of a sample holds what each of them gives, or the sample is one failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from tests.contract.test_embedders import a_jpeg, make_clip
from tests.e2e.check import read_output
from tests.e2e.session import ended, write_tar
from tests.support.models.vision import save_vision

pytest.importorskip("torch")

SAMPLES = 24
DEADLINE_S = 400.0
TOLERANCE = 1e-5
"""Change by rounding that batches of another size may make; the vectors have length 1."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_joint_run_holds_the_vectors_that_each_model_gives_alone(short_tmp: Path) -> None:
    random = np.random.default_rng(0)
    samples = [
        Sample(ordinal=n, key=f"{n:03d}", image=a_jpeg(random), text=f"A caption, {'very ' * n}long.")
        for n in range(SAMPLES)
    ]
    samples[3] = replace(samples[3], image=(samples[3].image or b"")[:200])
    shard, root = short_tmp / "shard.tar", short_tmp / "out"
    write_tar(shard, [m for s in samples for m in ((f"{s.key}.jpg", s.image), (f"{s.key}.txt", s.text.encode()))])
    clip = f"open_clip:local-dir:{make_clip(short_tmp / 'clip', seed=3)}"
    dino = f"hf:{save_vision(short_tmp / 'dino', 'dinov2')}?embeds=image&normalize=true"
    named = ("-m", f"clip={clip}", "-m", f"dino={dino}", "-m", "mini=minilm")
    models = (*named, "--modality", "image,text", "--dtype", "float32")
    assert ended("run", shard, "-o", root, *models, "--quiet", deadline_s=DEADLINE_S)[0] == 3

    output = read_output(root)
    assert output.rows is not None
    # What cannot be decoded has no row, although its text alone could be embedded.
    assert [(key, code) for _, _, key, code in output.failures] == [("003", "truncated")]
    good = [sample for sample in samples if sample.key != "003"]
    assert sorted(output.keys) == [sample.key for sample in good]
    order = np.argsort(output.keys)
    for prefix, spec, modalities in (
        ("clip_", clip, ("image", "text")),
        ("dino", dino, ("image",)),
        ("mini", "minilm", ("text",)),
    ):
        decode = "cpu-exact" if "image" in modalities else "reference"
        alone = load(ModelConfig(spec=spec, modalities=modalities, precision="fp32", decode=decode), "cpu")
        for modality, expected in alone.embed(alone.prepare(good)).items():
            column = f"{prefix}{modality if len(modalities) > 1 else ''}_embedding"
            vectors = np.array(output.rows[column].to_pylist())[order]
            np.testing.assert_allclose(vectors, expected, atol=TOLERANCE, err_msg=column)
            assert np.ptp(expected, axis=0).max() > 100 * TOLERANCE, "one vector for all samples would show nothing"
