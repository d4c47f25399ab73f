"""`embq bench images` as a user starts it: rates of the stages, what limits, cores needed, for each kind of input."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embq.core.units import Unit
from embq.lab.image_stages import spread
from examples.demo.collect import photographs
from tests.e2e.session import called, succeed, write_tar

IMAGES = 24
FAST, SLOW = "stub:16?pixels=224&batch_size=4", "stub:16?pixels=224&batch_size=4&ms_per_sample=40"


def damaged(images: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The images, of which one is a page of HTML and one is cut off."""
    (first, _), (second, content), *others = images
    return [(first, b"<html>gone</html>"), (second, content[: len(content) // 2]), *others]


def write(kind: str, root: Path) -> Path:
    images = damaged(photographs(IMAGES, seed=0))
    root.mkdir()
    if kind == "tar":
        write_tar(root / "0.tar", ((f"{name}.jpg", content) for name, content in images))
    elif kind == "folder":
        for name, content in images:
            (root / f"{name}.jpg").write_bytes(content)
    else:
        table = pa.table({"image": [content for _, content in images], "key": [name for name, _ in images]})
        pq.write_table(table, root / "0.parquet")
    return root


def figures_of(inputs: Path, model: str, *options: str) -> dict[str, Any]:
    data = json.loads(succeed("bench", "images", inputs, "-m", model, "--devices", "cpu", "--json", *options))
    assert data["benchmark"] == "images"
    assert data["versions"]["rq"]
    figures: dict[str, Any] = data["figures"]
    return figures


@pytest.mark.parametrize(
    "kind", ["tar", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder", "parquet"))]
)
def test_a_fast_device_is_told_how_many_cores_it_wants(short_tmp: Path, kind: str) -> None:
    # A table's reader process has to start within that time.
    seconds = "5" if kind == "parquet" else "0.7"
    figures = figures_of(write(kind, short_tmp / "in"), FAST, "--seconds", seconds, "--threads", "1")
    assert figures["limit"] == "decoding"
    assert figures["failures"] == {"truncated": 1, "unidentified": 1}
    assert (figures["samples"], figures["tried"]) == (IMAGES, IMAGES)
    assert figures["device_per_s"] > figures["decode_per_s"] > 0
    assert figures["limit_detail"]["cores_needed"] == figures["cores_needed"] > 1
    assert 0 < figures["together_per_s"] < figures["device_per_s"]


@pytest.mark.slow
def test_a_slow_device_is_the_limit(short_tmp: Path) -> None:
    figures = figures_of(write("tar", short_tmp / "in"), SLOW, "--seconds", "0.7", "--decode", "cpu-fast")
    assert (figures["limit"], figures["cores_needed"], figures["decode"]) == ("device", 1, "cpu-fast")
    assert figures["together_per_s"] <= 25.5, "the device makes 25 in a second"


@pytest.mark.slow
def test_people_get_a_table(short_tmp: Path) -> None:
    shown = succeed("bench", "images", write("folder", short_tmp / "in"), "-m", FAST, "--seconds", "0.3").splitlines()
    names = [line.split("  ")[0] if line[0] != " " else line.strip().split("  ")[0] for line in shown[1:6]]
    assert names[0] == "read"
    assert names[1] == "decode, 1 thread"
    assert names[3:] == ["device alone", "all together"]
    assert shown[6].startswith("limited by ")


def test_images_that_cannot_be_decoded_are_no_measure(short_tmp: Path) -> None:
    write_tar(short_tmp / "0.tar", [("a.jpg", b"no image"), ("b.txt", b"a caption")])
    status, _, said = called("bench", "images", short_tmp / "0.tar", "-m", FAST, "--seconds", "0.1")
    assert status == 65
    assert "none of 2 samples can be decoded (missing_member, unidentified)" in said


def test_texts_are_no_images(short_tmp: Path) -> None:
    (short_tmp / "a.txt").write_text("a text\n")
    status, _, said = called("bench", "images", short_tmp / "a.txt", "-m", FAST)
    assert status != 0
    assert "holds texts only" in said


@given(count=st.integers(0, 2000), most=st.integers(1, 64))
def test_units_are_taken_from_everywhere_and_no_more_than_wanted(count: int, most: int) -> None:
    units = [Unit(kind="tar", source=str(n)) for n in range(count)]
    kept = [int(unit.source) for unit in spread(iter(units), most)]
    assert len(kept) <= most
    assert 2 * len(kept) >= min(most, count)
    assert len({after - before for before, after in itertools.pairwise(kept)}) <= 1
    assert not count or kept[0] == 0
