"""A command that was written for clip-retrieval, on real inputs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.run.reader import row_tables
from embq.core.run.run_info import WorkerDefaults, load_run
from embq.core.storage.paths import place
from tests.e2e.check import check_complete
from tests.e2e.services import Services
from tests.e2e.session import ended, picture, succeed, write_shards
from tests.support.servers.storage import upload

DIM = 16

TUTORIAL = (
    "--input_format=webdataset --enable_metadata=True --write_batch_size=1000000 --num_prepro_workers=3 "
    "--batch_size=512 --cache_path=None --enable_wandb=True --distribution_strategy=pyspark"
)
"""Options of docs/distributed_clip_inference.md there."""


@pytest.mark.parametrize("kind", ["files", "webdataset"])
def test_a_caption_key_asks_for_nothing_where_captions_are_off(short_tmp: Path, kind: str) -> None:
    """The command of clip-retrieval's own test, which writes the defaults out."""
    source = short_tmp / "input"
    write_shards(source, 1, 3, captions=False)
    if kind == "files":
        (source / "a.png").write_bytes(picture("a"))
    named = source if kind == "files" else next(source.glob("*.tar"))
    arguments = (
        f"--input_dataset {named} --input_format {kind} --output_folder {short_tmp}/out --enable_text False "
        f"--enable_image True --wds_image_key png;jpg --wds_caption_key txt --clip_model stub:{DIM} --quiet"
    )
    status, _, told = ended("inference", *arguments.split())
    assert status == 0, told
    assert sum(table.num_rows for table in row_tables(place(str(short_tmp / "out")))) == (1 if kind == "files" else 3)


@pytest.mark.parametrize("kind", ["files", pytest.param("webdataset", marks=pytest.mark.slow)])
def test_a_pasted_command_embeds_what_it_names(short_tmp: Path, kind: str) -> None:
    source = short_tmp / "input"
    if kind == "files":
        source.mkdir()
        images = {f"{number}.scan": picture(str(number)) for number in range(20)}
        for name, data in images.items():
            (source / name).write_bytes(data)
            (source / name).with_suffix(".cap").write_text(f"caption of {name.removesuffix('.scan')}")
            (source / name).with_suffix(".jpg").write_bytes(b"no image that was asked for")
        keys = ["--image_key", "scan;tif", "--caption_key=cap"]
        named = str(source)
    else:
        images = write_shards(source, 2, 10, captions=True)
        named = f"{source}/{{00000..00001}}.tar"
        keys = ["--wds_image_key", "png;jpg"]
    arguments = (
        f"--output_folder {short_tmp}/out --input_format {kind} --clip_model stub:{DIM} --enable_image True --quiet"
    )
    status, _, told = ended(
        *("clip-retrieval", "inference"),
        "--input_dataset",
        named,
        *arguments.split(),
        *keys,
        "--enable_metadata=True",
        "--num_prepro_workers=2",
        "--output-format=parquet",
    )
    assert status == 0, told
    expected = {key: (data, f"caption of {key.removesuffix('.scan')}".encode()) for key, data in images.items()}
    units = 1 if kind == "files" else 2
    columns = ("image_embedding", "text_embedding")
    check_complete(short_tmp / "out", expected, units=units, dim=DIM, columns=columns)
    succeed("verify", short_tmp / "out")


@pytest.mark.slow
def test_the_shortest_command_of_their_readme_runs(short_tmp: Path) -> None:
    """Given a folder without captions, images alone are embedded, in their layout."""
    for number in range(3):
        (short_tmp / "image_folder").mkdir(exist_ok=True)
        (short_tmp / "image_folder" / f"{number}.jpg").write_bytes(picture(str(number)))
    arguments = "--input_dataset image_folder --output_folder embeddings_folder --clip_model stub:8 --quiet"
    status, _, told = ended("inference", *arguments.split(), cwd=short_tmp)
    assert status == 0, told
    out = short_tmp / "embeddings_folder"
    assert [path.parent.name for path in sorted(out.glob("*/*.npy"))] == ["img_emb"]
    succeed("verify", out, "--layout", "clip-retrieval")
    status, _, told = ended("clip-retrieval", "back", "--indices_paths", "indices.json")
    assert (status, "Did you mean embq serve?" in told) == (2, True)


@pytest.mark.slow
def test_the_command_of_their_tutorial_for_spark_is_worked_off_by_the_workers(
    s3: str, own_server: EmbeddedServer, short_tmp: Path
) -> None:
    """Shards and output in a bucket; workers take the batch size and the threads of the run."""
    images = write_shards(short_tmp / "shards", 2, 5, captions=True)
    bucket = upload(short_tmp / "shards", short_tmp.name)
    out = f"{bucket}/my_test_embedding2"
    with ExitStack() as stack:
        services = Services(stack, own_server, workers=1)
        services.call(
            *("inference", "--enqueue"),
            f"--input_dataset=pipe:aws s3 cp --quiet {bucket}/{{00000..00001}}.tar -",
            f"--output_folder={out}",
            *TUTORIAL.split(),
            f"--clip_model=stub:{DIM}",
        )
        services.until(lambda: services.status(out)["state"] == "done")
    assert load_run(place(out)).workers == WorkerDefaults(batch_size=512, prepare_threads=3)
    keys = [key for table in row_tables(place(out)) for key in table["key"].to_pylist()]
    assert sorted(keys) == sorted(images)
