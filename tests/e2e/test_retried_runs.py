"""Failed samples are mended in their place and done again, by the commands that a user types."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.check import check_complete
from tests.e2e.session import called, ended, succeed, write_tar
from tests.support.picture_files import encoded

DIM = 16
MODEL = f"stub:{DIM}?decode=1"


def picture(number: int) -> bytes:
    """A real image, different for each number: every third a JPEG, the others PNG."""
    image = Image.new("RGB", (8, 8), (number % 256, number // 256, 77))
    return encoded(image, "JPEG" if number % 3 == 0 else "PNG")


def spoilt(number: int) -> bytes:
    """The image as a bad copy leaves it."""
    good = picture(number)
    return (good[: len(good) - 30], b"", b"<html>not found</html>", good[:10])[number % 4]


def write(folder: Path, images: int, bad: frozenset[int]) -> dict[str, bytes]:
    """Half of the images as files of a folder, half as members of five shards; gives key -> bytes of each good one."""
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    members: dict[int, list[tuple[str, bytes]]] = {shard: [] for shard in range(5)}
    expected = {}
    for number in range(images):
        data = spoilt(number) if number in bad else picture(number)
        if number < images // 2:
            key = f"p{number:04d}.jpg"
            path = folder / "photos" / key
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        else:
            key = f"s{number:04d}"
            members[number % 5].append((f"{key}.jpg", data))
        if number not in bad:
            expected[key] = data
    for shard, content in members.items():
        write_tar(folder / f"{shard}.tar", content)
    return expected


@pytest.mark.parametrize(("images", "corrupt"), [(1_000, 40), pytest.param(5_000, 200, marks=pytest.mark.slow)])
def test_corrupt_images_are_mended_in_their_place_and_retried(images: int, corrupt: int, short_tmp: Path) -> None:
    root, folder = short_tmp / "out", short_tmp / "in"
    bad = frozenset(random.Random(5).sample(range(images), corrupt))
    good = write(folder, images, bad)
    inputs = [folder / "photos", *sorted(folder.glob("*.tar"))]
    options = ["-o", root, "-m", MODEL, "--modality", "image", "--unit-size", str(images // 10)]

    status, stdout, stderr = ended("run", *inputs, *options, "--json")
    assert status == 3, stderr
    account = json.loads(stdout.splitlines()[-1])
    assert (account["rows"], account["failures"]) == (images - corrupt, corrupt)
    groups = json.loads(succeed("failures", root, "--json"))["groups"]
    assert sum(group["count"] for group in groups) == corrupt
    assert {group["code"] for group in groups} <= {"unidentified", "truncated", "corrupt"}
    assert len(groups) >= 2
    assert all("embq retry" in group["next"] for group in groups)

    everything = write(folder, images, frozenset())
    asked = json.loads(succeed("retry", root, "--dry-run", "--json"))
    assert (asked["failures"], sum(asked["samples"].values())) == (corrupt, corrupt)
    status, stdout, stderr = ended("retry", root, "--json")
    assert status == 0, stderr
    assert str(corrupt) in stderr
    account = json.loads(stdout.splitlines()[-1])
    assert (account["rows"], account["failures"], account["rows_total"]) == (images, 0, images)

    output = check_complete(root, everything, units=10 + asked["units"], dim=DIM)
    first = next(record for record in output.records if record["kind"] == "close")["totals"]
    assert (first["rows"], first["failures"]) == (images - corrupt, corrupt)
    assert set(output.keys[: images - corrupt]) == set(good), "what was committed stays where it is"
    report = json.loads(succeed("verify", root, "--json"))
    assert (report["rows"], report["failures"], report["vectors_recomputed"]) == (images, 0, images)
    assert json.loads(succeed("failures", root, "--json"))["groups"] == []
    assert "nothing to retry" in called("retry", root)[2]
