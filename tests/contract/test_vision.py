"""Images get the vectors of transformers' own model and image processor."""

from __future__ import annotations

import inspect
import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from PIL import Image

from embq.core.errors import ModelError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.image.pixels import Pixels
from embq.worker.embedders.image.processor import SAME, difference, of_image_processor
from embq.worker.embedders.registry import load
from examples.demo.collect import photographs
from tests.contract.test_embedders import make_encoder
from tests.support.lazy import lazy
from tests.support.models.vision import MODELS, SIDE, SQUARE, save_vision
from tests.support.picture_files import encoded

torch = lazy("torch")
transformers = lazy("transformers")


Outputs = Any

TAKEN: dict[str, Callable[[Outputs], Any]] = {
    "vit": lambda given: given.last_hidden_state[:, 0],
    "vit classifier": lambda given: given.last_hidden_state[:, 0],
    "deit": lambda given: given.last_hidden_state[:, 0],
    "clip projection": lambda given: given.image_embeds,
}
"""Kind -> the vector that is documented for it; of all others the pooler's."""

FRACTIONS = ("dinov3",)
"""Kinds whose processors resize fractions: their numbers are not those of whole bytes."""

PHOTOGRAPHS = 8


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    """Photographs of several shapes, some of them gray."""
    found = [data for _, data in photographs(PHOTOGRAPHS, seed=3)]
    assert {Image.open(io.BytesIO(data)).mode for data in found} == {"RGB", "L"}
    return found


def config_of(spec: str, decode: str = "reference", modality: str = "image") -> ModelConfig:
    return ModelConfig(spec=spec, modalities=(modality,), precision="fp32", decode=decode)


def vectors_of(embedder: Any, images: list[bytes]) -> np.ndarray:
    prepared = embedder.prepare([Sample(ordinal=n, key=str(n), image=data) for n, data in enumerate(images)])
    rows: np.ndarray = embedder.embed(prepared)["image"]
    return rows


def given_by_transformers(folder: Path, kind: str, images: list[bytes]) -> tuple[Any, Any]:
    """Outputs of the library's own classes, and the model."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    auto = transformers.CLIPVisionModelWithProjection if kind == "clip projection" else transformers.AutoModel
    model = auto.from_pretrained(folder).eval()
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
    numbers = processor(images=opened, return_tensors="pt")
    with torch.inference_mode():
        given = model.get_image_features(**numbers) if hasattr(model, "get_image_features") else model(**numbers)
    return given, model


def assert_near(rows: np.ndarray, expected: np.ndarray, least: float = 0.9999) -> None:
    cosines = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.mean() >= 0.9999
    assert cosines.min() >= least


@pytest.mark.parametrize("kind", list(MODELS))
def test_photographs_get_the_vectors_of_transformers(kind: str, tmp_path: Path, pictures: list[bytes]) -> None:
    folder = save_vision(tmp_path / "model", kind)
    given, _ = given_by_transformers(folder, kind, pictures)
    expected = TAKEN.get(kind, lambda given: given.pooler_output)(given).flatten(1).numpy()
    exact = vectors_of(load(config_of(f"hf:{folder}"), "cpu"), pictures)
    assert exact.shape == expected.shape
    # The test would say nothing if the model gave every photograph the same vector.
    assert np.ptp(expected, axis=0).max() > 0.3
    if kind not in FRACTIONS:
        np.testing.assert_allclose(exact, expected, atol=1e-5)
    least = 0.999 if kind in FRACTIONS else 0.9999
    assert_near(exact, expected, least)
    assert_near(vectors_of(load(config_of(f"hf:{folder}", "cpu-exact"), "cpu"), pictures), expected, least)


POOLED: list[tuple[str, str, Callable[[Outputs], Any]]] = [
    ("vit", "pooler", lambda given: given.pooler_output),
    ("vit", "mean", lambda given: given.last_hidden_state[:, 1:].mean(1)),
    ("deit", "mean", lambda given: given.last_hidden_state[:, 2:].mean(1)),
    ("dinov2 with registers", "max", lambda given: given.last_hidden_state[:, 5:].amax(1)),
    ("dinov2", "cls", lambda given: given.pooler_output),
    (
        "dinov2",
        "cls+mean",
        lambda given: torch.cat([given.last_hidden_state[:, 0], given.last_hidden_state[:, 1:].mean(1)], 1),
    ),
    ("swin", "mean", lambda given: given.last_hidden_state.mean(1)),
    ("convnext", "mean", lambda given: given.last_hidden_state.mean((2, 3))),
    ("clip", "cls", lambda given: given.last_hidden_state[:, 0]),
    ("siglip", "mean", lambda given: given.last_hidden_state.mean(1)),
]


@pytest.mark.parametrize(("kind", "pooling", "taken"), POOLED, ids=[f"{kind} {name}" for kind, name, _ in POOLED])
def test_another_pooling_is_taken_from_the_same_outputs(
    kind: str, pooling: str, taken: Callable[[Outputs], Any], tmp_path: Path, pictures: list[bytes]
) -> None:
    folder = save_vision(tmp_path / "model", kind)
    given, _ = given_by_transformers(folder, kind, pictures)
    usual, other = (
        load(config_of(f"hf:{folder}{query}"), "cpu") for query in ("", f"?pooling={pooling}&normalize=true")
    )
    assert other.fingerprint != usual.fingerprint
    expected = torch.nn.functional.normalize(taken(given), dim=1).numpy()
    np.testing.assert_allclose(vectors_of(other, pictures), expected, atol=1e-5)


def test_the_pooler_of_the_tower_is_the_vector_before_the_projection(tmp_path: Path, pictures: list[bytes]) -> None:
    folder = save_vision(tmp_path / "model", "clip")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    pooled = vectors_of(load(config_of(f"hf:{folder}?pooling=pooler"), "cpu"), pictures)
    with torch.inference_mode():
        projected = model.visual_projection(torch.from_numpy(pooled)).numpy()
    np.testing.assert_allclose(projected, vectors_of(load(config_of(f"hf:{folder}"), "cpu"), pictures), atol=1e-5)


# --- preprocessing ---

PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "squash": ("ViTImageProcessor", {}),
    "squash to an oblong": ("ViTImageProcessor", {"size": {"height": 96, "width": 64}}),
    "squash by a bicubic filter": ("ViTImageProcessor", {"resample": 3}),
    "squash and cut": ("DeiTImageProcessor", {}),
    "short side and cut": ("CLIPImageProcessor", {}),
    "short side and an odd margin": ("CLIPImageProcessor", {"size": {"shortest_edge": 225}}),
    "an oblong cut": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 64}, "crop_size": {"height": 48, "width": 57}},
    ),
    "filled up": ("CLIPImageProcessor", {"size": {"shortest_edge": 64}, "crop_size": {"height": 81, "width": 81}}),
    "convnext below 384": ("ConvNextImageProcessor", {"size": {"shortest_edge": 224}}),
    "convnext": ("ConvNextImageProcessor", {}),
    "numbers in -1 to 1": ("ViTImageProcessor", {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3}),
    "not rescaled": ("ViTImageProcessor", {"do_rescale": False}),
    "not normalised": ("SiglipImageProcessor", {"do_normalize": False}),
    "one mean for all channels": ("ViTImageProcessor", {"image_mean": 0.4, "image_std": 0.3}),
    "by Pillow": ("CLIPImageProcessorPil", {}),
    "squash by Pillow": ("ViTImageProcessorPil", {}),
}


@pytest.mark.parametrize("kind", list(PROCESSORS))
def test_the_fast_path_has_the_pixels_and_numbers_of_the_processor(kind: str, pictures: list[bytes]) -> None:
    name, settings = PROCESSORS[kind]
    processor = getattr(transformers, name)(**settings)
    preprocess = of_image_processor(processor, "m")
    assert difference(preprocess) <= SAME
    for data in pictures[:4]:
        expected = processor(images=Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")["pixel_values"]
        pixels = Pixels(preprocess, "cpu-exact").of(data)
        numbers = (pixels.astype(np.float64) / 255 - preprocess.mean) / preprocess.std
        worst = np.abs(numbers - expected[0].permute(1, 2, 0).numpy()).max() * min(preprocess.std) * 255
        assert worst <= SAME + 1e-3


def odd_images() -> dict[str, bytes]:
    noise = np.random.default_rng(5).integers(0, 256, (90, 130, 4), dtype=np.uint8)
    rgba = Image.fromarray(noise)
    rgb = rgba.convert("RGB")
    # Half of it in one colour, which the file then says is transparent.
    rgb.paste((10, 20, 30), (0, 0, 65, 90))
    return {
        "RGBA": encoded(rgba, "PNG"),
        "LA": encoded(rgba.convert("LA"), "PNG"),
        "P": encoded(rgb.quantize(17), "PNG"),
        "P with a clear entry": encoded(rgb.quantize(17), "PNG", transparency=3),
        "RGB with a clear colour": encoded(rgb, "PNG", transparency=(10, 20, 30)),
        "L with a clear gray": encoded(rgb.convert("L"), "PNG", transparency=18),
        "1": encoded(rgb.convert("1"), "PNG"),
        "CMYK": encoded(rgb.convert("CMYK"), "JPEG"),
        "turned by EXIF": encoded(
            rgb, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
        ),
    }


@pytest.mark.parametrize("mode", list(odd_images()))
@pytest.mark.parametrize("decode", ["reference", "cpu-exact", "cpu-fast"])
def test_an_image_in_another_mode_has_the_pixels_of_the_processor(mode: str, decode: str) -> None:
    data = odd_images()[mode]
    for name in ("CLIPImageProcessor", "ViTImageProcessor"):
        processor = getattr(transformers, name)()
        image = Image.open(io.BytesIO(data))
        # As the library's pipelines do where the processor does not.
        image = image if processor.do_convert_rgb else image.convert("RGB")
        options = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
        expected = processor(images=image, **options)["pixel_values"][0].permute(1, 2, 0).numpy()
        off = np.abs(Pixels(of_image_processor(processor, "m"), decode).of(data).astype(int) - expected).max()
        assert off <= (SAME if mode == "turned by EXIF" and decode != "reference" else 0)


def test_what_is_clear_is_white_where_the_processor_makes_it_so() -> None:
    if "return_numpy" not in inspect.signature(transformers.image_transforms.convert_to_rgb).parameters:
        pytest.skip("processors of this transformers leave out what is clear, as of 5.17")
    data = odd_images()["RGB with a clear colour"]
    white, dropped = (
        Pixels(of_image_processor(getattr(transformers, name)(), "m"), "cpu-exact").of(data)[100, 20]
        for name in ("SiglipImageProcessor", "ViTImageProcessor")
    )
    assert white.tolist() == [255, 255, 255]
    assert dropped.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"resample": 1},
            marks=pytest.mark.skipif(
                Version(version("torchvision")) < Version("0.27"), reason="transformers takes bicubic for it here"
            ),
        ),
        {"resample": 0},
        {"do_resize": False, "do_center_crop": True, "crop_size": SQUARE},
    ],
)
def test_a_processor_that_the_fast_paths_do_not_match_prepares_images_itself(
    settings: dict[str, Any], tmp_path: Path, pictures: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_vision(tmp_path / "model", "vit", **settings)
    given, _ = given_by_transformers(folder, "vit", pictures)
    with caplog.at_level(logging.WARNING, logger="worker"):
        asked = load(config_of(f"hf:{folder}", "cpu-fast"), "cpu")
    assert any(record.getMessage().startswith("decode_by_reference") for record in caplog.records)
    np.testing.assert_allclose(vectors_of(asked, pictures), given.last_hidden_state[:, 0], atol=1e-5)
    assert asked.fingerprint == load(config_of(f"hf:{folder}"), "cpu").fingerprint


# --- identity ---


def test_the_fingerprint_is_of_weights_settings_and_path_and_not_of_the_folder(tmp_path: Path) -> None:
    def of(name: str, decode: str = "reference", kind: str = "vit", seed: int = 0, **settings: Any) -> str:
        folder = save_vision(tmp_path / name, kind, seed=seed, **settings)
        return load(config_of(f"hf:{folder}", decode), "cpu").fingerprint

    first = of("first")
    assert of("second") == first
    assert len({first, of("third", seed=1), of("fourth", image_mean=[0.4] * 3), of("fifth", "cpu-exact")}) == 4
    # The pooler of a classifier is made up when it is loaded, and nothing reads it.
    assert of("sixth", kind="vit classifier") == of("seventh", kind="vit classifier")


def test_weights_of_the_text_tower_decide_nothing(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "siglip")
    before = load(config_of(f"hf:{folder}"), "cpu").fingerprint
    model = transformers.SiglipModel.from_pretrained(folder)
    torch.nn.init.zeros_(model.text_model.head.weight)
    model.save_pretrained(folder)
    assert load(config_of(f"hf:{folder}"), "cpu").fingerprint == before


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_vectors_are_those_of_the_cpu_by_the_way_that_is_chosen_as_well(
    kind: str, precision: str, tmp_path: Path, pictures: list[bytes]
) -> None:
    spec = f"hf:{save_vision(tmp_path / 'model', kind)}?batch_size={PHOTOGRAPHS}"
    expected = vectors_of(load(config_of(spec, "cpu-exact"), "cpu"), pictures)
    embedder: Any = load(replace(config_of(spec, "cpu-exact"), precision=precision), "cuda")
    # These models are narrow, and their weights large: rounding to bf16 shows more than in trained ones.
    least = 0.9999 if precision == "fp32" else 0.98
    for _ in range(2):
        rows = vectors_of(embedder, pictures)
        cosines = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() >= least
        embedder.choose_variant(compile_s=0)


# --- what is refused ---


def refused(config: ModelConfig, said: str) -> str:
    with pytest.raises(ModelError, match=said) as caught:
        load(config, "cpu")
    assert caught.value.next_step
    return caught.value.next_step


@pytest.mark.parametrize("query", ["", "?pooling=lasttoken", "?max_length=16"])
def test_a_model_of_texts_is_refused_for_images(query: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "encoder", seed=1)
    assert "--modality text" in refused(config_of(f"hf:{folder}{query}"), "does not embed images")


@pytest.mark.parametrize("kind", ["vit", "clip", "siglip tower"])
def test_a_model_of_images_is_refused_for_texts(kind: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", kind)
    assert "--modality image" in refused(config_of(f"hf:{folder}", modality="text"), "does not embed texts alone")


def test_one_model_is_refused_for_images_and_texts(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "clip")
    both = ModelConfig(spec=f"hf:{folder}", modalities=("image", "text"), precision="fp32")
    assert "--modality image" in refused(both, "embeds images or texts, and the run both")
    refused(config_of(f"hf:{folder}?embeds=text"), "the run embeds images")
    refused(config_of(f"hf:{folder}?embeds=sound"), "unknown embeds 'sound'")


@pytest.mark.parametrize(
    ("kind", "query", "said"),
    [
        ("vit", "?pooling=first", "unknown pooling 'first' of images"),
        ("vit", "?pooling=projection", "gives nothing for pooling=projection"),
        ("convnext", "?pooling=cls", "gives nothing for pooling=cls"),
        ("clip", "?pooling=projection%2Bcls", "unknown pooling"),
        ("vit classifier", "?pooling=pooler", "lacks 2 weights"),
        ("vit", "?max_length=3", "unknown parameter 'max_length'"),
    ],
)
def test_a_pooling_that_the_model_does_not_have_is_refused(kind: str, query: str, said: str, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", kind)
    refused(config_of(f"hf:{folder}{query}"), said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_center_crop": False}, "images of several sizes"),
        ({"size": {"shortest_edge": 99}, "crop_size": {"height": 99, "width": 99}}, "doesn't match model"),
    ],
)
def test_a_processor_that_does_not_suit_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(config_of(f"hf:{save_vision(tmp_path / 'model', 'clip', **settings)}"), said)


@pytest.mark.parametrize("name", ["Siglip2ImageProcessor", "VideoMAEImageProcessor", "EfficientNetImageProcessor"])
def test_a_processor_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="prepared in a way that embq does not know"):
        of_image_processor(getattr(transformers, name)(), "m")


def test_a_model_that_hides_patches_at_random_is_refused(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "vit")
    small = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = transformers.ViTMAEConfig(image_size=SIDE, patch_size=16, **size, **small)
    transformers.ViTMAEModel(config).save_pretrained(folder)
    refused(config_of(f"hf:{folder}"), "another vector each time")


def test_a_folder_without_weights_or_processor_is_refused(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "clip tower")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(config_of(f"hf:{folder}"), "lacks 16 weights")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").unlink()
    refused(config_of(f"hf:{folder}"), "cannot be loaded")


def test_images_are_not_computed_in_int8(tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "vit")
    config = ModelConfig(spec=f"hf:{folder}", modalities=("image",), precision="int8")
    refused(config, "only models of texts are computed in int8")
