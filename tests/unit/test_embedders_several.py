"""Several models in one pass: one decode for all, the vectors of each as if it were alone, one failure for a sample."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import ModelError, SampleError
from embq.core.models import Chunking, ModelConfig
from embq.core.units import Sample
from embq.producer.model_args import asked_models, config_of
from embq.worker.embedders.base import Embedder, Truncated
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.multi_model import MultiModelEmbedder, NamedEmbedder
from embq.worker.embedders.registry import load
from tests.contract.test_embedders import make_clip
from tests.support.lazy import lazy
from tests.support.picture_files import encoded

torch = lazy("torch")


BOTH = ("image", "text")


def config(*texts: str, modalities: tuple[str, ...] = BOTH) -> ModelConfig:
    return config_of(asked_models(texts), modalities=modalities, precision="fp32", chunking=None)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NamedEmbedder]:
    """Two small image and text models that see pictures of other sizes, one of texts, and a stub."""
    root = tmp_path_factory.mktemp("clips")
    small, large = make_clip(root / "small", seed=1, image_size=32), make_clip(root / "large", seed=2, image_size=64)
    named = [f"small=open_clip:local-dir:{small}", f"large=open_clip:local-dir:{large}", "mini=minilm", "stub=stub:8"]
    return {
        member.name: NamedEmbedder(
            member, load(ModelConfig(spec=member.spec, modalities=member.modalities, precision="fp32"), "cpu")
        )
        for member in config(*named).members
    }


def together(members: Iterable[NamedEmbedder]) -> MultiModelEmbedder:
    chosen = list(members)
    return MultiModelEmbedder(
        chosen, ModelConfig.several([member.named for member in chosen], modalities=BOTH, precision="fp32")
    )


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The encoded images that Pillow was asked to open, in order."""
    seen: list[bytes] = []
    original: Callable[..., Image.Image] = Image.open

    def counting(file: io.BytesIO, *arguments: object, **options: object) -> Image.Image:
        seen.append(file.getvalue())
        return original(file, *arguments, **options)

    monkeypatch.setattr(Image, "open", counting)
    return seen


def odd_pictures() -> Iterator[bytes]:
    """An image of every mode that open_clip takes, and one large enough for a scaled decode to be tempting."""
    random = np.random.default_rng(3)
    for mode, kind, size in (
        ("RGB", "JPEG", (640, 480)),
        ("L", "JPEG", (90, 70)),
        ("CMYK", "JPEG", (90, 70)),
        ("RGBA", "PNG", (64, 64)),
        ("LA", "PNG", (50, 81)),
        ("P", "PNG", (70, 90)),
        ("1", "PNG", (40, 40)),
        ("RGB", "WEBP", (101, 33)),
        ("P", "GIF", (80, 60)),
    ):
        pixels = random.integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
        picture = Image.fromarray(pixels).convert(mode)
        options = {"transparency": 3} if (mode, kind) == ("P", "PNG") else {}
        yield encoded(picture, kind, **options)


def samples_of(pictures: Iterator[bytes]) -> list[Sample]:
    return [
        Sample(ordinal=n, key=str(n), image=data, text=f"picture {n} " + "of noise " * n)
        for n, data in enumerate(pictures)
    ]


def embedded(embedder: Embedder, samples: list[Sample]) -> dict[str, np.ndarray]:
    prepared = embedder.prepare(samples)
    assert not [answer for answer in prepared if isinstance(answer, SampleError)]
    return embedder.embed(prepared)


def test_every_image_is_decoded_once_however_many_models_look_at_it(
    alone: dict[str, NamedEmbedder], decodes: list[bytes]
) -> None:
    samples = samples_of(odd_pictures())
    together(alone.values()).prepare(samples)
    assert decodes == [sample.image for sample in samples]

    decodes.clear()
    for member in alone.values():
        member.embedder.prepare(samples)
    assert len(decodes) == 2 * len(samples), "both models that look at images decode them when they are alone"


@pytest.mark.parametrize("turn", [1, -1])
def test_every_model_gives_the_bits_that_it_gives_alone(alone: dict[str, NamedEmbedder], turn: int) -> None:
    samples = samples_of(odd_pictures())
    members = list(alone.values())[::turn]
    found = embedded(together(members), samples)
    assert list(found) == [output.name for member in members for output in member.named.outputs.values()]
    for member in members:
        for modality, rows in embedded(member.embedder, samples).items():
            # The same batch on both sides, so that nothing may differ.
            np.testing.assert_array_equal(found[member.named.outputs[modality].name], rows)


def test_a_model_of_images_that_embeds_texts_alone_decodes_nothing(
    alone: dict[str, NamedEmbedder], decodes: list[bytes]
) -> None:
    joint = load(config(alone["small"].named.spec, "other=stub:8", modalities=("text",)), "cpu")
    rows = embedded(joint, samples_of(odd_pictures()))
    assert {name: block.shape[1] for name, block in rows.items()} == joint.dims == {"small": 40, "other": 8}
    assert decodes == []


def test_a_sample_that_one_model_cannot_embed_is_one_failure_that_names_the_model(
    alone: dict[str, NamedEmbedder],
) -> None:
    joint = together([alone["mini"], alone["small"], alone["stub"]])
    whole = samples_of(odd_pictures())[0]
    answers = joint.prepare(
        [
            Sample(ordinal=0, key="a", image=b"\xff\xd8\xffnothing", text="a text"),
            Sample(ordinal=1, key="b", image=whole.image),
            Sample(ordinal=2, key="c", image=None, text="a text"),
            Sample(ordinal=3, key="d", image=None, text=" "),
            Sample(ordinal=4, key="e", image=whole.image, text="a", error=("duplicate_key", "twice")),
            whole,
        ]
    )
    failed = [answer for answer in answers if isinstance(answer, SampleError)]
    assert [(answer.code, answer.message.partition(":")[0]) for answer in failed] == [
        ("truncated", "small"),
        ("missing_member", "mini"),
        ("missing_member", "small"),
        ("empty_text", "mini"),
        ("duplicate_key", "twice"),
    ]
    assert not isinstance(answers[-1], SampleError)
    assert {name: len(rows) for name, rows in joint.embed(answers[-1:]).items()} == dict.fromkeys(joint.dims, 1)


def test_a_text_that_one_model_cuts_off_is_told_of_once(alone: dict[str, NamedEmbedder]) -> None:
    picture = next(odd_pictures())
    # 77 tokens are what the image and text model reads, 256 what minilm does.
    texts = ["a word", "word " * 120, "word " * 400]
    samples = [Sample(ordinal=n, key=str(n), image=picture, text=text) for n, text in enumerate(texts)]
    for order in (("mini", "small"), ("small", "mini")):
        prepared = together(alone[name] for name in order).prepare(samples)
        assert [isinstance(one, Truncated) for one in prepared] == [False, True, True], order


def test_the_fingerprint_is_that_of_the_names_and_the_models() -> None:
    def of(*texts: str) -> str:
        return load(config(*texts), "cpu").fingerprint

    one = of("a=stub:8", "b=stub:4")
    assert one == of("a=stub:8?batch_size=3", "b=stub:4")
    others = [of("a=stub:8", "c=stub:4"), of("a=stub:8", "b=stub:5"), of("b=stub:4", "a=stub:8")]
    assert len({one, *others}) == 4
    assert len(one) == 32


def test_a_batch_is_as_large_as_suits_every_model() -> None:
    joint = load(config("a=stub:8?batch_size=7", "b=stub:4?batch_size=5"), "cpu")
    assert joint.batch_size == 5
    assert warm_up(joint, BOTH) >= 0
    assert joint.embed([]).keys() == joint.dims.keys()


def test_several_models_cut_no_texts() -> None:
    made = config("a=stub:8", "b=stub:4", modalities=("text",))
    with pytest.raises(ModelError) as caught:
        load(replace(made, chunking=Chunking(tokens=20)), "cpu")
    assert caught.value.code == "no_chunks"


def test_a_model_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(ModelError, match="hf:/no/such"):
        load(config("a=stub:8", "b=hf:/no/such", modalities=("text",)), "cpu")
