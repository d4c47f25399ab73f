"""Failed samples are mended in their place and done again, by the commands that a user types."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.keys import RUNS
from tests.e2e.check import check_complete, read_output
from tests.e2e.session import called, ended, started, succeed, write_tar, write_texts

DIM = 16
MODEL = f"stub:{DIM}?decode=1"

KILLS = 6


def picture(number: int) -> bytes:
    """A real image, different for each number: every third a JPEG, the others PNG."""
    file = io.BytesIO()
    image = Image.new("RGB", (8, 8), (number % 256, number // 256, 77))
    image.save(file, "JPEG" if number % 3 == 0 else "PNG")
    return file.getvalue()


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


@pytest.mark.slow
def test_a_shard_that_was_cut_is_retried_as_a_whole_and_what_still_fails_is_told(short_tmp: Path) -> None:
    root, folder = short_tmp / "out", short_tmp / "in"
    expected = write(folder, 100, frozenset({99}))
    shard = folder / "3.tar"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    status, stdout, _ = ended("run", *sorted(folder.glob("*.tar")), "-o", root, "-m", MODEL, "--json")
    account = json.loads(stdout.splitlines()[-1])
    assert (status, account["units"]["quarantined"], account["failures"]) == (3, 1, 2)

    shard.write_bytes(content)
    status, stdout, stderr = ended("retry", root, "--json")
    account = json.loads(stdout.splitlines()[-1])
    assert (status, account["units"]["quarantined"], account["failures"]) == (3, 0, 1), stderr
    in_shards = {key: data for key, data in expected.items() if not key.endswith(".jpg")}
    check_complete(root, in_shards, units=7, dim=DIM, failures={"s0099": "truncated"})
    succeed("verify", root)
    (group,) = json.loads(succeed("failures", root, "--json"))["groups"]
    assert [example["attempt"] for example in group["examples"]] == [2]


@pytest.fixture
def broker() -> Iterator[EmbeddedServer]:
    """A server of which only this file's runs are known."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder, EmbeddedServer(Path(folder) / "b") as server:
        yield server


@pytest.mark.slow
def test_a_retry_that_is_killed_at_random_moments_and_repeated_has_each_failure_once(
    short_tmp: Path, broker: EmbeddedServer
) -> None:
    rng = random.Random(int(os.environ.get("EMBQ_TEST_SEED", "4")))
    root, texts = short_tmp / "out", short_tmp / "t.jsonl"
    expected = write_texts(texts, 900)
    good, bad = texts.read_text().splitlines(), {key for key in expected if key.startswith("k1")}
    pairs = zip(expected, good, strict=True)
    cut = [json.dumps({"id": key, "text": ""}) if key in bad else line for key, line in pairs]
    texts.write_text("\n".join(cut) + "\n")
    assert ended("run", texts, "-o", root, "-m", f"stub:{DIM}", "--unit-size", "3", "-q")[0] == 3
    texts.write_text("\n".join(good) + "\n")
    before = read_output(root)
    assert len(before.failures) == len(bad)

    command = ["retry", str(root)]
    environment = {"EMBQ_BROKER_URL": broker.url}
    began = time.monotonic()
    succeed(*command, "--dry-run")
    whole_s = 1.5 * (time.monotonic() - began)
    ends = []
    for _ in range(KILLS):
        with started(*command, environment=environment) as retry:
            until = time.monotonic() + rng.random() * whole_s
            while retry.process.poll() is None and time.monotonic() < until:
                time.sleep(0.001)
            retry.signal(signal.SIGKILL)
            ends.append(retry.process.wait())
        there = read_output(root)  # all that the manifest names is there
        assert len(there.manifest) in (len(before.manifest), len(before.manifest) + len(there.retries))
    assert -signal.SIGKILL in ends
    succeed(*command, environment=environment)
    with connect(broker.url) as client:
        assert client.hlen(RUNS) == 1
    planned = read_output(root)
    assert sum(retry["replaces"] for retry in planned.retries.values()) == len(bad)
    assert list((root / "_tmp").iterdir()) == []

    succeed("resume", root, "-q")
    check_complete(root, expected, units=len(planned.manifest), dim=DIM)
