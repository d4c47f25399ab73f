"""An output folder that comes from somebody else: an archive, a download, a shared disk."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import cli
from embq.app.export.export import ExportOptions, export
from embq.app.gc.collect import collect
from embq.app.gc.orphans import Orphan, Orphans, find_orphans, remove_orphans
from embq.app.local.service_process import ServiceProcess
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer, keep_to_ourselves, kept_off
from embq.core.errors import EmbqError, Exit, OutputError, OutsideError, UsageError
from embq.core.formats.hdf5 import Hdf5Part
from embq.core.formats.parquet import ParquetPart
from embq.core.run import checkpoint
from embq.core.run.commit_log import CommitLog
from embq.core.run.commits import Commit
from embq.core.run.control import Control, load_control, save_control
from embq.core.run.generations import Generation, append
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import row_tables
from embq.core.run.run_info import RunInfo, load_run
from embq.core.settings import Settings
from embq.core.storage.durable import drop_in
from embq.core.units import canonical_json
from embq.index.index_files.version import resolve_index
from embq.writer.staging import leave_nonce, sweep
from tests.support.outputs.build import build, file_path, reseal, write_jsonl
from tests.support.second_reader.checks import verify

# --- the state of the private server ---


def command(*words: str) -> bytes:
    """One command as an append-only file holds it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)


def planted_state(folder: Path) -> Path:
    """A state folder of which every file would do something, were it used."""
    data = folder / "appendonlydir"
    data.mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (data / "appendonly.aof.manifest").write_text("file appendonly.aof.1.incr.aof seq 1 type i\n")
    (data / "appendonly.aof.1.incr.aof").write_bytes(command("SELECT", "0") + command("SET", "planted", "1"))
    (folder / "appendonly.aof").write_bytes(command("SELECT", "0") + command("SET", "planted", "1"))
    (folder / "password").write_text("0" * 32 + "\nmaxclients 77")
    (folder / "server.conf").write_text("maxclients 77\n")
    return folder


def test_no_state_of_a_folder_reaches_the_server(short_tmp: Path) -> None:
    """A newline in `_broker/password` added directives (`loadmodule`), and the append-only file is a list of
    commands that the server carries out when it starts, MODULE LOAD among them."""
    with EmbeddedServer(planted_state(short_tmp / "_broker")) as server, connect(server.url) as client:
        assert client.keys() == []
        assert client.config_get("maxclients") != {"maxclients": "77"}


@pytest.mark.parametrize("entry", ["server.log", "password", "server.conf", "lock", "server.sock", "appendonlydir"])
def test_a_link_in_the_state_folder_is_never_followed(short_tmp: Path, entry: str) -> None:
    target = short_tmp / "profile"
    target.write_text("mine")
    folder = short_tmp / "out" / "_broker"
    folder.mkdir(parents=True, mode=0o700)
    (folder / entry).symlink_to(target)
    if entry == "lock":
        with pytest.raises(OutsideError, match="is a symbolic link"):
            EmbeddedServer(folder).start()
    else:
        with EmbeddedServer(folder), kept_off(folder) as alone:
            assert not alone
    assert target.read_text() == "mine"
    assert sorted(path.name for path in short_tmp.iterdir()) == ["out", "profile"]


def test_a_state_folder_that_is_a_link_is_refused(short_tmp: Path) -> None:
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    folder = short_tmp / "_broker"
    folder.symlink_to(elsewhere)
    for use in (keep_to_ourselves, lambda path: EmbeddedServer(path).start(), lambda path: kept_off(path).__enter__()):
        with pytest.raises(OutsideError, match="is a symbolic link") as caught:
            use(folder)
        assert caught.value.next_step
    assert list(elsewhere.iterdir()) == []


def test_a_server_is_looked_for_with_a_password_of_ours_only(own_server: EmbeddedServer) -> None:
    (own_server.folder / "password").chmod(0o600)
    assert EmbeddedServer.find(own_server.folder) == own_server.url
    (own_server.folder / "password").write_text("0" * 32 + "@elsewhere/")
    assert EmbeddedServer.find(own_server.folder) == ""
    (own_server.folder / "password").write_bytes(b"\xff" * 32)
    assert EmbeddedServer.find(own_server.folder) == ""
    (own_server.folder / "password").unlink()
    os.mkfifo(own_server.folder / "password")
    assert EmbeddedServer.find(own_server.folder) == ""


@pytest.mark.parametrize("linked", ["_logs", "_logs/writer.log"])
def test_logs_are_not_written_through_a_link(tmp_path: Path, linked: str) -> None:
    target = tmp_path / "target"
    out = tmp_path / "out"
    out.mkdir()
    if linked == "_logs":
        target.mkdir()
        (target / "writer.log").write_text("mine")
    else:
        (out / "_logs").mkdir()
        target.write_text("mine")
    (out / linked).symlink_to(target)
    log = out / "_logs" / "writer.log"
    child = ServiceProcess("writer", ["--help"], log=log, broker_url="redis://127.0.0.1:1")
    try:
        with pytest.raises(EmbqError, match="is a symbolic link"):
            child.start()
    finally:
        child.stop(10.0)
    assert log.read_text() == "mine"


# --- entries of the output folder ---


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished run over texts, with one failure."""
    lines = [{"id": f"k{n}", "text": f"text {n}"} for n in range(5)]
    return build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [*lines, b"not json\n"])])


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the user beside the output, with files that gc and sweep would take for litter."""
    folder = tmp_path / "priv"
    folder.mkdir()
    for name in ("a.arrow", "failures-00000001.parquet", "part-00000001.parquet", "notes.txt"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (1, 1))
    return folder


def untouched(private: Path) -> bool:
    """True if all of it is still there, and nothing else."""
    return len([path for path in private.iterdir() if path.read_text() == "mine"]) == len(list(private.iterdir())) == 4


def replace_by_link(entry: Path, target: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    entry.unlink(missing_ok=True)
    entry.symlink_to(target)


ENTRIES = ["_staging", "_tmp", "_writer", "_inputs", "failures", "parts", "manifest", "commits", "index", "run.json"]
FOLDERS = [name for name in ENTRIES if name not in ("run.json", "index", "_inputs")]


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_that_is_a_link_is_refused_by_every_reader_and_deleter(out: Path, private: Path, entry: str) -> None:
    replace_by_link(out / entry, private / "notes.txt" if entry == "run.json" else private)
    layout = Layout(out)

    uses: list[Callable[[], object]] = [
        lambda: load_run(out),
        lambda: collect(out, Settings(), must_answer=False, older_than_s=0.0, dry_run=False),
        lambda: verify(out),
        lambda: verify(out, mode="quick"),
        lambda: export(out, out.parent / "exported", ExportOptions(format="parquet")),
        lambda: layout.make(layout.parts),
    ]
    for use in uses:
        with pytest.raises(OutsideError, match=f"'{entry}' is a symbolic link") as caught:
            use()
        assert str(out) in caught.value.message
        assert caught.value.next_step
    assert untouched(private)
    assert not (out.parent / "exported").exists()


@pytest.mark.parametrize("entry", FOLDERS)
def test_nothing_is_removed_behind_a_link_that_came_after_the_folder_was_looked_at(
    out: Path, private: Path, entry: str
) -> None:
    """Whoever may write to a shared folder can put a link there at any time."""
    layout, info = Layout(out), load_run(out)
    state = CommitLog(layout).replay(info.units)
    found = Orphans((Orphan(f"{entry}/notes.txt", 4, 9e9), Orphan(f"{entry}/a.arrow", 4, 9e9)), 0, 0)
    replace_by_link(out / entry, private)
    for use in (
        lambda: sweep(layout, unfinished=True),
        lambda: remove_orphans(layout, found),
        lambda: find_orphans(layout, info, state, live=set, older_than_s=0.0),
        lambda: leave_nonce(layout, "nonce"),
        lambda: drop_in(out / entry, "notes.txt"),
    ):
        with suppress(OutsideError, FileNotFoundError, OutputError):
            use()
    assert untouched(private)


def test_links_among_unfinished_files_are_removed_before_a_file_is_written_there(out: Path, private: Path) -> None:
    for name in ("part-00000009.9.rows.unfinished", "manifest-00000.parquet", "checkpoint-00000003.json"):
        (out / "_tmp" / name).symlink_to(private / "notes.txt")
    Layout(out).make()
    assert list((out / "_tmp").iterdir()) == []
    assert untouched(private)


def test_the_nonce_is_not_written_through_a_link_of_a_worker(out: Path, private: Path) -> None:
    """Workers may write to `_staging`, and the writer writes a file of a known name there."""
    (out / "_staging" / ".shared").symlink_to(private / "notes.txt")
    leave_nonce(Layout(out), "nonce")
    assert untouched(private)
    assert (out / "_staging" / ".shared").read_text() == "nonce"


@pytest.mark.parametrize(
    "path",
    ["../priv/secret.parquet", "/etc/hostname", "parts/../../priv/secret.parquet", "parts//x", "./parts/x", "", "a\0b"],
)
def test_a_record_that_names_a_file_elsewhere_is_damaged(out: Path, path: str) -> None:
    secret = out.parent / "priv" / "secret.parquet"
    secret.parent.mkdir()
    shutil.copyfile(file_path(out), secret)

    def elsewhere(commit: Commit) -> Commit:
        return replace(commit, files=tuple(replace(one, path=path) if one.of_rows else one for one in commit.files))

    reseal(out, elsewhere)
    for use in (
        lambda: verify(out),
        lambda: verify(out, mode="quick"),
        lambda: export(out, out.parent / "exported", ExportOptions(format="parquet")),
        lambda: list(row_tables(out)),
    ):
        with pytest.raises(OutputError, match="is damaged") as caught:
            use()
        assert caught.value.code == "commit_damaged"
    assert not (out.parent / "exported").exists()


def test_a_part_that_is_a_link_is_neither_verified_nor_exported(out: Path) -> None:
    part = file_path(out)
    secret = out.parent / "secret.parquet"
    os.rename(part, secret)
    part.symlink_to(secret)
    assert not verify(out, mode="quick").ok
    assert not verify(out).ok
    with pytest.raises(OutputError, match="is a symbolic link"):
        export(out, out.parent / "exported", ExportOptions(format="parquet"))


@pytest.mark.parametrize("entry", ["run.json", "control.json", "commits/00000001.json", "_writer/checkpoint.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(out: Path, entry: str) -> None:
    (out / entry).unlink(missing_ok=True)
    os.mkfifo(out / entry)
    with suppress(EmbqError):
        info = load_run(out)
        load_control(Layout(out))
        checkpoint.load(Layout(out), info.units)
        CommitLog(Layout(out)).replay(info.units)


# --- what the files of an output folder say ---

HOSTILE_VALUES = [None, True, -1, 2**63, 1e400, "", "x" * 2_000, "../..", [], {}, [[]], {"a": {}}, "\ud800", ["\0"]]


def generation_after(info: RunInfo) -> Generation:
    """One more unit, which no segment holds."""
    return Generation(
        number=1,
        run=info.run,
        first=info.units,
        units=1,
        samples=1,
        digest="d" * 32,
        segments=("gen-0001-0000.parquet",),
        inputs=("more.jsonl",),
        options=(("unit_samples", "3"),),
        version="0",
        created="now",
    )


def _bodies(out: Path) -> dict[str, tuple[Path, Callable[[dict[str, Any]], bytes]]]:
    def plain(body: dict[str, Any]) -> bytes:
        return json.dumps(body).encode()

    def sealed(body: dict[str, Any]) -> bytes:
        body.pop("sha256", None)
        try:
            text = canonical_json(body).encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return plain(body)
        return canonical_json({**body, "sha256": hashlib.sha256(text).hexdigest()}).encode("utf-8", "surrogateescape")

    return {
        "run.json": (out / "run.json", plain),
        "commit": (sorted((out / "commits").iterdir())[1], sealed),
        "control.json": (out / "control.json", plain),
        "checkpoint": (out / "_writer" / "checkpoint.json", sealed),
        "generation": (out / "manifest" / "gen-0001.json", sealed),
    }


@pytest.mark.parametrize("form", ["run.json", "commit", "control.json", "checkpoint", "generation"])
def test_no_value_of_a_record_is_anything_but_an_error_of_ours(out: Path, form: str) -> None:
    layout, units = Layout(out), load_run(out).units
    checkpoint.save(layout, CommitLog(layout).replay(units))
    save_control(layout, Control())
    append(layout.manifest, generation_after(load_run(out)), temporary=layout.temporary)
    path, encode = _bodies(out)[form]
    before = path.read_bytes()

    def read() -> None:
        info = load_run(out)
        load_control(layout)
        checkpoint.load(layout, info.units)
        CommitLog(layout).replay(info.units)

    read()
    body = json.loads(before)
    texts = [b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 10_000]
    for name in body:
        texts += [encode({**copy.deepcopy(body), name: value}) for value in HOSTILE_VALUES]
        texts.append(encode({key: value for key, value in copy.deepcopy(body).items() if key != name}))
    for text in texts:
        path.write_bytes(text)
        with suppress(EmbqError):
            read()
    path.write_bytes(before)
    read()


@pytest.mark.parametrize("name", ["../../priv/a.parquet", "/etc/passwd", "a/b.parquet", "", ".parquet", "x" * 5_000])
def test_a_segment_of_the_manifest_is_a_name_in_its_folder(out: Path, name: str) -> None:
    body = json.loads((out / "run.json").read_bytes())
    (out / "run.json").write_text(json.dumps({**body, "segments": [name]}))
    for use in (lambda: load_run(out), lambda: Manifest(Layout(out))):
        with pytest.raises(OutputError, match="malformed"):
            use()


@pytest.mark.parametrize("column", ["unit_id", "kind", "source", "description"])
def test_no_segment_of_the_manifest_is_anything_but_an_error_of_ours(out: Path, column: str) -> None:
    (path,) = (out / "manifest").glob("*.parquet")
    table = pq.read_table(path)
    at, count = table.column_names.index(column), table.num_rows
    others: list[list[Any]] = [[7] * count, [None] * count, [[1]] * count, [b"[]"] * count, [b"{}"] * count]
    for tampered in (
        table.drop_columns([column]),
        *(table.set_column(at, column, pa.array(cells)) for cells in others),
    ):
        pq.write_table(tampered, path)
        with suppress(EmbqError):
            manifest = Manifest(Layout(out))
            for u in range(len(manifest)):
                with suppress(EmbqError):
                    manifest.unit(u)
                with suppress(EmbqError):
                    manifest.unit_id(u)
            with suppress(EmbqError):
                verify(out, mode="quick")


def test_columns_of_a_part_that_are_in_another_file_are_not_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}] * 3)], format="hdf5")
    part = file_path(out)
    assert Hdf5Part(part).rows == 3
    with h5py.File(tmp_path / "secret.h5", "w") as secret:
        secret["caption"] = ["secret"] * 3
    (tmp_path / "secret.bin").write_bytes(b"\7" * 24)
    changes: dict[str, Callable[[Any], None]] = {
        "caption": lambda file: file.__setitem__("caption", h5py.ExternalLink(str(tmp_path / "secret.h5"), "caption")),
        "key": lambda file: file.__setitem__("key", h5py.SoftLink("/caption")),
        "ordinal": lambda file: file.create_dataset(
            "ordinal", (3,), "i8", external=[(str(tmp_path / "secret.bin"), 0, 24)]
        ),
    }
    for column, change in changes.items():
        tampered = shutil.copyfile(part, tmp_path / f"{column}.h5")
        with h5py.File(tampered, "r+") as file:
            del file[column]
            change(file)
        with pytest.raises(ValueError, match=f"{column} is (no dataset of the file itself|stored in another file)"):
            Hdf5Part(tampered)


@pytest.mark.parametrize(
    ("column", "options"),
    [
        ("caption", {"use_dictionary": ["caption"]}),
        ("caption", {"column_encoding": {"caption": "DELTA_BYTE_ARRAY"}, "use_dictionary": False}),
        ("unit_id", {"use_dictionary": ["unit_id"]}),
        ("caption", {"use_dictionary": False}),
    ],
    ids=["dictionary", "delta", "unit_id", "compressed"],
)
def test_a_small_part_takes_no_large_memory(
    tmp_path: Path, column: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.core.formats.parquet.LARGE_BYTES", 1 << 20)
    path, rows = tmp_path / "part.parquet", 300
    table = pa.table({"id": range(rows), "caption": ["a"] * rows, "unit_id": ["u"] * rows})
    table = table.set_column(table.column_names.index(column), column, pa.array(["x" * 100_000] * rows))
    pq.write_table(table, path, compression="zstd", **options)
    assert path.stat().st_size < 100_000
    most = 0
    with suppress(ValueError):
        most = max(piece.nbytes for piece in ParquetPart(path).tables(["id", column]))
    assert most < 2 << 20


@pytest.mark.parametrize("kind", [{"dtype": "S100000", "chunks": (3,)}, {"dtype": "S9", "chunks": (1 << 27,)}])
def test_a_small_hdf5_part_takes_no_large_memory(tmp_path: Path, kind: dict[str, Any]) -> None:
    h5py = pytest.importorskip("h5py")
    part = file_path(
        build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}] * 3)], format="hdf5")
    )
    with h5py.File(part, "r+") as file:
        del file["unit_id"]
        file.create_dataset("unit_id", shape=(3,), maxshape=(None,), compression="gzip", **kind)
    with pytest.raises(ValueError, match="unit_id takes more than"):
        Hdf5Part(part)


RUN_AND_TELL_PEAK = """
import sys
from pathlib import Path
from embq.app.cli.entry_point import cli
try:
    cli.main(sys.argv[1:], standalone_mode=False)
except Exception as error:
    print(error)
peak_kb = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print("\\nPEAK", int(peak_kb) >> 10)
"""


def peak_mb(*arguments: str | Path) -> tuple[int, str]:
    """(peak memory in MB, output) of a verb in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", RUN_AND_TELL_PEAK, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    return int(ended.stdout.rpartition("PEAK ")[2]), ended.stdout + ended.stderr


def resealed(out: Path, rows: int) -> None:
    """Give the record of the changed part its size, its hash and so many rows."""
    content = file_path(out).read_bytes()
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "rows": rows}
    reseal(
        out, lambda commit: replace(commit, files=tuple(replace(f, **facts) if f.of_rows else f for f in commit.files))
    )


def with_compressed_caption(part: Path) -> None:
    """Three texts of 300 MB each, which zstd makes 90 kB of."""
    with pa.ipc.open_file(part) as reader:
        table = reader.read_all()
    at = table.column_names.index("caption")
    texts = pa.array(["x" * 300_000_000] * table.num_rows)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    table = table.set_column(at, table.schema.field(at), texts)
    with pa.ipc.new_file(str(part), table.schema, options=options) as writer:
        writer.write_table(table)


def with_shared_caption(part: Path) -> None:
    """One text of 400 kB that 3,000 rows name."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(part, "r+") as file:
        captions = file["caption"]
        captions[0] = "x" * 400_000
        raw = captions.id.read_direct_chunk((0,))[1]
        captions.id.write_direct_chunk((0,), raw[:16] * (len(raw) // 16))


@pytest.mark.parametrize(
    ("format_", "change", "told"),
    [("arrow", with_compressed_caption, "is compressed"), ("hdf5", with_shared_caption, "share their texts")],
    ids=["arrow", "hdf5"],
)
def test_a_small_part_of_another_makes_no_verb_take_gigabytes(
    tmp_path: Path, format_: str, change: Callable[[Path], None], told: str
) -> None:
    lines = [{"text": f"text {n}"} for n in range(3 if format_ == "arrow" else 3_000)]
    inputs = [write_jsonl(tmp_path / "texts.jsonl", lines)]
    out = build(tmp_path / "out", inputs, format=format_, unit_samples=3_000)
    change(file_path(out))
    resealed(out, len(lines))
    assert file_path(out).stat().st_size < 1_000_000
    for line in (["export", out, tmp_path / "exported", "--output-format", "parquet"], ["index", out]):
        peak, said = peak_mb(*line)
        assert told in said
        assert peak < 900, said


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.null()], ids=str)
def test_a_column_whose_rows_share_their_bytes_is_no_column_of_a_part(tmp_path: Path, kind: pa.DataType) -> None:
    """Views, dictionaries and nulls: a row costs nothing in the file, and all of its text when it is exported."""
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}] * 3)], format="arrow")
    part = file_path(out)
    with pa.ipc.open_file(part) as reader:
        table = reader.read_all()
    at = table.column_names.index("caption")
    odd = pa.nulls(3) if pa.types.is_null(kind) else pa.array(["a"] * 3).cast(kind)
    table = table.set_column(at, pa.field("caption", kind), odd)
    with pa.ipc.new_file(str(part), table.schema) as writer:
        writer.write_table(table)
    resealed(out, 3)
    with pytest.raises(OutputError, match="embq writes no such columns: caption"):
        list(row_tables(out))


# --- names of output folders ---

ODD_NAMES = ["run[1]", "*?[z]", "new\nline", "tab\t'\"\\ #", "caf\u00e9 \u4e2d", "-rf", "x\nloadmodule y"]
NO_UTF8 = b"caf\xe9"


def embq(*arguments: str | bytes | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A process of embq, as a shell starts it."""
    return subprocess.run(
        [sys.executable, "-m", "embq", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("name", ODD_NAMES)
def test_every_reader_takes_any_name_of_an_output_folder(tmp_path: Path, name: str) -> None:
    out = build(tmp_path / name, [write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "b"}])])
    (out / "parts" / "part-00000099.parquet").write_bytes(b"litter")
    assert verify(out).ok
    assert verify(out, mode="quick").ok
    assert collect(out, Settings(), must_answer=False, older_than_s=0.0, dry_run=True).orphans.files
    assert export(out, tmp_path / f"{name} exported", ExportOptions(format="npy")).rows == 2
    index = out / "index" / "embedding"
    index.mkdir(parents=True)
    (index / "CURRENT").write_text("v0001\n")
    assert resolve_index(out) == index


@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_private_server_takes_any_name_of_an_output_folder(short_tmp: Path, name: str) -> None:
    folder = short_tmp / name / "_broker"
    with EmbeddedServer(folder) as server, connect(server.url) as client:
        assert client.ping()
        assert EmbeddedServer.find(folder) == server.url


def test_a_run_is_made_in_a_folder_of_any_name(short_tmp: Path) -> None:
    inputs = write_jsonl(short_tmp / "texts.jsonl", [{"text": "a"}])
    out = short_tmp / "*?[z]\nrun[1] '\"%41\\"
    ended = embq("run", inputs, "-o", out, "-m", "stub:8", "--quiet")
    assert ended.returncode == Exit.DONE, ended.stderr.decode()
    assert verify(out).ok


@pytest.mark.parametrize(
    ("name", "environment", "why"),
    [
        (NO_UTF8, {}, "its name is not UTF-8"),
        ("caf\u00e9".encode(), {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "LC_ALL=C.UTF-8"),
        (NO_UTF8, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "its name is not UTF-8"),
    ],
    ids=["no UTF-8", "no UTF-8 locale", "neither"],
)
def test_a_name_that_no_library_takes_is_refused_at_once(
    short_tmp: Path, name: bytes, environment: dict[str, str], why: str
) -> None:
    inputs = write_jsonl(short_tmp / "texts.jsonl", [{"text": "a"}])
    out = os.fsencode(short_tmp) + b"/" + name
    ended = embq("run", inputs, "-o", out, "-m", "stub:8", "--quiet", **environment)
    said = ended.stderr.decode()
    assert ended.returncode == Exit.USAGE, said
    assert why in said
    assert "next:" in said
    assert not os.path.exists(out)


def test_every_verb_that_names_an_output_refuses_what_no_library_takes(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}])])
    renamed = tmp_path / os.fsdecode(NO_UTF8)
    out.rename(renamed)
    there = [("verify",), ("status",), ("gc",), ("failures",), ("retry",), ("resume",), ("index",), ("search", "x")]
    lines = [[verb, str(renamed), *more] for verb, *more in there]
    for line in [
        *lines,
        ["export", str(renamed), str(tmp_path / "e"), "--output-format", "npy"],
        ["serve", str(renamed)],
    ]:
        with pytest.raises(UsageError, match="its name is not UTF-8"):
            cli.main(line, standalone_mode=False)
