"""Names of the models of a run, and combinations that are refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.errors import EmbqError, ModelError, UsageError
from embq.core.models import Chunking, ModelConfig, NamedModel
from embq.core.rows.results import embedding_columns
from embq.producer.model_args import asked_models, config_of, split_name

BOTH = ("image", "text")


def config(*texts: str, modalities: tuple[str, ...] = BOTH, chunking: Chunking | None = None) -> ModelConfig:
    return config_of(asked_models(texts), modalities=modalities, precision="fp32", chunking=chunking)


def columns(*texts: str, modalities: tuple[str, ...] = BOTH) -> tuple[str, ...]:
    return embedding_columns(config(*texts, modalities=modalities).output_names)


def refusal(*texts: str, modalities: tuple[str, ...] = BOTH, chunking: Chunking | None = None) -> EmbqError:
    with pytest.raises(EmbqError) as caught:
        config(*texts, modalities=modalities, chunking=chunking)
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("minilm", None, "minilm"),
        ("minilm?batch_size=3", None, "minilm?batch_size=3"),
        ("stub:8?ms_per_sample=2", None, "stub:8?ms_per_sample=2"),
        ("st:./a=b", None, "st:./a=b"),
        ("./a=b", None, "./a=b"),
        ("BAAI/x=minilm", "BAAI/x", "minilm"),
        ("BAAI/x=st:./y", "BAAI/x", "st:./y"),
        ("clip=open_clip:ViT-B-32?init=random", "clip", "open_clip:ViT-B-32?init=random"),
        (" a=minilm ", "a", "minilm"),
        ("=minilm", "", "minilm"),
        ("BAAI/bge-small=st:./bge", "BAAI/bge-small", "st:./bge"),
    ],
)
def test_a_name_stands_before_the_first_equals_sign_of_a_spec(text: str, name: str | None, spec: str) -> None:
    assert split_name(text) == (name, spec)


def test_one_model_is_as_it_always_was() -> None:
    alone = config("stub:8", chunking=Chunking(tokens=20), modalities=("text",))
    assert alone == ModelConfig(
        spec="stub:8", modalities=("text",), precision="fp32", chunking=Chunking(tokens=20), members=()
    )
    assert columns("minilm", modalities=("text",)) == ("embedding",)
    assert columns("stub:8") == ("image_embedding", "text_embedding")
    assert "members" not in alone.describe()
    # Queues of runs that were made before models could be several.
    assert config("stub:8").queue_key == "e455e4cc755c"


def test_several_models_give_columns_under_their_names_for_what_each_embeds() -> None:
    assert columns("clip=open_clip:ViT-B-32/openai", "minilm") == (
        "clip_image_embedding",
        "clip_text_embedding",
        "minilm_embedding",
    )
    assert columns("a=stub:8", "b=stub:4", modalities=("image",)) == ("a_embedding", "b_embedding")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("minilm?batch_size=2", "minilm"),
        ("stub:12", "stub"),
        ("open_clip:ViT-B-32-quickgelu/openai", "vit_b_32_quickgelu"),
        ("open_clip:ViT-S-32-alt?init=random", "vit_s_32_alt"),
        ("open_clip:local-dir:/models/My CLIP/", "my_clip"),
        ("st:BAAI/bge-small-en-v1.5", "bge_small_en_v1_5"),
        ("hf:./7b", "hf_7b"),
    ],
)
def test_a_model_without_a_name_gets_one_from_its_spec(spec: str, name: str) -> None:
    assert asked_models((spec, "other=stub:3"))[0].name == name


def test_names_that_clash_or_cannot_be_columns_are_usage_errors() -> None:
    clash = refusal("stub:8", "stub:4")
    assert isinstance(clash, UsageError)
    assert "--model name1=stub:8 --model name2=stub:4" in clash.next_step
    assert isinstance(refusal("a=stub:8", "a=minilm"), UsageError)
    for name in ("Clip", "", "1a", "a-b", "a b", "a" * 41, "image", "text"):
        assert isinstance(refusal(f"{name}=stub:8", "minilm"), UsageError), name
    assert isinstance(refusal("clip=stub:8"), UsageError)


def test_no_name_can_make_one_column_of_two() -> None:
    """`a` would have the column a_text_embedding as well, and in npy runs both of them the folder a_text_emb."""
    for other in ("a_text=minilm", "atext=minilm", "hf:a-text", "st:./image"):
        said = refusal("a=stub:8", other)
        assert isinstance(said, UsageError), other
        assert "cannot be the name of a model" in said.message


def test_a_model_that_embeds_nothing_of_the_run_is_refused_and_so_is_a_modality_that_no_model_embeds() -> None:
    idle = refusal("clip=open_clip:ViT-B-32/openai", "mini=minilm", modalities=("image",))
    assert isinstance(idle, ModelError)
    assert idle.message.startswith("mini=minilm embeds texts")
    assert "--modality image,text" in idle.next_step
    unseen = refusal("a=minilm", "b=hf:x")
    assert "none of the models embeds images" in unseen.message
    assert isinstance(refusal("a=minilm", "b=resnet"), ModelError)


def test_a_transformers_model_embeds_texts_beside_others_unless_its_spec_says_images() -> None:
    both = ("image", "text")
    clip = "clip=open_clip:ViT-B-32/openai"

    def of(spec: str, modalities: tuple[str, ...] = both) -> tuple[str, ...]:
        return config(clip, f"other=hf:{spec}", modalities=modalities).members[1].modalities

    assert of("x") == of("x?embeds=text") == ("text",)
    assert of("x?embeds=image") == ("image",)
    assert of("x", ("image",)) == ("image",)
    assert of("x", ("text",)) == ("text",)
    for said, modalities in (("image", ("text",)), ("text", ("image",))):
        idle = refusal(clip, f"other=hf:x?embeds={said}", modalities=modalities)
        assert isinstance(idle, ModelError)
        assert f"embeds {said}s" in idle.message
        assert "--modality image,text" in idle.next_step


def test_several_models_do_not_cut_texts() -> None:
    assert (
        "--chunk-tokens"
        in refusal("a=stub:8", "b=stub:4", modalities=("text",), chunking=Chunking(tokens=20)).next_step
    )


def test_a_config_of_several_models_survives_being_written_down() -> None:
    made = config("clip=open_clip:ViT-B-32/openai", "minilm")
    assert ModelConfig.from_description(made.describe()) == made
    assert made.spec == "clip=open_clip:ViT-B-32/openai + minilm=minilm"
    assert made.members[1] == NamedModel(name="minilm", spec="minilm", modalities=("text",))
    others = [config("minilm", "clip=open_clip:ViT-B-32/openai"), config("c=open_clip:ViT-B-32/openai", "minilm")]
    assert len({one.queue_key for one in (made, *others)}) == 3


def test_a_folder_that_is_here_is_kept_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("mine", "what?", "ViT-B-32/openai"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given, kept in (
        ("st:./mine", f"st:{tmp_path}/mine"),
        ("st:mine?prompt_name=query&lora=../nothing", f"st:{tmp_path}/mine?lora=../nothing&prompt_name=query"),
        ("hf:mine?pooling=mean&lora=./mine", f"hf:{tmp_path}/mine?lora={tmp_path}/mine&pooling=mean"),
        ("hf:mine?pooling=mean&lora=./what%3F", f"hf:{tmp_path}/mine?lora=./what%3F&pooling=mean"),
        ("open_clip:local-dir:mine", f"open_clip:local-dir:{tmp_path}/mine"),
        ("open_clip:ViT-B-32/openai", "open_clip:ViT-B-32/openai"),
        ("st:BAAI/bge-small", "st:BAAI/bge-small"),
        ("minilm", "minilm"),
    ):
        assert str(asked_models((given,))[0].spec) == kept
