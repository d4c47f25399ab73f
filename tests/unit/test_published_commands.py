"""Command lines of clip-retrieval as its documentation and its users publish them, as embq translates them."""

from __future__ import annotations

import re
import shlex
from typing import Any

import click
import pytest

from embq.app.cli.entry_point import cli
from embq.app.cli.run_options import request_from
from embq.compat.clip_retrieval import index
from embq.core.errors import EmbqError

INFERENCE: dict[str, tuple[str, dict[str, Any]]] = {
    "README": (
        "--input_dataset image_folder --output_folder embeddings_folder",
        {"inputs": ("image_folder",), "output": "embeddings_folder"},
    ),
    "README, s3": (
        '--input_dataset "pipe:aws s3 cp --quiet s3://myfolder/webdataset/{00000..00010}.tar -" '
        '--output_folder "s3://myfolder/embeddings" --input_format webdataset',
        {
            "inputs": ("s3://myfolder/webdataset/{00000..00010}.tar",),
            "output": "s3://myfolder/embeddings",
        },
    ),
    "docs/distributed_clip_inference, with a model that exists": (
        '--input_dataset="pipe:aws s3 cp --quiet s3://laion-us-east-1/laion-data/laion2B-data/{000000..231349}.tar -" '
        '--output_folder="s3://laion-us-east-1/my_test_embedding2" --input_format="webdataset" --enable_metadata=True '
        "--write_batch_size=1000000 --num_prepro_workers=8 --batch_size=512 --cache_path=None --enable_wandb=True "
        '--distribution_strategy="pyspark" --clip_model="ViT-B/16"',
        {
            "inputs": ("s3://laion-us-east-1/laion-data/laion2B-data/{000000..231349}.tar",),
            "output": "s3://laion-us-east-1/my_test_embedding2",
            "models": ("open_clip:ViT-B-16-quickgelu/openai",),
            "metadata": ("*",),
            "batch_size": 512,
            "threads": 8,
        },
    ),
    "getting started notebook": (
        " --input_dataset image_folder --output_folder embedding_folder",
        {"output": "embedding_folder"},
    ),
    "end2end": (
        "--input_dataset=images/{00000..00001}.tar --output_folder=embeddings --input_format=webdataset "
        "--enable_metadata=True --write_batch_size=100000 --batch_size=512 --cache_path=None",
        {"part_rows": 100_000, "metadata": ("*",), "batch_size": 512},
    ),
    "laion-prepro, laion400m": (
        '--input_dataset="http://the-eye.eu/eleuther_staging/cah/releases/laion400m/{00000..41455}.tar" '
        '--output_folder="/media/hd/testing/cah400M_embs" --input_format "webdataset" --enable_metadata=True '
        "--write_batch_size=1000000 --batch_size=512 --cache_path=None --num_prepro_workers=8",
        {
            "inputs": ("http://the-eye.eu/eleuther_staging/cah/releases/laion400m/{00000..41455}.tar",),
            "output": "/media/hd/testing/cah400M_embs",
            "metadata": ("*",),
            "batch_size": 512,
            "threads": 8,
        },
    ),
    "issue 153": (
        "--input_dataset /root/try_data/data0601/train-{0001..0002}.tar --output_folder /root/try_data/npy0602 "
        "--input_format webdataset --enable_text False",
        {"modalities": ("image",), "as_held": False},
    ),
    "a project of cats": (
        "--input_dataset img --output_folder embeddings --enable_wandb=True --enable_text=False",
        {"modalities": ("image",), "as_held": False},
    ),
    "a data set with captions": (
        '--input_dataset="file:///home/datasets/laion_aesthetics_65p_wds/{00000..00061}.tar" '
        "--output_folder=/home/datasets/laion_aesthetics_65p_embeds_v3 --input_format=webdataset --batch_size=32 "
        "--num_prepro_workers=1 --enable_text=True --enable_image=True --enable_metadata=True --wds_image_key=jpg "
        '--wds_caption_key=txt --clip_model="open_clip:ViT-B-32-quickgelu/laion400m_e32" --use_jit=False '
        "--wds_number_file_per_input_file=8192 --output_partition_count=62",
        {
            "inputs": ("/home/datasets/laion_aesthetics_65p_wds/{00000..00061}.tar",),
            "models": ("open_clip:ViT-B-32-quickgelu/laion400m_e32",),
            "as_held": False,
            "metadata": ("*",),
            "batch_size": 32,
            "threads": 1,
        },
    ),
    "images by another model": (
        '--input_dataset "data/textvqa/train_images" --output_folder embeddings_folder/textvqa '
        "--clip_model ViT-L/14@336px",
        {"models": ("open_clip:ViT-L-14-336-quickgelu/openai",)},
    ),
    "every switch": (
        '--input_dataset "dataset" --output_folder "embeddings" --input_format files --num_prepro_workers 12 '
        '--enable_image True --enable_text False --enable_metadata False --clip_model "ViT-L/14" --use_jit False',
        {
            "models": ("open_clip:ViT-L-14-quickgelu/openai",),
            "modalities": ("image",),
            "as_held": False,
            "threads": 12,
            "kind": "files",
        },
    ),
    "its cache": (
        '--input_dataset="laion/{00000..00012}.tar" --output_folder="embeddings/ViT-H-14" --input_format="webdataset" '
        '--cache_path="/scratch/cache" --clip_model="open_clip:ViT-H-14/laion2b_s32b_b79k" '
        '--clip_cache_path="/scratch/cache" --enable_metadata=True',
        {"models": ("open_clip:ViT-H-14/laion2b_s32b_b79k",), "metadata": ("*",)},
    ),
    "without captions, and by flags of Fire": (
        "--input-dataset=img --output-folder=out --noenable_text --use_mclip=False --noenable_wandb",
        {"modalities": ("image",), "as_held": False},
    ),
}
"""Origin -> arguments after `clip-retrieval inference`, and the request that they make."""

REFUSED = {
    "docs/distributed_clip_inference": (
        '--input_dataset="pipe:aws s3 cp --quiet s3://laion-us-east-1/laion-data/{000000..231349}.tar -" '
        '--output_folder="s3://laion-us-east-1/e" --clip_model="ViT-B/14"',
        "use one of RN50, ",
    ),
    "README, hdfs": (
        '--input_dataset "pipe:hdfs dfs -cat /myfolder/webdataset/{00000..00010}.tar" '
        '--output_folder "hdfs://myfolder/embeddings" --input_format webdataset',
        "s3://BUCKET/PREFIX",
    ),
    "tests/test_inference.sh": (
        '--input_dataset="http://the-eye.eu/laion400m/{00000..01000}.tar" --output_folder="/tmp/folder" '
        '--input_format "webdataset" --subset_size=100000 --enable_metadata=True',
        "--limit N",
    ),
    "README, inference.worker": (
        '--tasks="[0]" --input_dataset="input/folder/{000000..000100}.tar" --output_folder="example/path" '
        '--input_format="webdataset" --output_partition_count="1"',
        "workers take what is left to do",
    ),
    "weights of another library": (
        "--input_dataset=img --output_folder=out --clip_model=hf_clip:patrickjohncyh/fashion-clip",
        "open_clip:ARCH/TAG",
    ),
    "a multilingual model": ("--input_dataset=img --output_folder=out --use_mclip True", "st:MULTILINGUAL-MODEL"),
}
"""Origin -> arguments that are refused by name, and a part of the next step."""


INDEX: dict[str, tuple[str, dict[str, Any]]] = {
    "README": (
        "--embeddings_folder embeddings_folder --index_folder index_folder",
        {"embeddings_folder": "embeddings_folder", "index_folder": "index_folder"},
    ),
    "README, options": (
        '--embeddings_folder e --index_folder i --max_index_memory_usage "16G" --current_memory_available 24G '
        '--image_subfolder "img_emb" --text_subfolder "text_emb" --copy_metadata True --nb_cores 8',
        {"max_index_memory_usage": "16G", "current_memory_available": "24G", "nb_cores": 8},
    ),
    "README of 2021": (
        "--input_folder embeddings_folder --output_folder index_folder",
        {"embeddings_folder": "embeddings_folder", "index_folder": "index_folder"},
    ),
    "getting started notebook": (
        "--embeddings_folder=embedding_folder --index_folder=index_folder",
        {"embeddings_folder": "embedding_folder"},
    ),
    "tests/test_index.sh": (
        "--embeddings_folder=/tmp/folder/ --index_folder=/tmp/my_index",
        {"embeddings_folder": "/tmp/folder/"},
    ),
    "laion-prepro, laion400m": (
        '--embeddings_folder="laion400m-embeddings" --index_folder="index_folder" --max_index_memory_usage="16G" '
        '--current_memory_available="22G" --copy_metadata True',
        {"max_index_memory_usage": "16G", "current_memory_available": "22G"},
    ),
    "without metadata": (
        "--embeddings-folder e --index-folder i --copy_metadata=False --text_subfolder none",
        {"copy_metadata": False, "text_subfolder": "none"},
    ),
}
"""Origin -> arguments after `clip-retrieval index`, and those of the build."""


ROOT = cli.make_context("embq", ["run"])


def parameters(arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """The verb of embq that a command line behind `embq` becomes, and its parameters."""
    found: list[tuple[str, dict[str, Any]]] = []
    for verb in ("run", "enqueue"):
        command = cli.get_command(ROOT, verb)
        assert command is not None
        monkeypatch.setattr(command, "callback", lambda verb=verb, **options: found.append((verb, options)))
    cli.main(shlex.split(arguments), standalone_mode=False)
    return found[0]


@pytest.mark.parametrize("verb", ["clip-retrieval inference", "inference --enqueue"])
@pytest.mark.parametrize("origin", INFERENCE)
def test_a_published_command_is_planned_as_it_stands(origin: str, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected = INFERENCE[origin]
    usual = {
        "models": ("open_clip:ViT-B-32-quickgelu/openai",),
        "modalities": ("image", "text"),
        "as_held": True,
        "format": "npy",
        "part_rows": 1_000_000,
        "kind": "tar" if re.search(r"input_format\W+webdataset", arguments) else "",
        "metadata": (),
        "batch_size": 0,
        "threads": 0,
    }
    ours, options = parameters(f"{verb} {arguments}", monkeypatch)
    assert ours == ("enqueue" if "--enqueue" in verb else "run")
    request = request_from(options["inputs"], options)
    found = {name: getattr(request, name) for name in ("inputs", "models", "modalities", "as_held", "format")}
    found |= {name: options[name] for name in ("batch_size", "threads")}
    found |= {"output": str(request.output), "part_rows": request.part_rows, "kind": request.options.kind}
    found |= {"metadata": request.options.metadata_columns}
    assert usual | expected == {name: found[name] for name in usual | expected}


@pytest.mark.parametrize("origin", REFUSED)
def test_a_published_command_that_embq_cannot_honour_is_told_what_to_do(
    origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, hint = REFUSED[origin]
    with pytest.raises(EmbqError) as refused:
        request_from((), parameters(f"inference {arguments}", monkeypatch)[1])
    assert hint in refused.value.next_step


@pytest.mark.parametrize("origin", INDEX)
def test_a_published_command_for_an_index_is_understood(origin: str) -> None:
    arguments, expected = INDEX[origin]
    usual = {
        "image_subfolder": "img_emb",
        "text_subfolder": "text_emb",
        "copy_metadata": True,
        "max_index_memory_usage": "4G",
        "current_memory_available": "16G",
        "nb_cores": None,
    }
    found = index.make_context("index", shlex.split(arguments), parent=ROOT).params
    assert usual | expected == {name: found[name] for name in usual | expected}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--embeddings_folder e", "Missing option '--index_folder'"),
        ("--embeddings_folder e --index_folder i --index_path k.index", "No such option '--index-path'"),
    ],
)
def test_options_that_do_not_go_with_two_folders_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        index.make_context("index", shlex.split(arguments), parent=ROOT)
    assert message in refused.value.format_message()
