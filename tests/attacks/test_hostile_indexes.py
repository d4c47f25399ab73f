"""Folders of vectors, indexes and maps by somebody else: names that lead elsewhere, files that are none, and small
files that would take any memory."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import embq
from embq.app.cli.entry_point import cli
from embq.app.local import worker_choices
from embq.app.output.output import Output
from embq.app.verbs.run_control import resume
from embq.core.errors import EmbqError, InputError, OutputError, UsageError
from embq.core.formats.base import COLUMNS
from embq.core.formats.hdf5_dataset import join_parts
from embq.core.process.limits import cores
from embq.core.run.commit_log import CommitLog
from embq.core.run.control import load_control
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import row_tables
from embq.core.run.run_info import USUAL_BATCH_SIZE, WorkerDefaults, load_run
from embq.core.run.standing_failures import standing_failures
from embq.index.atlas.map_file import MapOptions, make_map, map_path, read_info
from embq.index.change.deletes import delete
from embq.index.collection.opening import open_collection
from embq.index.commands.build import index_folder
from embq.index.index_files.files import attempted, read_arrays
from embq.index.index_files.identity import Identity
from embq.index.index_files.version import read_current, resolve_index
from embq.index.searcher import Searcher
from embq.retrieval.serving.served_index import ServedIndex
from embq.retrieval.ui.map.data import LoadedMap
from embq.training.classify.failures import FailureList
from embq.training.data.batch import Failure
from embq.training.openclip import checkpoints
from embq.training.openclip import log as openclip_log
from embq.training.openclip.checkpoints import Arguments
from embq.training.run import journal
from embq.training.run.folder import RunFolder, exclusive
from embq.training.shards import sizes
from embq.worker.supervisor.protocol import WorkerOptions
from tests.indexer.indexes_that_grow import copy_of, grown, make_index
from tests.support.outputs.build import build, write_jsonl
from tests.support.second_reader.checks import verify

NAMES = ["../x", "../../../x", "/abs", "a/../../b", "a/b", ".", "..", "", "x" * 300, "a\\b", "a\nb", "a\0b", "a\ud800"]


def tree(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every entry below a folder, with what would tell a change of it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns if path.is_file() else 0, data)
    return found


@contextmanager
def nothing_changes(folder: Path, *, but: Path) -> Iterator[None]:
    """Fail if anything below a folder changes, but for what is in another one."""

    def outside() -> dict[str, tuple[int, int, bytes]]:
        return {path: entry for path, entry in tree(folder).items() if not path.startswith(str(but))}

    before = outside()
    yield
    assert outside() == before


# --- names ---


def vectors_called(folder: Path, kind: str, name: str) -> None:
    """A folder with a file of 50 vectors in a column of this name; ValueError or the like if the format has none."""
    folder.mkdir(parents=True)
    matrix = np.random.default_rng(0).standard_normal((50, 8), np.float32)
    if kind == "hdf5":
        with pytest.importorskip("h5py").File(folder / "a.h5", "w") as file:
            file.attrs[COLUMNS] = json.dumps([[name, name, False]])
            file[name] = matrix
    else:
        column = pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), 8)
        pq.write_table(pa.table({name: column}), folder / "a.parquet")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["parquet", "hdf5", "option"])
def test_the_index_of_a_folder_of_vectors_is_in_it(tmp_path: Path, kind: str, name: str) -> None:
    root = tmp_path / "a" / "b" / "vectors"
    with suppress(ValueError, OSError, UnicodeError):
        vectors_called(root, kind, "embedding" if kind == "option" else name)
    with suppress(EmbqError):
        collection = open_collection(root, output=name if kind == "option" else None)
        folder = Path(os.path.normpath(index_folder(None, [str(root)], collection)))
        assert folder.parent == root / "index"


def test_an_index_of_a_column_that_is_called_like_a_path_changes_nothing_elsewhere(tmp_path: Path) -> None:
    root, name = tmp_path / "a" / "vectors", "../../../victim"
    (tmp_path / "victim" / "files").mkdir(parents=True)
    (tmp_path / "victim" / "files" / "mine").write_text("mine")
    vectors_called(root, "parquet", name)
    with nothing_changes(tmp_path, but=root):
        assert cli.main(["index", str(root), "--quiet", "--workers", "1"], standalone_mode=False) == 0
    assert resolve_index(root).name == ".._.._.._victim"


def test_an_index_behind_a_link_is_neither_searched_nor_written(tmp_path: Path) -> None:
    root, victim = tmp_path / "vectors", make_index(tmp_path / "victim", parts=1)
    vectors_called(root, "parquet", "embedding")
    (root / "index").mkdir()
    (root / "index" / "embedding").symlink_to(victim)
    with nothing_changes(tmp_path, but=tmp_path / "none"):
        for line in (["index", root], ["search", root, "x"], ["index", "delete", root, "--ids", "0"], ["atlas", root]):
            with pytest.raises(EmbqError, match="is a symbolic link"):
                cli.main([*map(str, line)], standalone_mode=False)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with the rows of two models."""
    folder = tmp_path_factory.mktemp("two")
    inputs = write_jsonl(folder / "texts.jsonl", [{"text": f"text {n}"} for n in range(5)])
    return build(folder / "out", [inputs], model=("one=stub:8", "two=stub:4"))


def verbs(out: Path, elsewhere: Path) -> list[list[str]]:
    """A command line for each verb that takes a folder."""
    plain = ("index", "verify", "status", "gc", "failures", "retry", "resume", "serve", "atlas")
    exports = (["--to", "tsv"], ["--to", "hf"], ["--output-format", "npy"], ["--output-format", "hdf5"])
    return [
        *([verb, str(out)] for verb in plain),
        *([["search", str(out), "x"], ["index", "dedup", str(out)], ["index", "add", str(out)]]),
        *(["export", str(out), str(elsewhere / f"e{number}"), *more] for number, more in enumerate(exports)),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_model_leads_any_verb_out_of_an_output(run_of_two: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "a" / "out"
    shutil.copytree(run_of_two, out)
    record = json.loads((out / "run.json").read_text())
    record["model"]["members"][0]["name"] = name
    (out / "run.json").write_text(json.dumps(record))
    with nothing_changes(tmp_path, but=out):
        for line in verbs(out, tmp_path) if name == "../../../x" else [["index", str(out)]]:
            with pytest.raises((EmbqError, SystemExit)):
                cli.main(line, standalone_mode=False)
        with pytest.raises(EmbqError):
            embq.open(out)


@pytest.fixture(scope="module")
def an_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with vectors, identity, deleted rows and a map."""
    index = make_index(tmp_path_factory.mktemp("index"), parts=2)
    delete(index, [], np.arange(3))
    make_map(index, MapOptions())
    return index


def named_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a record has something that becomes a path."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        if key in ("path", "name", "output") and isinstance(member, str):
            yield (*at, key)
        yield from named_in(member, (*at, key))


def check_all(index: Path) -> None:
    """Look at everything that the record of an index names."""
    version = read_current(index)
    for file in version.files():
        file.check(index)
    version.collection.check()


def test_no_name_in_the_record_of_an_index_leads_out_of_it(an_index: Path, tmp_path: Path) -> None:
    index = copy_of(an_index, tmp_path / "copy")
    path = index / read_current(index).name / "version.json"
    record = json.loads(path.read_text())
    places = list(named_in(record))
    assert len(places) > 8
    with nothing_changes(tmp_path, but=path):
        for place in places:
            for name in NAMES:
                changed = json.loads(json.dumps(record))
                target = changed
                for key in place[:-1]:
                    target = target[key]
                target[place[-1]] = name
                if not name and place == ("name",):  # that of a version which is not published
                    continue
                path.write_text(json.dumps(changed))
                with pytest.raises(EmbqError):
                    check_all(index)
    path.write_text(json.dumps(record))
    Searcher.open(index).close()


def test_no_small_file_of_a_version_is_copied_through_a_link(an_index: Path, tmp_path: Path) -> None:
    index = copy_of(an_index, tmp_path / "copy")
    (tmp_path / "secret").write_text("secret")
    (read_current(index).path / "report.json").symlink_to(tmp_path / "secret")
    delete(index, [], np.arange(5, 7))
    assert not (read_current(index).path / "report.json").exists()


@pytest.mark.parametrize("entry", ["embq.json", "metadata.tsv", "vectors.tsv", "data"])
def test_an_export_does_not_write_through_a_link_in_its_folder(run_of_two: Path, tmp_path: Path, entry: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir() if entry == "data" else victim.write_text("mine\n" * 9)
    to, name = tmp_path / "to", "one_embedding.tsv" if entry == "vectors.tsv" else entry
    to.mkdir()
    (to / name).symlink_to(victim)
    line = ["export", str(run_of_two), str(to), "--to", "hf" if entry == "data" else "tsv"]
    with nothing_changes(tmp_path, but=to), pytest.raises(EmbqError, match="is a symbolic link"):
        cli.main(line, standalone_mode=False)


# --- files that are none ---


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if the block waits for ever."""

    def late(*_: object) -> None:
        raise AssertionError("it waits for a file that never ends")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True)  # a library may wait where no handler is called
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def to_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


SPECIAL: dict[str, Callable[[Path], None]] = {"FIFO": os.mkfifo, "folder": Path.mkdir, "device": to_device}


def files_below(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]


def in_place_of_each(folder: Path, kinds: dict[str, Callable[[Path], None]], uses: list[Callable[[], object]]) -> None:
    """Call all uses with something else in the place of each file of a folder in turn; only errors of ours pass."""
    for name in files_below(folder):
        kept = folder.parent / "kept"
        for make in kinds.values():
            os.rename(folder / name, kept)
            make(folder / name)
            try:
                for use in uses:
                    with within(20), suppress(EmbqError):
                        use()
            finally:
                (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()
                os.rename(kept, folder / name)
    for use in uses:
        use()


def uses_of_a_run(out: Path) -> list[Callable[[], object]]:
    layout = Layout(out)

    def open_collections() -> None:
        open_collection(out)
        for _, rows in open_collection(out).read_vectors(0, 1):
            assert len(rows)

    return [
        lambda: load_control(layout),
        lambda: CommitLog(layout).replay(load_run(out).units),
        lambda: list(Manifest(layout)),
        lambda: verify(out, mode="quick"),
        lambda: list(row_tables(out)),
        lambda: list(standing_failures(out)),
        lambda: worker_choices.remembered(layout),
        lambda: Output(out).vectors(),
        open_collections,
    ]


@pytest.mark.parametrize("format", ["parquet", "hdf5", "npy", "arrow"])
def test_nothing_in_the_place_of_a_file_of_an_output_is_waited_for(tmp_path: Path, format: str) -> None:
    inputs = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "b"}, b"no json\n"])
    out = build(tmp_path / "out", [inputs], format=format)
    worker_choices.remember(Layout(out), {"workers": "1"})
    in_place_of_each(out, {"FIFO": os.mkfifo}, uses_of_a_run(out))


def uses_of_an_index(index: Path) -> list[Callable[[], object]]:
    def search() -> None:
        searcher = Searcher.open(index)
        searcher.rows(np.arange(5))
        searcher.close()

    return [
        search,
        lambda: ServedIndex._read_current(SimpleNamespace(path=index)),  # type: ignore[arg-type]
        lambda: attempted(index),
        lambda: LoadedMap(map_path(index), read_info(map_path(index))).colours("source"),
        lambda: grown(index),
    ]


def test_nothing_in_the_place_of_a_file_of_an_index_is_waited_for(an_index: Path, tmp_path: Path) -> None:
    index = copy_of(an_index, tmp_path / "copy")
    in_place_of_each(index, {"FIFO": os.mkfifo}, uses_of_an_index(index))


@pytest.mark.slow
def test_neither_a_folder_nor_a_device_nor_an_endless_file_is_waited_for(an_index: Path, tmp_path: Path) -> None:
    kinds = {"folder": Path.mkdir, "device": to_device, "huge": to_huge}
    index = copy_of(an_index, tmp_path / "copy")
    in_place_of_each(index, kinds, uses_of_an_index(index))
    inputs = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": "b"}, b"no json\n"])
    out = build(tmp_path / "out", [inputs])
    in_place_of_each(out, kinds, uses_of_a_run(out))


@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".h5"])
def test_a_pipe_among_vectors_is_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"a{suffix}")
    with within(20), pytest.raises(InputError):
        open_collection(tmp_path)


READERS_OF_TRAININGS: dict[str, Callable[[Path], object]] = {
    "record": lambda path: RunFolder(path.parent, path.name).read_record(),
    "lock": lambda path: exclusive(path, "busy", "wait").__enter__(),
    "journal": lambda path: list(journal.lines(path)),
    "journal that is written": journal.Journal,
    "failures": lambda path: FailureList(path, 1.0).add([Failure(shard="a", key="b", code="c", message="", samples=1)]),
    "params.txt": lambda path: Arguments.read(path),
    "out.log": openclip_log.read,
    "sizes.json": lambda path: sizes.sizes_beside(str(path.parent)),
    "checkpoint": lambda path: checkpoints._loaded(path),
}


@pytest.mark.parametrize("name", READERS_OF_TRAININGS)
def test_a_pipe_in_the_folder_of_a_training_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with within(20), pytest.raises(EmbqError):
        READERS_OF_TRAININGS[name](path)


OWN_FILES = {
    # the kernel's
    *("lab/services.py", "core/process/limits.py", "index/plan/build_options.py", "index/stages/task.py"),
    *("training/launch/member.py", "index/workers/service.py"),
    # the user's choice on the command line, which may be a pipe
    *("fleet/ssh.py", "retrieval/searching/query.py", "core/settings.py"),
    *("app/embedding/items.py", "training/classify/inputs.py"),
    # secrets of the user, caches and temporary folders of this process
    *("app/broker_admin/accounts.py", "app/broker_admin/certificates.py", "fleet/fleet.py", "fleet/member.py"),
    *("app/doctor/machine_checks.py", "index/index_files/publication.py", "index/index_files/remote.py"),
    *("training/launch/outcomes.py", "worker/embedders/query/loading.py"),
    # packages that are installed
    *("lab/texts.py", "worker/embedders/lookup.py"),
    # objects, and the helper itself
    *("core/storage/beneath.py", "core/storage/objects.py"),
}


def test_small_files_are_read_by_one_helper() -> None:
    """An `open` of a file in a folder waits for a FIFO, reads a device without end, and follows links. The exceptions
    are files that the user names, or that only the user and embq write."""
    root, found = Path(embq.__file__).parent, set()
    for path in root.rglob("*.py"):
        readers = re.findall(r"([\w)\]]+)\.read_(?:text|bytes)\(", path.read_text(encoding="utf-8"))
        if set(readers) - {"wire", "beneath"}:
            found.add(path.relative_to(root).as_posix())
    assert found == OWN_FILES


# --- HDF5 that is in other files ---


def outside(h5py: Any, folder: Path) -> dict[str, Callable[[Any, str], None]]:
    """Ways to have a dataset of an HDF5 file read another file; both hold 50 rows."""
    with h5py.File(folder / "secret.h5", "w") as secret:
        secret["embedding"] = np.full((50, 8), 7, np.float32)
        secret["key"] = ["secret"] * 50
        secret["rank"] = np.full(50, 7, np.int64)
    (folder / "secret.bin").write_bytes(b"\7" * 8 * 50 * 8)

    def external(file: Any, name: str) -> None:
        shape, dtype = ((50, 8), "f4") if name == "embedding" else ((50,), "i8")
        file.create_dataset(name, shape, dtype, external=[(str(folder / "secret.bin"), 0, 1 << 20)])

    def virtual(file: Any, name: str) -> None:
        with h5py.File(folder / "secret.h5") as secret:
            layout = h5py.VirtualLayout(secret[name].shape, secret[name].dtype)
            layout[:] = h5py.VirtualSource(secret[name])
        file.create_virtual_dataset(name, layout)

    return {
        "external link": lambda file, name: file.__setitem__(name, h5py.ExternalLink("../secret.h5", name)),
        "external storage": external,
        "virtual dataset": virtual,
    }


@pytest.mark.parametrize("name", ["embedding", "key", "rank"])
@pytest.mark.parametrize("way", ["external link", "external storage", "virtual dataset"])
def test_hdf5_vectors_are_read_from_the_file_itself_alone(tmp_path: Path, way: str, name: str) -> None:
    h5py = pytest.importorskip("h5py")
    (root := tmp_path / "vectors").mkdir()
    names = ("embedding", "key", "rank")
    with h5py.File(root / "a.h5", "w") as file:
        file.attrs[COLUMNS] = json.dumps([[name, name, False] for name in names])
        for other, values in zip(names, (np.ones((50, 8), np.float32), ["own"] * 50, range(50)), strict=True):
            if other != name:
                file[other] = values
        outside(h5py, tmp_path)[way](file, name)
    with pytest.raises(InputError):
        open_collection(root)


def test_parts_of_hdf5_are_joined_from_the_files_themselves_alone(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "a.jsonl", [{"text": "a\0b"}] * 3)], format="hdf5")
    (part,) = (out / "parts").iterdir()
    with h5py.File(tmp_path / "secret.h5", "w") as secret:
        secret["nul"] = np.full((5, 2), 7)
    with h5py.File(part, "r+") as file:
        del file["nul/caption"]
        file["nul/caption"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "nul")
    files = [file for commit in CommitLog(Layout(out)).read() for file in commit.files if file.of_rows]
    (out / "dataset.h5").unlink(missing_ok=True)
    join_parts(Layout(out), files)
    with h5py.File(out / "dataset.h5") as joined:
        assert "nul/caption" not in joined


# --- small files that would take any memory ---


def write_map(an_index: Path, path: Path, rows: int, text: str) -> None:
    """A map of so many rows, all with one text."""
    info = json.loads(pq.read_schema(map_path(an_index)).metadata[b"embq"])
    note = {b"embq": json.dumps({**info, "rows": rows}).encode()}
    same = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), [text]).cast(pa.string())
    ids, at = pa.array(np.arange(rows)), pa.array(np.zeros(rows, np.float32))
    columns = {
        "id": ids,
        "x": at,
        "y": at,
        "cluster": ids,
        **dict.fromkeys(("label", "key", "caption", "source"), same),
    }
    pq.write_table(pa.table(columns).replace_schema_metadata(note), path, compression="zstd")


PEAK = """
import sys
from pathlib import Path
from embq.retrieval.ui.map.data import LoadedMap
from embq.app.verbs.run_control import resume
from embq.index.atlas.map_file import read_info
path = Path(sys.argv[1])
def peak():  # not that of resource, which begins with the peak of the parent
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = peak()
print(len(LoadedMap(path, read_info(path)).colours("source")))
print(peak() - before)
"""


def test_a_text_that_all_rows_of_a_map_share_is_in_memory_once(an_index: Path, tmp_path: Path) -> None:
    peaks = []
    for rows in (250_000, 500_000):
        write_map(an_index, tmp_path / "map.parquet", rows, "x" * 300)
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(tmp_path / "map.parquet")], capture_output=True, text=True, check=True
        )
        peaks.append(int(done.stdout.split()[1]) >> 10)
    assert peaks[1] - peaks[0] < 50, peaks  # MB; 75 MB of text more


@pytest.mark.parametrize(("rows", "text"), [(2_000_001, "x"), (100_000, "x" * 5_000)])
def test_a_map_with_more_rows_or_longer_texts_than_a_map_has_is_refused(
    an_index: Path, tmp_path: Path, rows: int, text: str
) -> None:
    write_map(an_index, path := tmp_path / "map.parquet", rows, text)
    with pytest.raises(InputError) as caught:
        LoadedMap(path, read_info(path)).colours("source")
    assert caught.value.code == "bad_map"


def with_identity(index: Path, changed: Callable[[pa.Table], pa.Table]) -> None:
    """Replace the identity file of an index."""
    version = read_current(index)
    path = version.identity[0].check(index)
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    data = pa.BufferOutputStream()
    table = changed(table)
    with pa.ipc.new_file(data, table.schema) as writer:
        writer.write_table(table)
    record = index / version.name / "version.json"
    described = json.loads(record.read_text())
    described["identity"][0]["bytes"] = path.write_bytes(data.getvalue())
    record.write_text(json.dumps(described))
    map_path(index).unlink()


def test_a_long_text_that_rows_of_an_index_share_is_refused(an_index: Path, tmp_path: Path) -> None:
    index = copy_of(an_index, tmp_path / "copy")

    def shared(table: pa.Table) -> pa.Table:
        names = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int32), ["x" * 100_000])
        return table.set_column(table.column_names.index("source"), "source", names)

    with_identity(index, shared)
    for use in (lambda: make_map(index, MapOptions()), lambda: Searcher.open(index).rows(np.arange(3))):
        with pytest.raises(InputError, match="shared by rows") as caught:
            use()
        assert caught.value.code == "index_damaged"


def test_shared_texts_of_an_index_are_given_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.index.index_files.identity.MOST_TEXT_BYTES", 100_000)
    index = make_index(tmp_path, parts=1)
    name = "x" * 1_000

    def shared(table: pa.Table) -> pa.Table:
        names = pa.DictionaryArray.from_arrays(np.zeros(table.num_rows, np.int32), [name])
        return table.set_column(table.column_names.index("source"), "source", names)

    make_map(index, MapOptions())
    with_identity(index, shared)
    version = read_current(index)
    tables = list(Identity.open([(f.check(index), f.first_id, f.rows) for f in version.identity]).tables())
    assert [table.num_rows for table in tables] == [100] * 4
    assert pa.concat_tables(tables)["source"].to_pylist() == [name] * 400


def test_texts_of_an_index_that_are_outside_of_its_file_are_not_read(an_index: Path, tmp_path: Path) -> None:
    index = copy_of(an_index, tmp_path / "copy")

    def beyond(table: pa.Table) -> pa.Table:
        offsets = np.zeros(table.num_rows + 1, np.int32)
        offsets[1:-1:2] = 1 << 30
        keys = pa.Array.from_buffers(pa.string(), table.num_rows, [None, pa.py_buffer(offsets), pa.py_buffer(b"x")])
        return table.set_column(0, table.schema.field("id"), table["id"]).set_column(
            table.column_names.index("key"), table.schema.field("key"), keys
        )

    with_identity(index, beyond)
    for use in (
        lambda: Searcher.open(index).rows(np.arange(3)),
        lambda: make_map(index, MapOptions()),
        lambda: delete(index, ["x"], np.arange(0)),
    ):
        with pytest.raises(InputError) as caught:
            use()
        assert caught.value.code == "index_damaged"


FAR: list[dict[str, Any]] = [
    {"next_id": 1 << 40},
    {"deleted_file": {"path": "files/x", "bytes": 1 << 40, "sha256": "0" * 64}},
]


@pytest.mark.parametrize("changes", FAR, ids=["ids", "deleted"])
def test_an_index_has_no_more_rows_than_its_files(an_index: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    index = copy_of(an_index, tmp_path / "copy")
    record = index / read_current(index).name / "version.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))
    with pytest.raises(OutputError, match="rows"):
        read_current(index)


def plain(folder: Path, rows: int, columns: dict[str, Any], **options: Any) -> Path:
    """A folder with a parquet file of vectors, and columns beside them."""
    matrix = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(8 * rows, np.float32)), 8)
    pq.write_table(pa.table({"embedding": matrix, **columns}), folder / "a.parquet", compression="zstd", **options)
    return folder


LONG = "x" * 100_000
REPEATED: dict[str, Callable[[int], Any]] = {
    "text": lambda rows: pa.array([LONG] * rows),
    "list": lambda rows: pa.array([[LONG]] * rows),
    "struct": lambda rows: pa.array([{"a": LONG}] * rows),
    "map": lambda rows: pa.array([[("a", LONG)]] * rows, pa.map_(pa.string(), pa.string())),
    "binary": lambda rows: pa.array([LONG.encode()] * rows),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_texts_that_rows_of_a_parquet_file_share_are_bounded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.index.collection.parquet.REPEATED_BYTES", 10_000_000)
    for rows, is_refused in ((90, False), (180, True)):
        root = plain(tmp_path, rows, {"caption": REPEATED[kind](rows)})
        assert (root / "a.parquet").stat().st_size < 20_000
        collection = open_collection(root, id_columns=["caption"])
        if is_refused:
            with pytest.raises(InputError, match="repeated texts"):
                list(collection.read_identity(0, rows))
        else:
            assert sum(table.num_rows for table in collection.read_identity(0, rows)) == rows


def test_texts_of_their_own_may_be_as_long_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.index.collection.parquet.REPEATED_BYTES", 1_000)
    texts = [f"{n}" * 10_000 for n in range(100)]
    collection = open_collection(plain(tmp_path, 100, {"caption": pa.array(texts)}))
    assert [row["caption"] for table in collection.read_identity(0, 100) for row in table.to_pylist()] == texts


def test_delta_encoded_texts_are_bounded(tmp_path: Path) -> None:
    options = {"use_dictionary": False, "column_encoding": {"caption": "DELTA_BYTE_ARRAY"}}
    short = [f"s3://bucket/folder/{n:08d}.jpg" for n in range(200)]
    collection = open_collection(plain(tmp_path, 200, {"caption": pa.array(short)}, **options))
    assert [row["caption"] for table in collection.read_identity(0, 200) for row in table.to_pylist()] == short
    collection = open_collection(plain(tmp_path, 200, {"caption": pa.array([LONG] * 200)}, **options))
    with pytest.raises(InputError, match="delta-encoded"):
        list(collection.read_identity(0, 200))


def test_a_list_of_more_values_than_a_file_can_have_is_no_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.index.collection.parquet.INFLATED_VALUES", 1 << 16)
    pq.write_table(pa.table({"embedding": [[1.0] * (1 << 20)]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="values in"):
        open_collection(tmp_path)


def test_arrays_of_an_index_are_not_decompressed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.arange(6).reshape(2, 3), b=np.float64(2.5))
    assert read_arrays(tmp_path / "a.npz")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read_arrays(tmp_path / "a.npz")["b"] == 2.5
    np.savez_compressed(tmp_path / "b.npz", a=np.zeros(1 << 20))
    with pytest.raises(ValueError, match="compressed"):
        read_arrays(tmp_path / "b.npz")


# --- options of workers ---


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", "64"),
        ("devices", ",".join(["cpu"] * 500)),
        ("batch_size", "1000000"),
        ("threads", "1024"),
        ("prefetch", "64"),
        ("drain_timeout", "inf"),
        ("drain_timeout", "nan"),
    ],
)
def test_a_folder_does_not_say_how_much_of_this_machine_a_run_takes(
    tmp_path: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_choices, "cores", lambda: 4)
    out = tmp_path / "out"
    (out / "_writer").mkdir(parents=True)
    (out / worker_choices.FILE).write_text(json.dumps({name: value}))
    context = resume.make_context("resume", [str(out)])
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}") as caught:
        worker_choices.recall(Layout(out), context, dict(context.params))
    assert "embq resume" in caught.value.next_step
    given = resume.make_context("resume", [str(out), f"--{name.replace('_', '-')}", value])
    worker_choices.recall(Layout(out), given, dict(given.params))


def test_every_option_that_a_folder_remembers_is_bounded_or_harmless(tmp_path: Path) -> None:
    options = dict.fromkeys(worker_choices.NAMES, "auto")
    unbounded = {name for name in worker_choices.NAMES if worker_choices._usual(name, options) is None}
    assert unbounded == {"transport"}  # one of three words


def test_a_record_does_not_say_how_many_threads_a_worker_takes() -> None:
    asked = WorkerOptions(
        run="", prefetch=2, threads=2, batch_size=0, transport="auto", drain_s=1.0, version=""
    ).with_defaults(WorkerDefaults(batch_size=1 << 20, prepare_threads=1_024))
    assert asked.batch_size == USUAL_BATCH_SIZE
    assert asked.threads <= 4 * cores()
