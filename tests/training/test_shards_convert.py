"""Pictures become shards: each of them once, byte for byte, the same bytes whoever writes them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from embq.core.errors import EmbqError, InputError, OutputError, TryLaterError, UsageError
from embq.sources.formats.tar import TarSource
from embq.sources.reader_options import ReadOptions
from embq.training.shards import conversion
from embq.training.shards.conversion_plan import ConversionPlan, Layout, Pattern
from embq.training.shards.listing import class_folders, known_classes, without_classes
from embq.training.shards.lists import listed
from embq.training.shards.pictures import Listing, notes
from embq.training.shards.shard_set import open_shards
from embq.training.shards.sizes import classes_beside
from embq.training.shards.writing import checked, of_a_size
from tests.faults.kit.disk import SmallDisk
from tests.support.waiting import wait_until
from tests.training.pictures_converted import class_tree, classed, convert, plan_of, report, samples_of, shards


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """90 photographs of three classes."""
    return class_tree(tmp_path_factory.mktemp("pictures") / "tree")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}


# --- what comes out ---


def test_every_picture_is_one_sample_with_its_bytes_its_class_and_the_file_it_was(tree: Path, tmp_path: Path) -> None:
    done = convert(plan_of(classed(tree), tmp_path))
    assert (done.written, done.skipped) == (5, 0)
    samples = samples_of(tmp_path)
    assert list(samples) == [f"{number:08d}" for number in range(90)]
    files = {json.loads(sample["json"])["file"]: sample for sample in samples.values()}
    assert files.keys() == {str(path.relative_to(tree)) for path in tree.rglob("*.JPEG")}
    for name, sample in files.items():
        assert sample.keys() == {"jpeg", "cls", "json"}
        assert sample["jpeg"] == (tree / name).read_bytes()
        assert sample["cls"] == str(["cat", "dog", "owl"].index(name.partition("/")[0])).encode()
        assert json.loads(sample["json"]) == {"file": name, "class": name.partition("/")[0]}


def test_sizes_and_classes_stand_beside_the_shards_and_nothing_else_is_left(tree: Path, tmp_path: Path) -> None:
    convert(plan_of(classed(tree), tmp_path))
    shards = open_shards(str(tmp_path))
    assert shards.counts == (20, 20, 20, 20, 10)
    assert classes_beside(str(tmp_path)) == ["cat", "dog", "owl"]
    beside = {path.name for path in tmp_path.iterdir()} - {Path(url).name for url in shards.urls}
    assert beside == {"sizes.json", "classes.json", "train-conversion.json"}


def test_the_bytes_depend_neither_on_the_number_of_processes_nor_on_the_time(tree: Path, tmp_path: Path) -> None:
    for name, processes in (("one", 1), ("three", 3)):
        convert(plan_of(classed(tree), tmp_path / name), processes)
    assert digests(tmp_path / "one") == digests(tmp_path / "three")


def test_the_bytes_are_those_that_the_shard_writer_of_webdataset_writes(tree: Path, tmp_path: Path) -> None:
    import webdataset

    plan = plan_of(classed(tree), tmp_path / "ours", metadata=False)
    convert(plan)
    (tmp_path / "theirs").mkdir()
    pattern = str(tmp_path / "theirs" / "train-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=20, encoder=False, mtime=0, verbose=0) as writer:
        for number, picture in enumerate(plan.order):
            content = (tree / picture.name).read_bytes()
            writer.write({"__key__": f"{number:08d}", "jpeg": content, "cls": str(picture.label).encode()})
    assert digests(tmp_path / "ours") == digests(tmp_path / "theirs")


def test_the_order_is_one_permutation_of_the_names_by_the_seed_or_that_of_the_names(tree: Path, tmp_path: Path) -> None:
    names = [picture.name for picture in classed(tree).pictures]
    assert names == sorted(names)
    orders = {
        seed: [picture.name for picture in plan_of(classed(tree), tmp_path, seed=seed).order] for seed in (None, 0, 1)
    }
    assert orders[None] == names
    assert sorted(orders[0]) == sorted(orders[1]) == names
    assert len({tuple(order) for order in orders.values()}) == 3
    # The order of this seed, as it has to stay in later versions: shards that exist were made by it.
    assert orders[0][:3] == ["dog/p031.JPEG", "dog/p016.JPEG", "dog/p067.JPEG"]


def test_embq_takes_each_of_them_with_the_file_it_was_as_metadata(tree: Path, tmp_path: Path) -> None:
    convert(plan_of(classed(tree), tmp_path))
    source = TarSource()
    units = [unit for url in open_shards(str(tmp_path)).urls for unit in source.split(url, ReadOptions())]
    samples = [sample for unit in units for sample in source.read(unit)]
    assert [sample.error for sample in samples] == [None] * 90
    files = {json.loads(sample.metadata or "")["file"]: sample.image for sample in samples}
    assert files == {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*.JPEG")}


# --- going on ---


def test_a_conversion_that_was_killed_goes_on_and_gives_the_same_bytes(tree: Path, tmp_path: Path) -> None:
    convert(plan_of(classed(tree), tmp_path / "whole", per_shard=1))
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.training.pictures_converted import classed, plan_of\n"
        "from embq.training.shards import conversion\n"
        "left = [7]\n"
        "def wrote(_):\n"
        "    left[0] -= 1\n"
        "    left[0] or os.kill(os.getpid(), signal.SIGKILL)\n"
        "plan = plan_of(classed(Path(sys.argv[1])), Path(sys.argv[2]), per_shard=1)\n"
        "conversion.convert(plan, 'pictures', processes=2, wrote=wrote)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tree), str(tmp_path / "cut")], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = digests(tmp_path / "cut")
    assert 7 <= len(left) < 90
    assert not (tmp_path / "cut" / "sizes.json").exists()
    times = {name: (tmp_path / "cut" / name).stat().st_mtime_ns for name in left}
    again = convert(plan_of(classed(tree), tmp_path / "cut", per_shard=1))
    assert (again.written, again.skipped) == (90 - len(left), len(left))
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")
    assert times == {name: (tmp_path / "cut" / name).stat().st_mtime_ns for name in left}
    assert not [path for path in (tmp_path / "cut").iterdir() if path.name.startswith(".")]


def test_what_is_finished_is_not_written_again(tree: Path, tmp_path: Path) -> None:
    plan = plan_of(classed(tree), tmp_path)
    convert(plan)
    before = digests(tmp_path)
    assert convert(plan) == conversion.Converted(written=0, skipped=5)
    (tmp_path / "train-000002.tar").unlink()
    assert convert(plan).written == 1
    assert digests(tmp_path) == before


def test_validation_goes_beside_training_with_the_indices_of_its_classes(tree: Path, tmp_path: Path) -> None:
    convert(plan_of(classed(tree), tmp_path / "out"))
    few = class_tree(tmp_path / "few", 4, classes=("dog", "owl"))
    done = shards("convert", few, f"{tmp_path}/out/val-{{000000..}}.tar", "--no-shuffle", "--json")
    assert done.returncode == 0, done.stderr
    assert report(done)["expression"] == f"{tmp_path}/out/val-000000.tar"
    labels = [sample["cls"] for sample in samples_of(tmp_path / "out", "val-000000.tar").values()]
    assert labels == [b"1", b"1", b"2", b"2"]
    assert open_shards(str(tmp_path / "out")).samples == 94


# --- captions, lists ---


def test_captions_and_metadata_beside_pictures_and_none_of_their_folders(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "flat", 3, classes=("",))
    for number, path in enumerate(sorted(root.glob("*.JPEG"))):
        path.with_suffix(".txt").write_text(f"picture {number}\n")
    (root / "p001.json").write_text('{"licence": "CC0", "file": "another"}')
    (root / "notes.md").write_text("no picture")
    (root / "p009.txt").write_text("of no picture")
    (root / ".DS_Store").write_bytes(b"hidden")
    listing = without_classes(str(root))
    assert dict(listing.unused) == {"md": 1, "txt": 1}
    assert notes(listing)[0] == "2 other files stay behind: md (1), txt (1)"
    convert(plan_of(listing, tmp_path / "out", seed=None))
    samples = samples_of(tmp_path / "out")
    assert [sample["txt"] for sample in samples.values()] == [b"picture 0\n", b"picture 1\n", b"picture 2\n"]
    assert json.loads(samples["00000001"]["json"]) == {"licence": "CC0", "file": "p001.JPEG"}
    assert not (tmp_path / "out" / "classes.json").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("l.csv", 'path,class,caption,by\ncat/p000.JPEG,x,"a, b",me\ndog/p001.JPEG,y,c,\n'),
        ("l.tsv", "filepath\tlabel\ttitle\tby\ncat/p000.JPEG\tx\ta, b\tme\ndog/p001.JPEG\ty\tc\t\n"),
        (
            "l.jsonl",
            '{"image": "cat/p000.JPEG", "cls": "x", "text": "a, b", "by": "me"}\n'
            '{"image": "dog/p001.JPEG", "cls": "y", "text": "c", "by": ""}\n',
        ),
    ],
)
def test_a_list_names_pictures_with_classes_captions_and_more(
    tree: Path, tmp_path: Path, name: str, content: str
) -> None:
    (tree / name).write_text(content)
    listing = listed(str(tree / name), vocab=None, with_classes=True, allow_empty=False)
    convert(plan_of(listing, tmp_path, seed=None))
    first, second = samples_of(tmp_path).values()
    assert (first["txt"], first["cls"], second["txt"], second["cls"]) == (b"a, b", b"0", b"c", b"1")
    assert json.loads(first["json"]) == {"by": "me", "file": "cat/p000.JPEG", "class": "x"}
    (tree / name).unlink()


def test_a_list_of_paths_keeps_its_order_and_numbers_are_indices_of_classes(tree: Path) -> None:
    path = tree / "l.txt"
    path.write_text("owl/p002.JPEG\t10\ncat/p000.JPEG\t2\nowl/p005.JPEG\t10\n")
    listing = listed(str(path), vocab=None, with_classes=True, allow_empty=True)
    assert [picture.name for picture in listing.pictures] == ["owl/p002.JPEG", "cat/p000.JPEG", "owl/p005.JPEG"]
    assert [picture.label for picture in listing.pictures] == [10, 2, 10]
    assert listing.classes == tuple(map(str, range(11)))
    with pytest.raises(InputError, match="9 of 11 classes have no pictures: '0', '1', '3'"):
        listed(str(path), vocab=None, with_classes=True, allow_empty=False)
    path.unlink()


@pytest.mark.parametrize(
    ("labels", "known", "expected"),
    [
        (("owl", "cat"), None, (1, 0)),
        (("owl", "cat"), ("cat", "dog", "owl"), (2, 0)),
        (("2", "0"), ("cat", "dog", "owl"), (2, 0)),
        (("7", "5"), ("5", "6", "7"), (2, 0)),
    ],
)
def test_labels_of_a_list_are_names_of_classes_or_their_indices(
    tree: Path, tmp_path: Path, labels: tuple[str, str], known: tuple[str, ...] | None, expected: tuple[int, int]
) -> None:
    path = tmp_path / "l.tsv"
    path.write_text(f"path\tlabel\n{tree}/owl/p002.JPEG\t{labels[0]}\n{tree}/cat/p000.JPEG\t{labels[1]}\n")
    listing = listed(str(path), vocab=known, with_classes=True, allow_empty=False)
    assert tuple(picture.label for picture in listing.pictures) == expected
    assert listing.classes == (known or ("cat", "owl"))


# --- bad input ---


def test_an_empty_class_is_an_error_that_names_it_unless_it_is_allowed(tree: Path, tmp_path: Path) -> None:
    root = class_tree(tmp_path / "tree", 6)
    (root / "bat").mkdir()
    (root / ".cache").mkdir()
    done = shards("convert", root, f"{tmp_path}/out/t-%06d.tar")
    assert done.returncode == 65
    assert "error[empty_class]" in done.stderr
    assert "1 of 4 classes have no pictures: 'bat'" in done.stderr
    assert "next:" in done.stderr
    assert not (tmp_path / "out").exists()
    assert class_folders(str(root), vocab=None, allow_empty=True).classes == ("bat", "cat", "dog", "owl")


def test_pictures_that_cannot_be_decoded_are_left_out_and_told_with_check(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "tree", 6)
    whole = (root / "cat" / "p000.JPEG").read_bytes()
    (root / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "dog" / "page.png").write_text("<html>404</html>")
    (root / "owl" / "nothing.png").write_bytes(b"")
    done = shards("convert", root, f"{tmp_path}/out/t-%06d.tar", "--decode-images", "--json")
    assert done.returncode == 3, done.stderr
    left = {one["name"]: one["code"] for one in report(done)["left_out"]}
    assert left == {
        "owl/nothing.png": "unidentified",
        "cat/cut.jpg": "truncated",
        "dog/page.png": "unidentified",
    }
    assert open_shards(str(tmp_path / "out")).samples == 6
    record = json.loads((tmp_path / "out" / "t-conversion.json").read_text())
    assert {one["name"] for one in record["left_out"]} == left.keys()


def test_a_caption_that_is_not_text_is_found_by_check_and_else_left_as_it_is(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "flat", 2, classes=("",))
    (root / "p000.txt").write_bytes(b"caf\xe9")
    (root / "p001.txt").write_text(" \n")
    listing = of_a_size(without_classes(str(root)))
    left = checked(listing, metadata=True, processes=1, looked=lambda _: None).left_out
    assert [(one.name, one.code) for one in left] == [("p000.JPEG", "text_not_utf8"), ("p001.JPEG", "empty_text")]


def test_a_picture_that_no_archive_takes_is_left_out_and_large_ones_are_told(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "flat", 3, classes=("",))
    for name, size in (("p000", 8 << 30), ("p001", 33_000_000)):
        with open(root / f"{name}.JPEG", "ab") as file:
            file.truncate(size)
    listing = of_a_size(without_classes(str(root)))
    assert [(one.name, one.code) for one in listing.left_out] == [("p000.JPEG", "too_large")]
    assert any(note.startswith("1 pictures are larger than 32 MB") for note in notes(listing))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("out/train.tar", "no number"),
        ("out/%06d-%06d.tar", "more than one number"),
        ("out/train-%06d.zip", "must end in .tar"),
        ("s3://bucket/train-%06d.tar", "a folder of this machine"),
        ("out/a,b-%06d.tar", "cannot be said"),
        ("out/.train-%06d.tar", "hidden"),
    ],
)
def test_a_pattern_that_gives_no_shards_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Pattern.parse(pattern)
    assert caught.value.next_step


def test_numbers_that_are_too_short_for_the_shards_are_refused(tree: Path, tmp_path: Path) -> None:
    layout = Layout(pattern=Pattern.parse(f"{tmp_path}/t%d.tar"), samples_per_shard=5, seed=0, metadata=True)
    with pytest.raises(UsageError, match="18 shards need numbers of 2 digits"):
        ConversionPlan.make(classed(tree), layout)


def test_shards_of_another_conversion_or_of_nobody_are_never_mixed_with(tree: Path, tmp_path: Path) -> None:
    convert(plan_of(classed(tree), tmp_path))
    before = digests(tmp_path)
    with pytest.raises(InputError, match="seed was 0 and is 1"):
        convert(plan_of(classed(tree), tmp_path, seed=1))
    fewer = classed(tree)
    with pytest.raises(InputError, match="samples was 90 and is 89"):
        convert(plan_of(Listing(root=fewer.root, pictures=fewer.pictures[1:], classes=fewer.classes), tmp_path))
    (tmp_path / "train-conversion.json").unlink()
    with pytest.raises(InputError, match="no conversion is known"):
        convert(plan_of(classed(tree), tmp_path))
    assert digests(tmp_path) == before


def test_classes_that_other_shards_do_not_have_are_refused(tree: Path) -> None:
    with pytest.raises(InputError, match=r"1 classes are not among the 2 of classes\.json, the first is 'owl'"):
        classed(tree, known=("cat", "dog"))


def test_shards_are_not_written_among_the_pictures(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "tree", 3)
    done = shards("convert", root, f"{root}/shards/t-%06d.tar")
    assert done.returncode == 2
    assert "write the shards into a folder outside of it" in done.stderr
    assert not (root / "shards").exists()


def test_classes_of_other_shards_are_named_by_their_file(tree: Path, tmp_path: Path) -> None:
    pattern = Pattern.parse(f"{tmp_path}/out/t-%06d.tar")
    (tmp_path / "classes.json").write_text('["bat", "cat", "dog", "owl"]')
    known = known_classes(f"{tmp_path}/classes.json", pattern)
    assert {picture.label for picture in classed(tree, known).pictures} == {1, 2, 3}
    assert known_classes(None, pattern) is None
    for name, message in (("none/classes.json", "does not exist"), ("names.json", r"is not called classes\.json")):
        with pytest.raises(EmbqError, match=message):
            known_classes(f"{tmp_path}/{name}", pattern)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"cat/a.jpg": b"x", "b.jpg": b"x"}, "holds both folders and 1 pictures"),
        ({"cat/a.txt": b"x", "note.md": b"x"}, r"no pictures in this folder or below it; found: .*md \(1\)"),
        ({"cat/a.jpg": b"x", "cat/a.png": b"y", "cat/a.txt": b"z"}, "'a.jpg' and 'a.png' have one caption"),
    ],
    ids=["mixed", "none", "one stem"],
)
def test_a_folder_that_cannot_be_understood_is_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        classed(tmp_path)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no pictures"),
        ("http://host/a.jpg\n", "is not the path of a picture"),
        ("cat/p000.JPEG\tcat\ndog/p001.JPEG\n", "1 of 2 pictures have no class, the first in line 2"),
    ],
)
def test_a_list_that_cannot_be_understood_is_refused(tree: Path, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "l.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        listed(str(path), vocab=None, with_classes=True, allow_empty=False)


def test_a_picture_that_changes_under_way_stops_the_conversion(tmp_path: Path) -> None:
    plan = plan_of(classed(class_tree(tmp_path / "tree", 6)), tmp_path / "out", per_shard=2)
    (tmp_path / "tree" / plan.order[3].name).write_bytes(b"longer than it was, or shorter")
    with pytest.raises(InputError, match="when the conversion began") as caught:
        convert(plan)
    assert plan.order[3].name in caught.value.message
    assert list(digests(tmp_path / "out")) == ["train-000000.tar"]
    assert not (tmp_path / "out" / "sizes.json").exists()


def test_a_picture_that_is_gone_stops_the_conversion_and_is_named_by_whichever_process(tmp_path: Path) -> None:
    plan = plan_of(classed(class_tree(tmp_path / "tree", 6)), tmp_path / "out", per_shard=2)
    (tmp_path / "tree" / plan.order[3].name).unlink()
    with pytest.raises(InputError, match="does not exist") as caught:
        convert(plan, processes=2)
    assert (caught.value.code, plan.order[3].name in caught.value.message) == ("source_missing", True)


def test_a_disk_that_fills_up_is_told_and_the_same_command_goes_on(tree: Path, tmp_path: Path) -> None:
    plan = plan_of(classed(tree), tmp_path / "whole")
    convert(plan)
    with closing(SmallDisk(2)) as disk:
        plan = plan_of(classed(tree), disk.path / "out")
        with pytest.raises(OutputError, match="no space left") as caught:
            conversion.convert(plan, "pictures", processes=1, wrote=lambda _: disk.fill())
        assert (caught.value.code, caught.value.exit_code) == ("no_space", 74)
        disk.make_room()
        disk.leave(100_000)
        with pytest.raises(OutputError, match=r"the shards need about [0-9.]+ kB, and [0-9.]+ kB are free"):
            convert(plan)
        disk.make_room()
        assert convert(plan).skipped == 1
        assert digests(disk.path / "out") == digests(tmp_path / "whole")


def test_an_interruption_ends_it_without_a_traceback_and_the_same_command_goes_on(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "embq", "shards", "convert", str(tree), f"{out}/t-%06d.tar"]
    options = ["--samples-per-shard", "1", "--workers", "2"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, process_group=0)
    wait_until(lambda: list(out.glob("*.tar")) or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said.strip()) in ((130, "interrupted"), (0, said.strip()))
    done = shards("convert", tree, f"{out}/t-%06d.tar", *options)
    assert done.returncode == 0, done.stderr
    assert open_shards(str(out)).samples == 90
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_second_conversion_into_the_folder_has_to_wait(tree: Path, tmp_path: Path) -> None:
    plan = plan_of(classed(tree), tmp_path)

    def wrote(_: object) -> None:
        with pytest.raises(TryLaterError, match="another conversion writes there"):
            convert(plan)

    conversion.convert(plan, "pictures", processes=1, wrote=wrote)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_told(tree: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="cannot be written"):
        convert(plan_of(classed(tree), tmp_path))
    tmp_path.chmod(0o700)


def test_a_process_that_is_killed_is_told_and_the_rest_can_go_on(tree: Path, tmp_path: Path) -> None:
    plan = plan_of(classed(tree), tmp_path, per_shard=1)
    killed: list[object] = []

    def wrote(_: object) -> None:
        if not killed:
            killed.append(child := multiprocessing.active_children()[0])
            child.kill()

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a process that inherited it could not be terminated
    try:
        with pytest.raises(EmbqError, match="was killed"):
            conversion.convert(plan, "pictures", processes=2, wrote=wrote)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert convert(plan).skipped >= 1
    assert open_shards(str(tmp_path)).samples == 90


def test_pictures_are_converted_and_verified_where_neither_torch_nor_webdataset_is_there(
    tree: Path, tmp_path: Path
) -> None:
    script = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'webdataset', 'numpy', 'PIL'))\n"
        "from embq.app.cli.entry_point import run\n"
        f"sys.exit(run(['shards', 'convert', {str(tree)!r}, '{tmp_path}/t-%06d.tar'])\n"
        f"         or run(['shards', 'verify', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "ok, as sizes.json says"


def test_a_dry_run_says_what_would_be_and_writes_nothing(tree: Path, tmp_path: Path) -> None:
    done = shards("convert", tree, f"{tmp_path}/out/t-%06d.tar", "--samples-per-shard", 40, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    said = report(done)
    assert (said["shards"], said["samples"], said["classes"], said["written"]) == (3, 90, 3, 0)
    assert not (tmp_path / "out").exists()
