"""A classifier of `embq train classify` becomes a model of images, whose vectors are what its last layer reads."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from embq.app.cli import entry_point
from embq.core.errors import EmbqError, InputError, ModelError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.training.classify.models import built
from embq.training.data.images import validation_pixels
from embq.training.export.classifier import export_classifier, is_classifier
from embq.worker.embedders.image.decoding import Picture
from embq.worker.embedders.registry import load
from examples.demo.collect import photographs
from tests.training.classifying import TINY, class_shards, trained


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training that is over."""
    root = tmp_path_factory.mktemp("classifier")
    class_shards(root / "shards", [8, 8])
    (ended,) = trained([*TINY, "--epochs=1", f"--output={root / 'out'}", "--", str(root / "shards")], root / "notes")
    assert ended.status == 0, ended.err
    return root / "out"


def pictures() -> list[bytes]:
    return [data for _, data in photographs(6, seed=5)]


def vectors(spec: str, decode: str) -> np.ndarray:
    embedder = load(ModelConfig(spec=spec, modalities=("image",), precision="fp32", decode=decode), "cpu")
    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), image=data) for n, data in enumerate(pictures())])
    return embedder.embed(prepared)["image"]


def by_timm(folder: Path, arch: str, size: int) -> np.ndarray:
    """The input of the last layer, by timm's own transform and model."""
    import timm
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    classes = len(config["label_names"])
    model = built(arch, classes=classes, image_size=size)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config(config["pretrained_cfg"], model=None))
    images = torch.stack([transform(Image.open(io.BytesIO(data)).convert("RGB")) for data in pictures()])
    with torch.inference_mode():
        given: np.ndarray = model.forward_head(model.forward_features(images), pre_logits=True).numpy()
    return given


def test_the_rows_are_what_the_last_layer_reads(classifier: Path, tmp_path: Path) -> None:
    made = export_classifier(classifier, tmp_path / "model")
    expected = by_timm(tmp_path / "model", "timm:test_resnet", 32)
    np.testing.assert_allclose(vectors(made.spec, "reference"), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(vectors(made.spec, "cpu-exact"), expected, atol=0.03)
    config = ModelConfig(spec=made.spec, modalities=("image",), precision="fp32", decode="cpu-exact")
    assert load(config, "cpu").fingerprint == made.fingerprint
    again = export_classifier(classifier / "model.safetensors", tmp_path / "again")
    assert again.fingerprint == made.fingerprint


def test_the_workers_see_the_pixels_that_the_training_was_validated_on(classifier: Path, tmp_path: Path) -> None:
    """32 of 36.57 pixels, which the training rounds to 37 and timm to 36."""
    import timm

    export_classifier(classifier, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["pretrained_cfg"]
    transform = timm.data.create_transform(**timm.data.resolve_data_config(config, model=None))
    for number, data in enumerate(pictures()):
        with Picture(Sample(ordinal=number, key="", image=data)) as picture:
            own = validation_pixels(picture, "", size=32).numpy().astype(int)
        image = Image.open(io.BytesIO(data)).convert("RGB")
        for step in transform.transforms[:-2]:
            image = step(image)
        assert np.abs(own - np.asarray(image).transpose(2, 0, 1)).max() <= 2


@pytest.mark.parametrize(
    "arch", ["test_vit", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("test_convnext", "resnet18"))]
)
def test_other_architectures_of_timm_are_exported(classifier: Path, tmp_path: Path, arch: str) -> None:
    from safetensors.torch import save_file

    size = 48
    described = json.loads((classifier / "model.json").read_text())
    described |= {"arch": f"timm:{arch}"}
    described["preprocessing"]["image_size"] = size
    torch.manual_seed(1)
    model = built(described["arch"], classes=len(described["classes"]), image_size=size)
    (tmp_path / "run").mkdir()
    save_file(model.state_dict(), tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "model.json").write_text(json.dumps(described))
    made = export_classifier(tmp_path / "run", tmp_path / "model")
    expected = by_timm(tmp_path / "model", f"timm:{arch}", size)
    np.testing.assert_allclose(vectors(made.spec, "reference"), expected, rtol=1e-4, atol=1e-5)


def refusal(kind: type[EmbqError], *arguments: Path) -> str:
    with pytest.raises(kind) as caught:
        export_classifier(*arguments)
    assert caught.value.next_step
    return caught.value.message


def test_what_cannot_be_exported_is_told(classifier: Path, tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "model"
    shutil.copytree(classifier, run)
    assert "only the model at the end" in refusal(InputError, next((run / "checkpoints").glob("*.pt")), out)
    kept = (run / "model.json").read_text()
    (run / "model.json").write_text(kept.replace("timm:test_resnet", "torchvision:resnet18"))
    assert "none of torchvision" in refusal(ModelError, run, out)
    (run / "model.json").write_text(kept.replace("timm:test_resnet", "timm:test_vit"))
    assert "are not the weights" in refusal(ModelError, run, out)
    (run / "model.json").unlink()
    assert "is not over" in refusal(InputError, run, out)
    assert not out.exists()


def test_the_verb_finds_out_what_a_folder_is(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry_point.run(["train", "export", str(classifier), str(tmp_path / "model")]) == 0
    assert f"-m hf:{tmp_path}/model" in capsys.readouterr().out
    assert is_classifier(classifier / "checkpoints")
    assert not is_classifier(tmp_path)
    other = str(tmp_path / "other")
    assert entry_point.run(["train", "export", str(classifier / "modle.safetensors"), other]) == 65
    assert "there is no such file or folder" in capsys.readouterr().err
    assert entry_point.run(["train", "export", str(classifier), other, "--model", "ViT-B-32"]) == 2
    assert "--model is for trainings by open_clip" in capsys.readouterr().err
