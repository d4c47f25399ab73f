"""The sets of photographs that benchmarks of images are measured on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from bench import pictures
from sources.kinds import SOURCES
from sources.reader_options import ReadOptions


@pytest.mark.parametrize("size", [(256, 256), (512, 384), (1030, 770)])
def test_every_picture_has_the_size_and_no_two_are_the_same(size: tuple[int, int]) -> None:
    made = pictures.jpegs(size, 20, seed=1)
    assert len(set(made)) == len(made) == 20
    for encoded in made:
        image = Image.open(io.BytesIO(encoded))
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", size)
        assert min(high - low for low, high in image.getextrema()) > 20, "a part was left empty, or is one colour"


def test_the_same_seed_gives_the_same_pictures() -> None:
    assert pictures.jpegs((256, 256), 5, seed=3) == pictures.jpegs((256, 256), 5, seed=3)
    assert pictures.jpegs((256, 256), 5, seed=3) != pictures.jpegs((256, 256), 5, seed=4)


def test_pictures_are_photographs_that_compress_as_such() -> None:
    for size, least in (((256, 256), 0.25), ((512, 384), 0.15), ((1024, 768), 0.15)):
        made = pictures.jpegs(size, 16, seed=0)
        assert sum(map(len, made)) / len(made) / (size[0] * size[1]) > least


def test_a_shard_holds_what_was_given_in_order(tmp_path: Path) -> None:
    made = [bytes([n]) * 1000 for n in range(5)]
    paths = pictures.shards(tmp_path / "new", made, per_shard=2)
    assert [path.name for path in paths] == ["00000.tar", "00001.tar", "00002.tar"]
    tar = SOURCES["tar"]
    units = [unit for path in paths for unit in tar.split(str(path), ReadOptions())]
    assert [sample.image for unit in units for sample in tar.read(unit)] == made


def test_few_shards_stand_for_many_under_other_names(tmp_path: Path) -> None:
    shards = pictures.shards(tmp_path / "few", [b"a", b"b", b"c"], per_shard=1)
    paths = pictures.linked(tmp_path / "many", shards, 5)
    assert len(set(paths)) == 5
    assert [path.read_bytes() for path in paths] == [shards[n % 3].read_bytes() for n in range(5)]
    assert sorted((tmp_path / "many").iterdir()) == paths
