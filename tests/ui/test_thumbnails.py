"""Thumbnails of rows, from every kind of input that has images."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embq.producer.retry import FailureFilter, retry
from embq.retrieval.serving.middleware import client_of
from embq.retrieval.serving.unread_answers import MOST_UNREAD, CountedResponse
from embq.retrieval.ui.thumbnails import decoder, decoder_process, images, routes
from embq.retrieval.ui.thumbnails.images import Images
from tests.support.archives import tar_of
from tests.support.outputs.build import build, go_on, write_folder, write_tar
from tests.support.outputs.index import build_index
from tests.support.picture_files import beyond_limits, encoded, photograph, png_of
from tests.support.servers.storage import http_server
from tests.support.waiting import wait_until
from tests.ui.thumbnail_server import Server, assert_shows, image_of, pixels, served_here, started

Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves output folders of runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ExitStack() as stack:
        yield partial(started, stack, cache=tmp_path / "cache")


@pytest.fixture
def served(serve: Serve, tmp_path: Path) -> Serve:
    """Runs inputs, indexes the run, and serves it."""

    def made(*inputs: Path, **options: object) -> Server:
        root = build(tmp_path / "out", [*inputs], modalities=("image",), **options)  # type: ignore[arg-type]
        build_index(root, output="image")
        return serve(root)

    return made


@pytest.fixture
def no_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read of an input is an error."""

    def fail(*_: object) -> bytes:
        raise AssertionError("an input is read")

    monkeypatch.setattr(Images, "image", fail)


def members(count: int) -> list[tuple[str, bytes]]:
    return [(f"k{i:03}.{end}", data) for i in range(count) for end, data in (("jpg", image_of(i)), ("txt", b"a"))]


def tar_input(folder: Path) -> Path:
    return write_tar(folder / "photos.tar", members(7))


def compressed_input(folder: Path) -> Path:
    path = folder / "photos.tar.gz"
    path.write_bytes(gzip.compress(tar_input(folder).read_bytes(), compresslevel=1))
    (folder / "photos.tar").unlink()
    return path


def folder_input(folder: Path) -> Path:
    return write_folder(folder / "photos", {f"a/k{i}.jpg": image_of(i) for i in range(7)})


def parquet_input(folder: Path, kind: str = ".parquet") -> Path:
    path = folder / f"photos{kind}"
    table = pa.table({"id": [f"k{i}" for i in range(7)], "image": [image_of(i) for i in range(7)]})
    if kind == ".parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    return path


def csv_input(folder: Path) -> Path:
    folder_input(folder)
    path = folder / "photos.csv"
    path.write_text("image,n\n" + "".join(f"photos/a/k{i}.jpg,{i}\n" for i in range(7)))
    return path


@pytest.mark.parametrize(
    "made",
    [
        tar_input,
        compressed_input,
        folder_input,
        parquet_input,
        lambda folder: parquet_input(folder, ".arrow"),
        csv_input,
    ],
    ids=["tar", "compressed tar", "folder", "parquet", "arrow", "csv"],
)
def test_each_row_has_the_thumbnail_of_its_own_image(
    made: Callable[[Path], Path], served: Serve, tmp_path: Path
) -> None:
    server = served(made(tmp_path))
    for id_ in (0, 4, 6, 2):
        answer = server.get(id_)
        assert answer.status_code == 200, answer.text
        assert_shows(answer.content, id_)


def test_a_photograph_looks_like_its_source(served: Serve, tmp_path: Path) -> None:
    source = photograph(size=(500, 380))
    server = served(write_tar(tmp_path / "a.tar", [("k.png", encoded(source, "PNG"))]))
    found = pixels(server.get(0).content)
    wanted = source.resize((320, 243), Image.Resampling.LANCZOS)
    assert found.shape == (243, 320, 3)
    assert abs(found - pixels(encoded(wanted, "JPEG", quality=95))).mean() < 6


def test_rows_that_share_a_key_have_the_images_of_their_own_units(served: Serve, tmp_path: Path) -> None:
    inputs = [write_tar(tmp_path / f"{n}.tar", [("same.jpg", image_of(n))]) for n in range(3)]
    server = served(*inputs)
    for id_ in range(3):
        assert_shows(server.get(id_).content, id_)


def test_a_key_that_is_not_utf8_is_found(served: Serve, tmp_path: Path) -> None:
    odd = os.fsdecode(b"a\xff?#%2F&'\"<b>.jpg")
    server = served(
        write_tar(tmp_path / "a.tar", [("x.jpg", image_of(0)), (f"d/{odd}", image_of(1))]),
        write_folder(tmp_path / "folder", {f"ä {odd}": image_of(2)}),
    )
    for id_ in range(3):
        assert_shows(server.get(id_).content, id_)


def test_the_image_of_a_key_is_that_which_was_embedded(served: Serve, tmp_path: Path) -> None:
    """The first extension in the order of the reader, and of a repeated member the first."""
    files = [("k.png", image_of(3, "PNG")), ("k.jpg", image_of(1)), ("k.jpg", image_of(2))]
    assert_shows(served(write_tar(tmp_path / "a.tar", files)).get(0).content, 1)


def test_rows_of_a_retry_have_their_own_images(serve: Serve, tmp_path: Path) -> None:
    """Of a folder and of a table that names files: some were missing, and came later."""
    folder = folder_input(tmp_path)
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": [f"photos/a/k{i}.jpg" for i in (6, 5, 4, 3, 2)]}), table)
    for name in ("k4", "k5"):
        (folder / "a" / f"{name}.jpg").rename(tmp_path / f"{name}.jpg")
    (folder / "a" / "k4.jpg").symlink_to(tmp_path / "gone")
    (folder / "a" / "k5.jpg").symlink_to(tmp_path / "gone")
    root = build(tmp_path / "out", [folder, table], modalities=("image",), unit_samples=10, image_column="image")
    for name in ("k4", "k5"):
        (tmp_path / f"{name}.jpg").replace(folder / "a" / f"{name}.jpg")
    retry(root, FailureFilter(), version="0")
    go_on(root)
    build_index(root, output="image")
    server = serve(root)
    rows = server.client.post("/metadata", json={"ids": [*range(12)]}).json()
    numbers = {"t.parquet:1": 6, "t.parquet:2": 5, "t.parquet:3": 4, "t.parquet:4": 3, "t.parquet:5": 2}
    numbers |= {f"a/k{i}.jpg": i for i in range(7)}
    assert {row["metadata"]["key"] for row in rows} == set(numbers)
    for row in rows:
        assert_shows(server.get(row["id"]).content, numbers[row["metadata"]["key"]])


def test_an_index_below_a_followed_folder_has_thumbnails(serve: Serve, tmp_path: Path) -> None:
    root = build(tmp_path / "runs" / "team" / "notes", [tar_input(tmp_path)], modalities=("image",))
    build_index(root, output="image")
    (tmp_path / "other").mkdir()
    server = serve(tmp_path / "runs", follow=True)
    wait_until(lambda: server.get(1, index="team/notes").status_code == 200)
    assert_shows(server.get(1, index="team/notes").content, 1)


# --- what has none ---


def test_a_source_that_changed_has_no_thumbnail(served: Serve, tmp_path: Path) -> None:
    tar, folder = tar_input(tmp_path), write_folder(tmp_path / "p", {"x.jpg": image_of(0)})
    server = served(tar, folder)
    assert server.get(0).status_code == 200
    os.utime(tar, ns=(1, 1))
    (folder / "x.jpg").write_bytes(image_of(1) + b"\0")
    assert {server.code(1), server.code(7)} == {"thumbnail_changed"}
    assert_shows(server.get(0).content, 0)  # of the planned version, from the cache
    tar.unlink()
    assert server.code(1) == "no_thumbnail"


def test_ids_and_indexes_that_are_not_there_are_refused(served: Serve, tmp_path: Path) -> None:
    server = served(tar_input(tmp_path))
    assert server.code(7) == "no_such_id"
    assert server.code(10**30) == "no_such_id"
    assert server.get(0, index="other").json()["code"] == "no_such_index"
    assert server.client.get("/thumb/out/text/0").json()["code"] == "no_such_index"
    assert server.client.get("/thumb/out/image/-1").json()["code"] == "no_such_route"


def test_texts_have_no_thumbnail(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    root = build(tmp_path / "out", [tmp_path / "a.txt"])
    build_index(root, output="text")
    answer = serve(root).client.get("/thumb/out/text/0")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_thumbnail")


def test_a_shard_that_became_a_link_to_another_place_is_not_read(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, secret = tmp_path / "inputs", tmp_path / "secret"
    inputs.mkdir()
    secret.mkdir()
    tar = tar_input(inputs)
    root = build(tmp_path / "out", [tar], modalities=("image",))
    build_index(root, output="image")
    monkeypatch.setenv("EMBQ_ROOTS", str(inputs))
    server = serve(root)
    assert server.get(0).status_code == 200
    moved = tar.rename(secret / tar.name)  # it keeps its version
    tar.symlink_to(moved)
    for id_ in (0, 1):  # also one that is cached
        assert server.code(id_) == "no_thumbnail"
        assert "EMBQ_ROOTS" in server.get(id_).json()["next"]
    tar.unlink()
    inputs.rmdir()
    inputs.symlink_to(secret)  # the folder itself leads out: what the operator named is where it leads to
    assert server.get(1).status_code == 200


def test_a_file_of_a_folder_that_became_a_link_out_of_it_is_not_read(served: Serve, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "p", {"x.jpg": image_of(0), "y.jpg": image_of(1)})
    server = served(folder)
    moved = (folder / "x.jpg").rename(tmp_path / "x.jpg")
    (folder / "x.jpg").symlink_to(moved)
    (folder / "y.jpg").rename(folder / "z.jpg")
    (folder / "y.jpg").symlink_to(folder / "z.jpg")
    assert server.code(0) == "no_thumbnail"
    assert_shows(server.get(1).content, 1)


def test_bombs_and_files_that_are_no_images_are_errors_and_the_next_image_is_shown(
    served: Serve, tmp_path: Path
) -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    odd = {name: data for name, data, _ in beyond_limits() if name in ("a real png of 81 MP", "webp of 256 MP")}
    odd |= {"svg": svg, "cut": image_of(0)[:2000], "page": b"<html></html>", "rows": png_of(8000, 4000, 8, 6, b"")}
    files = [(f"{i}.jpg", data) for i, data in enumerate(odd.values())]
    server = served(write_tar(tmp_path / "a.tar", [*files, ("z.jpg", image_of(2))]))
    for id_ in range(len(odd)):
        assert server.code(id_) == "bad_image"
        original = server.client.get(f"/thumb/out/image/{id_}?size=original")
        assert (original.status_code, original.json()["code"]) == (404, "bad_image")
    assert_shows(server.get(len(odd)).content, 2)
    assert not [path for path in server.cache.rglob("*") if path.is_file()][1:]


# --- a manifest may name any file ---

SECRET = b"root:x:0:0:a password"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """A run of files that are no images, of every kind of input; its index is to be served."""
    (tmp_path / "private").mkdir()
    folder = write_folder(tmp_path / "private" / "folder", {"a.jpg": SECRET, "b.jpg": SECRET + b"2"})
    shard = write_tar(tmp_path / "private" / "s.tar", [("c.jpg", SECRET)])
    table = tmp_path / "private" / "t.parquet"
    pq.write_table(pa.table({"id": ["d"], "image": [SECRET]}), table)
    good = write_folder(tmp_path / "private" / "good", {"e.jpg": image_of(1)})
    root = build(tmp_path / "out", [folder, shard, table, good], modalities=("image",))
    build_index(root, output="image")
    return root


def test_what_is_no_image_is_no_original_and_no_error_tells_a_size(serve: Serve, secrets: Path, tmp_path: Path) -> None:
    server = serve(secrets)
    sizes = ("", "?size=large", "?size=original")
    answers = [server.client.get(f"/thumb/out/image/{id_}{size}") for id_ in range(4) for size in sizes]
    assert [(one.status_code, one.json()["code"]) for one in answers] == [(404, "bad_image")] * 12
    assert server.client.get("/thumb/out/image/4?size=original").content == image_of(1)
    for name in ("folder/a.jpg", "folder/b.jpg", "s.tar", "t.parquet"):
        (tmp_path / "private" / name).write_bytes(SECRET * 1_234)
    changed = [server.client.get(f"/thumb/out/image/{id_}?size=original") for id_ in range(4)]
    assert {one.json()["code"] for one in changed} == {"thumbnail_changed"}
    told = "".join(one.text for one in (*answers, *changed))
    for text in (
        SECRET.decode(),
        *(str(size + more) for size in (len(SECRET), 1_234 * len(SECRET)) for more in (0, 1)),
    ):
        assert text not in told


@pytest.mark.parametrize("roots", ["", "private"])
@pytest.mark.parametrize("exposed", [[], ["--host", "0.0.0.0"], ["--allow-host", "search.example"]])
def test_off_loopback_inputs_are_shown_only_where_the_operator_has_named_them(
    secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exposed: list[str], roots: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if roots:
        monkeypatch.setenv("EMBQ_ROOTS", str(tmp_path / roots))
    with served_here(monkeypatch, "serve", secrets, *exposed) as client:
        for size in ("", "?size=large", "?size=original"):
            answer = client.get(f"/thumb/out/image/4{size}")
            assert answer.status_code == (404 if exposed and not roots else 200), answer.text
            assert answer.status_code == 200 or "EMBQ_ROOTS" in answer.json()["next"]


# --- form ---


TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_thumbnail_is_upright_by_its_exif(orientation: int, kind: str) -> None:
    upright = Image.new("RGB", (600, 400), (20, 20, 200))
    upright.paste((250, 250, 250), (0, 0, 150, 100))
    undo = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)
    turned = upright if undo == 1 else upright.transpose(TURNS[undo])
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = pixels(decoder_process.thumbnail(encoded(turned, kind, exif=exif), 320))
    assert found.shape == (213, 320, 3)
    assert found[10, 10].min() > 235
    assert found[200, 10].max() < 230
    assert found[10, 300].min() < 40


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_an_image_with_damaged_exif_is_shown_as_it_lies() -> None:
    for damaged in (b"Exif\0\0II*\0\x08\0\0\0\x09\0", b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x07"):
        assert pixels(decoder_process.thumbnail(encoded(photograph(), "JPEG", exif=damaged), 320)).shape[1] == 320


def test_what_is_transparent_is_white_and_nothing_but_pixels_is_taken_over() -> None:
    clear = Image.new("RGBA", (640, 640), (255, 0, 0, 0))
    clear.paste((255, 0, 0, 255), (320, 0, 640, 640))
    palette = clear.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    for image in (clear, palette, clear.convert("LA")):
        found = pixels(decoder_process.thumbnail(encoded(image, "PNG"), 320))
        assert found.shape == (320, 320, 3)
        assert found[160, 40].min() > 240
        assert found[160, 280].min() < 120
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    made = decoder_process.thumbnail(encoded(photograph(), "JPEG", exif=exif, comment=b"secret", icc_profile=b"x"), 320)
    assert b"secret" not in made
    assert b"Exif" not in made
    assert b"ICC_PROFILE" not in made


@pytest.mark.parametrize("mode", ["1", "L", "I;16", "CMYK", "YCbCr"])
def test_images_of_other_modes_have_thumbnails(mode: str) -> None:
    gray = photograph("L")
    image = gray.convert("I").point(lambda value: value * 257).convert("I;16") if mode == "I;16" else gray.convert(mode)
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    found = pixels(decoder_process.thumbnail(encoded(image, kind), 320))
    wanted = pixels(decoder_process.thumbnail(encoded(gray, "PNG"), 320))
    blurred = [one[:240, :320].reshape(12, 20, 16, 20, 3).mean((1, 3)) for one in (found, wanted)]
    assert abs(blurred[0] - blurred[1]).mean() < 12


def test_a_small_image_is_not_enlarged() -> None:
    small = encoded(Image.new("RGB", (40, 1), "red"), "PNG")
    assert pixels(decoder_process.thumbnail(small, 320)).shape == (1, 40, 3)


# --- http ---


def test_the_headers_let_a_browser_keep_it_and_guess_nothing(
    served: Serve, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = served(tar_input(tmp_path))
    first = server.get(1)
    assert first.headers["content-type"] == "image/jpeg"
    assert first.headers["cache-control"] == "private, max-age=86400"
    assert first.headers["x-content-type-options"] == "nosniff"
    etag = first.headers["etag"]
    assert etag.startswith('"')
    assert server.get(2).headers["etag"] != etag
    request.getfixturevalue("no_images")
    for sent in (etag, f'"x", W/{etag}', "*"):
        again = server.get(1, if_none_match=sent)
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    assert server.get(1, if_none_match='"x"').status_code == 200
    assert server.get(3).status_code == 500  # what `no_images` raises: a failure is not cached
    assert server.get(3).headers["cache-control"] == "no-store"


def test_a_row_has_a_large_picture_and_its_original(served: Serve, tmp_path: Path) -> None:
    server = served(tar_input(tmp_path))
    small, large, original = (
        server.client.get(f"/thumb/out/image/1{size}") for size in ("", "?size=large", "?size=original")
    )
    assert pixels(large.content).shape == (500, 800, 3)  # not enlarged
    assert original.content == image_of(1)
    assert len({one.headers["etag"] for one in (small, large, original)}) == 3
    assert {one.headers["content-type"] for one in (small, large, original)} == {"image/jpeg"}
    assert "sandbox" in original.headers["content-security-policy"]
    assert server.client.get("/thumb/out/image/1?size=huge").json()["code"] == "bad_request"


def test_pictures_that_clients_do_not_read_are_bounded(served: Serve, tmp_path: Path) -> None:
    """Originals have up to 32 MB, and as many as requests are answered at a time would be in memory."""
    server = served(tar_input(tmp_path))
    client = client_of({"client": ("testclient", 1)})
    CountedResponse.unread[client] = MOST_UNREAD
    try:
        answer = server.client.get("/thumb/out/image/1?size=original")
        assert (answer.status_code, answer.json()["code"]) == (503, "overloaded")
    finally:
        del CountedResponse.unread[client]
    assert server.client.get("/thumb/out/image/1?size=original").content == image_of(1)
    assert CountedResponse.unread.total() == 0


def test_the_metrics_name_the_template_and_no_path(served: Serve, tmp_path: Path) -> None:
    server = served(tar_input(tmp_path))
    server.get(1)
    server.get(99)
    said = server.client.get("/metrics").text
    assert f'embq_http_requests_total{{route="{routes.PATH}",status="200"}} 1.0' in said
    assert f'embq_http_requests_total{{route="{routes.PATH}",status="404"}} 1.0' in said
    assert "/thumb/out" not in said


def test_many_thumbnails_at_once_are_right_while_the_server_answers(served: Serve, tmp_path: Path) -> None:
    server = served(write_tar(tmp_path / "a.tar", members(50)), unit_samples=50)
    with ThreadPoolExecutor(50) as pool:
        found = pool.map(server.get, range(50))
        assert server.client.get("/health").status_code == 200
        for id_, answer in enumerate(found):
            assert_shows(answer.content, id_)


# --- cache ---


def test_thumbnails_outlive_a_restart(
    serve: Serve, served: Serve, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first = served(tar_input(tmp_path))
    made = first.get(5).content
    request.getfixturevalue("no_images")
    assert serve(tmp_path / "out").get(5).content == made


def test_a_damaged_file_of_the_cache_is_made_anew(served: Serve, tmp_path: Path) -> None:
    server = served(tar_input(tmp_path))
    made = server.get(5).content
    (file,) = (path for path in server.cache.rglob("*") if path.is_file())
    file.write_bytes(bytes(len(made)))
    assert server.get(5).content == made
    assert file.read_bytes() == made


def test_the_cache_stays_below_its_bound_and_keeps_what_was_used_last(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBQ_THUMBNAIL_CACHE_GB", "0.00001")
    server = served(tar_input(tmp_path))
    names = {}
    for id_ in (0, 1, 2, 3, 0, 4, 0, 5, 0, 6):
        names[id_] = server.get(id_).headers["etag"].strip('"')
        for path in server.cache.rglob("*"):  # as if each request came a second after the last
            if path.is_file():
                status = path.stat()
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
    there = {path.name: path.stat().st_size for path in server.cache.rglob("*") if path.is_file()}
    assert sum(there.values()) <= 10_000
    assert 1 < len(there) < 7
    assert {names[0], names[6]} <= set(there)
    assert not {names[1], names[2]} & set(there)


def test_a_cache_that_cannot_be_written_costs_time_alone(serve: Serve, served: Serve, tmp_path: Path) -> None:
    server = served(tar_input(tmp_path))
    server.cache.parent.mkdir(parents=True)
    server.cache.write_text("a file in its place")
    for _ in range(2):
        assert_shows(server.get(3).content, 3)


# --- processes ---


def test_the_pages_need_no_pillow() -> None:
    without = "import sys; sys.modules['PIL'] = None; import embq.retrieval.ui.site"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=120)


def test_a_killed_decoder_is_replaced(served: Serve, tmp_path: Path) -> None:
    server = served(tar_input(tmp_path))
    assert_shows(server.get(0).content, 0)
    for id_ in (1, 2):
        (pid,) = server.thumbnails._decoders.pids
        os.kill(pid, signal.SIGKILL)
        assert_shows(server.get(id_).content, id_)
        assert server.thumbnails._decoders.pids != [pid]


def test_a_decoder_that_hangs_is_killed_and_one_of_many_images_replaced(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served(tar_input(tmp_path))
    assert server.get(0).status_code == 200
    (pid,) = server.thumbnails._decoders.pids
    monkeypatch.setattr(decoder, "IMAGE_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    assert server.code(1) == "bad_image"
    assert not psutil.pid_exists(pid)
    monkeypatch.setattr(decoder, "IMAGE_S", 30.0)
    monkeypatch.setattr(decoder, "IMAGES", 2)
    seen = set()
    for id_ in (1, 2, 3, 4):
        assert_shows(server.get(id_).content, id_)
        seen.update(server.thumbnails._decoders.pids)
    assert len(seen) == 2


def test_a_compressed_shard_is_read_once_for_all_its_images(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served(compressed_input(tmp_path))
    assert server.get(0).status_code == 200
    monkeypatch.setattr("embq.sources.reader_process.client.Process.read", None)  # a second one would fail
    assert_shows(server.get(6).content, 6)


@pytest.mark.parametrize(("bound", "most"), [("TABLE_MEMBERS", 10), ("KEPT_SHARDS", 1), ("KEPT_BYTES", 1)])
def test_shards_that_are_forgotten_are_read_again(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(images, bound, most)
    inputs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        inputs += [compressed_input(tmp_path / name), tar_input(tmp_path / name)]
    server = served(*inputs)
    for id_ in (0, 7, 14, 21, 1, 8, 15, 22):
        assert_shows(server.get(id_).content, id_ % 7)
    assert len(server.thumbnails.images._shards._shards) < 4


def test_shards_of_a_served_index_are_looked_into_before_anybody_asks(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "z").mkdir()
    server = served(tar_input(tmp_path), compressed_input(tmp_path / "z"))
    shards = server.thumbnails.images._shards
    server.thumbnails.start()
    wait_until(lambda: len(shards._shards) == 1)  # what is read whole is left to those who ask
    monkeypatch.setattr(images, "offsets_of", None)  # a second walk would fail
    assert_shows(server.get(3).content, 3)


def test_members_behind_damage_have_no_thumbnail_and_those_before_it_have(serve: Serve, tmp_path: Path) -> None:
    whole = tar_of(members(4))
    (tmp_path / "a.tar").write_bytes(whole[: whole.index(b"k003.jpg") + 1000])
    root = build(tmp_path / "out", [tmp_path / "a.tar"], modalities=("image",), damaged="keep")
    build_index(root, output="image")
    server = serve(root)
    assert_shows(server.get(2).content, 2)
    assert server.code(3) == "no_such_id"


# --- behind URLs ---


def test_inputs_behind_urls_have_thumbnails_where_their_host_may_be_read(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar_input(write_folder(tmp_path / "files", {"linked.jpg": image_of(5)}))
    with http_server(tmp_path / "files") as there:
        table = tmp_path / "links.parquet"
        pq.write_table(pa.table({"url": [f"{there.url}/gone.jpg", f"{there.url}/linked.jpg"]}), table)
        inputs = [f"{there.url}/photos.tar", table]
        root = build(tmp_path / "out", inputs, modalities=("image",), image_column="url")
        build_index(root, output="image")
        refused = serve(root)  # loopback is no public host
        assert {refused.code(1), refused.code(7)} == {"no_thumbnail"}
        monkeypatch.setenv("EMBQ_PRIVATE_HOSTS", "127.0.0.1")
        server = serve(root)
        assert_shows(server.get(1).content, 1)
        assert_shows(server.get(7).content, 5)
        asked = there.asked.copy()
        assert_shows(server.get(6).content, 6)
        assert there.asked == asked  # the shard is kept


def test_a_slow_input_is_given_up_and_read_later(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBQ_PRIVATE_HOSTS", "127.0.0.1")
    (tmp_path / "files").mkdir()
    tar_input(tmp_path / "files")
    with http_server(tmp_path / "files") as there:
        server = served(f"{there.url}/photos.tar")
        monkeypatch.setattr(images, "READ_S", 0.5)
        monkeypatch.setattr(images, "SLOW_S", 60.0)  # a busy machine takes over a second to start a reader
        there.latency_s = 60.0
        answer = server.get(0)
        assert (answer.status_code, answer.json()["code"]) == (503, "no_thumbnail")
        assert "0.5 s" in answer.json()["message"]
        monkeypatch.setattr(images, "READ_S", 60.0)
        there.latency_s = 0.0
        assert_shows(server.get(0).content, 0)
