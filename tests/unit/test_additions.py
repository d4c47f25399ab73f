"""More data for a run that stands in its folder: a generation of its manifest, or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embq.app.gc.orphans import find_orphans
from embq.core.errors import InputError, OutputError
from embq.core.rows.spec import RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.run.generations import SCHEMA, Generation, read_generations
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.units import Unit, sealed
from embq.producer.additions import uncovered
from embq.producer.enqueue import Planned, Request, prepare
from embq.producer.plan import plan
from embq.producer.selection import Selection
from embq.sources.access.files import name_of
from embq.sources.reader_options import ReadOptions
from tests.e2e.check import _read_manifest
from tests.support.planning import run_at_once, snapshot
from tests.support.second_reader.checks import verify

ROOT = Path(__file__).parents[2]


def write(path: Path, lines: int, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name or path.stem} {n}\n" for n in range(lines)))


def images(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\xff\xd8" + name.encode())


def of_folder(request: Request, folder: Path) -> Request:
    return replace(request, inputs=(str(folder),))


def described(root: Path) -> list[tuple[str, int, int | None, list[str]]]:
    units = Manifest(Layout(root))
    return [(Path(unit.source).name, unit.first, unit.samples, [path for path, _ in unit.items]) for unit in units]


def violations(root: Path) -> list[str]:
    return [f"{one.where}: {one.message}" for one in verify(root).violations]


# --- what is added ---


def test_a_pattern_that_matches_more_adds_only_that(request_: Request, tmp_path: Path) -> None:
    first = prepare(request_)
    before = snapshot(request_.output)
    write(tmp_path / "in" / "aa.txt", 12)
    second = prepare(request_)
    assert (second.new, second.added, second.samples) == (False, 2, 12)
    assert (second.info.units, second.info.samples, second.info.run) == (8, 62, first.info.run)
    assert described(request_.output)[6:] == [("aa.txt", 0, 10, []), ("aa.txt", 10, 2, [])]
    after = snapshot(request_.output)
    assert before.items() <= after.items(), "what was there has changed"
    (generation,) = load_run(request_.output).added
    assert (generation.number, generation.first, generation.units, generation.inputs) == (1, 6, 2, request_.inputs)
    assert violations(request_.output) == []


def test_further_inputs_are_added_and_those_not_named_again_are_no_concern(request_: Request, tmp_path: Path) -> None:
    prepare(request_)
    write(tmp_path / "more" / "c.txt", 5)
    second = prepare(replace(request_, inputs=(str(tmp_path / "more" / "c.txt"),)))
    assert (second.added, second.warnings) == (1, ())
    write(tmp_path / "more" / "d.txt", 5)
    third = prepare(replace(request_, inputs=(str(tmp_path / "more" / "*.txt"), *request_.inputs)))
    assert (third.added, third.info.units, len(third.info.added)) == (1, 8, 2)
    assert violations(request_.output) == []


def test_a_file_that_is_named_by_another_folder_is_the_same_file(request_: Request, tmp_path: Path) -> None:
    write(tmp_path / "all" / "a" / "x.txt", 12)
    write(tmp_path / "all" / "b" / "x.txt", 12)
    folders = [
        str(tmp_path / "all" / "a"),
        str(tmp_path / "all"),
        f"{tmp_path}/*/b/*.txt",
        str(tmp_path / "all/b/x.txt"),
    ]
    added = [prepare(replace(request_, inputs=(folder,))).added for folder in folders]
    assert added == [0, 2, 0, 0], "the first plan is the run itself"
    assert len(Manifest(Layout(request_.output))) == 4
    assert violations(request_.output) == []


SPELLINGS = [
    "a.txt",
    "./a.txt",
    "../in/a.txt",
    "{tmp}/in/a.txt",
    "{tmp}//in/./a.txt",
    "a*.txt",
    "{tmp}/*/a.txt",
    "../in/{{a,a}}.txt",
]
"""Of a file, from the folder that it is in."""


@pytest.mark.parametrize("recorded", [*SPELLINGS, "../in", "../in/*.txt", "{tmp}/**/*.txt", "{{a,b}}.txt"])
def test_the_same_input_is_known_in_every_spelling_and_from_every_folder(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    other = tmp_path / "deep" / "other"
    write(other / "a.txt", 5, name="another")
    monkeypatch.chdir(tmp_path / "in")
    info = prepare(replace(request_, inputs=(recorded.format(tmp=tmp_path),))).info
    layout = Layout(request_.output)
    assert uncovered([text.format(tmp=tmp_path) for text in SPELLINGS], info.inputs, layout) == []
    monkeypatch.chdir(other)
    known = [text.format(tmp=tmp_path) for text in SPELLINGS if "{tmp}" in text]
    others = [] if "**" in recorded else [str(other / name) for name in ("a.txt", "a.txt", "a*.txt")]
    assert uncovered([*known, "a.txt", "./a.txt", "a*.txt"], info.inputs, layout) == others


@pytest.mark.parametrize(
    "inputs",
    [
        ["all/a/x.txt", "all/b/x.txt", "all/c/x.txt"],
        ["all/a/x.txt", "all/a/x.txt all/b/x.txt", "all/c/x.txt all/b/x.txt all/a/x.txt"],
        ["all/a/*.txt", "all/b/*.txt all/c/*.txt"],
        ["all/a/x.txt all/b/x.txt", "all/a/x.txt", "all/c/x.txt", "all"],
        ["all/a", "all/b", "all/?/x.txt"],
    ],
)
def test_files_of_one_name_keep_their_keys_when_others_are_added(
    request_: Request, tmp_path: Path, inputs: list[str]
) -> None:
    for name in "abc":
        write(tmp_path / "all" / name / "x.txt", 12)
    before: list[tuple[str, str]] = []
    for names in inputs:
        prepare(replace(request_, inputs=tuple(str(tmp_path / name) for name in names.split())))
        named = [(unit.unit_id, name_of(unit)) for unit in Manifest(Layout(request_.output))]
        assert named[: len(before)] == before
        before = named
    assert len(before) == 6, "two units of each, once"
    assert len({name for _, name in before}) == 3
    assert violations(request_.output) == []


def test_a_run_whose_files_have_one_name_is_gone_on_with(request_: Request, tmp_path: Path) -> None:
    """As runs of earlier versions have them: the keys that are there stay, and a new file gets one of its own."""
    paths = [str(tmp_path / "all" / name / "x.txt") for name in "abc"]
    for path in paths:
        write(Path(path), 5)
    prepare(replace(request_, inputs=tuple(paths[:2])), relocate=lambda unit: replace(unit, options=()))
    assert [name_of(unit) for unit in Manifest(Layout(request_.output))] == ["x.txt", "x.txt"]
    again = prepare(replace(request_, inputs=tuple(paths)))
    assert again.added == 1
    assert [name_of(unit) for unit in Manifest(Layout(request_.output))] == ["x.txt", "x.txt", "c/x.txt"]


def test_files_added_to_a_folder_become_units_of_their_own(request_: Request, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    images(photos, *(f"{n:02d}.jpg" for n in range(0, 30, 2)))
    asked = of_folder(request_, photos)
    prepare(asked)
    images(photos, "01.jpg", "03.jpg", "sub/x.jpg")
    assert prepare(asked).added == 1
    assert described(request_.output)[2:] == [("photos", 15, 3, ["01.jpg", "03.jpg", "sub/x.jpg"])]
    assert violations(request_.output) == []
    assert prepare(asked).added == 0


def test_nothing_new_writes_nothing(request_: Request, tmp_path: Path) -> None:
    prepare(request_)
    write(tmp_path / "in" / "c.txt", 5)
    prepare(request_)
    before = snapshot(request_.output)
    assert prepare(request_).added == 0
    assert snapshot(request_.output) == before


# --- what is refused, and what is told ---


def test_a_changed_input_is_named_and_nothing_is_added(request_: Request, tmp_path: Path) -> None:
    prepare(request_)
    before = snapshot(request_.output)
    write(tmp_path / "in" / "a.txt", 26)
    write(tmp_path / "in" / "new.txt", 5)
    with pytest.raises(InputError) as caught:
        prepare(request_)
    assert caught.value.code == "input_changed"
    assert f"{tmp_path}/in/a.txt (planned as version" in caught.value.message
    assert "b.txt" not in caught.value.message
    assert "nothing was added" in caught.value.message
    assert snapshot(request_.output) == before


def test_an_image_that_changed_is_named(request_: Request, tmp_path: Path) -> None:
    images(tmp_path / "photos", "a.jpg", "b.jpg")
    prepare(of_folder(request_, tmp_path / "photos"))
    (tmp_path / "photos" / "b.jpg").write_bytes(b"another one, and longer")
    with pytest.raises(InputError, match=r"photos/b\.jpg \(planned with 7 bytes") as caught:
        prepare(of_folder(request_, tmp_path / "photos"))
    assert "a.jpg" not in caught.value.message


def test_the_same_inputs_cut_differently_are_refused_with_the_option(request_: Request) -> None:
    prepare(request_)
    with pytest.raises(InputError, match="unit_samples: 10 there, 7 asked for") as caught:
        prepare(replace(request_, options=ReadOptions(unit_samples=7)))
    assert caught.value.code == "input_changed"


@pytest.mark.parametrize("named", ["by a pattern", "one by one"])
def test_an_input_that_vanished_is_named_and_the_others_are_added(
    request_: Request, tmp_path: Path, named: str
) -> None:
    paths = tuple(str(tmp_path / "in" / f"{name}.txt") for name in "ab")
    inputs = request_.inputs if named == "by a pattern" else paths
    prepare(replace(request_, inputs=inputs))
    (tmp_path / "in" / "a.txt").unlink()
    write(tmp_path / "in" / "c.txt", 5)
    second = prepare(replace(request_, inputs=(*inputs, str(tmp_path / "in" / "c.txt"))))
    assert second.added == 1
    told = [line for line in second.warnings if "not there any more" in line]
    assert len(told) == 1
    assert told[0].startswith(f"not there any more: {tmp_path}/in/a.txt; "), "named once"


def test_an_input_that_was_never_there_is_still_an_error(request_: Request, tmp_path: Path) -> None:
    prepare(request_)
    with pytest.raises(InputError, match=r"never\.txt is not found"):
        prepare(replace(request_, inputs=(*request_.inputs, str(tmp_path / "never.txt"))))


@pytest.mark.parametrize("change", [{"models": ("stub:5",)}, {"rows": RowSpec(dtype="float32")}, {"precision": "bf16"}])
def test_another_model_or_dtype_is_refused_before_anything_is_added(
    request_: Request, tmp_path: Path, change: dict[str, str]
) -> None:
    prepare(request_)
    write(tmp_path / "in" / "c.txt", 5)
    with pytest.raises(InputError) as caught:
        prepare(replace(request_, **change))  # type: ignore[arg-type]
    assert caught.value.code == "other_run"
    assert load_run(request_.output).added == ()


# --- selections ---


def test_a_limit_that_grows_adds_the_rest(request_: Request, tmp_path: Path) -> None:
    few = prepare(replace(request_, selection=Selection(limit=15)))
    assert (few.info.units, dict(few.info.options)["limit"]) == (2, "15")
    assert (prepare(request_).added, prepare(request_).added) == (5, 0)
    assert violations(request_.output) == []
    images(tmp_path / "photos", *(f"{n}.jpg" for n in range(9)))
    asked = replace(of_folder(request_, tmp_path / "photos"), output=tmp_path / "out2")
    assert prepare(replace(asked, selection=Selection(limit=4))).info.samples == 4
    assert prepare(asked).samples == 5
    assert violations(asked.output) == []


def test_a_sample_is_the_same_each_time_and_grows_with_the_fraction(request_: Request, tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", 5000)
    images(tmp_path / "photos", *(f"{n}.jpg" for n in range(500)))

    def taken(fraction: float, source: str) -> set[str]:
        planned = plan([source], request_.options, selection=Selection(sample=fraction))
        return {item[0] if item else f"{u.start}" for u in planned.units for item in (u.items or [()])}  # type: ignore[misc]

    for source, count in ((str(tmp_path / "in" / "a.txt"), 500), (str(tmp_path / "photos"), 500)):
        tenth, half = taken(0.1, source), taken(0.5, source)
        assert tenth == taken(0.1, source) <= half <= taken(1.0, source)
        assert count * 0.05 < len(tenth) < count * 0.15
        assert count * 0.4 < len(half) < count * 0.6


def test_patterns_take_files_and_files_of_folders(request_: Request, tmp_path: Path) -> None:
    images(tmp_path / "photos", "a/1.jpg", "a/2.png", "b/1.jpg")
    include = Selection(include=("*.jpg",), exclude=("b/*",))
    (unit,) = plan([str(tmp_path / "photos")], request_.options, selection=include).units
    assert [path for path, _ in unit.items] == ["a/1.jpg"]
    planned = plan(request_.inputs, request_.options, selection=Selection(exclude=("a.txt",)))
    assert {Path(unit.source).name for unit in planned.units} == {"b.txt"}
    with pytest.raises(InputError, match="leave none of 2 inputs"):
        plan(request_.inputs, request_.options, selection=Selection(include=("*.tar",)))


def test_a_sample_of_nothing_is_an_error_that_says_so(request_: Request) -> None:
    with pytest.raises(InputError, match="nothing is left of the inputs after --sample 1e-09"):
        prepare(replace(request_, selection=Selection(sample=1e-9)))
    assert not Layout(request_.output).run_json.exists()


# --- the record ---


def grown(request: Request, tmp_path: Path) -> Planned:
    prepare(request)
    write(tmp_path / "in" / "c.txt", 5)
    prepare(request)
    write(tmp_path / "in" / "d.txt", 5)
    return prepare(request)


def test_a_damaged_record_and_a_missing_one_stop_every_reader(request_: Request, tmp_path: Path) -> None:
    grown(request_, tmp_path)
    folder = Layout(request_.output).manifest
    whole = (folder / "gen-0001.json").read_bytes()
    (folder / "gen-0001.json").write_bytes(whole.replace(b'"units": 1', b'"units": 2'))
    with pytest.raises(OutputError, match="its hash does not match"):
        load_run(request_.output)
    (folder / "gen-0001.json").unlink()
    with pytest.raises(OutputError, match=r"it is missing, though gen-0002\.json is there"):
        load_run(request_.output)


@pytest.mark.slow
def test_the_record_with_five_digits_follows_that_with_four(tmp_path: Path) -> None:
    folder = tmp_path / "manifest"
    folder.mkdir()
    first = Generation(
        number=1,
        run="0" * 16,
        first=1,
        units=1,
        samples=1,
        digest="d",
        segments=("s.parquet",),
        inputs=("in",),
        options=(),
        version="v",
        created="",
    )
    for number in range(1, 10_002):
        record = {"schema": SCHEMA, **asdict(replace(first, number=number, first=number)), "options": {}}
        (folder / f"gen-{number:04d}.json").write_text(json.dumps(sealed(record)))
    assert sum(1 for _ in read_generations(folder)) == 10_001
    (folder / "gen-10000.json").unlink()
    with pytest.raises(OutputError, match=r"it is missing, though gen-10001\.json is there"):
        list(read_generations(folder))


def test_verify_sees_units_that_a_generation_does_not_have(request_: Request, tmp_path: Path) -> None:
    grown(request_, tmp_path)
    folder = Layout(request_.output).manifest
    one, two = (next(folder.glob(f"gen-000{n}-*.parquet")) for n in (1, 2))
    assert violations(request_.output) == []
    two.write_bytes(one.read_bytes())
    found = violations(request_.output)
    assert any("those that generation 2 has the digest of" in text for text in found)
    assert any("two of its units are the same" in text for text in found)


def test_gc_knows_segments_that_no_generation_names(request_: Request, tmp_path: Path) -> None:
    info = grown(request_, tmp_path).info
    layout = Layout(request_.output)
    named = sorted(layout.manifest.iterdir())
    (layout.manifest / "gen-0003-deadbeef-00000.parquet").write_bytes(b"half")
    (layout.temporary / "manifest-gen-0003-deadbeef-00001.parquet").write_bytes(b"half")
    found = find_orphans(layout, info, CommitLog(layout).replay(info.units), live=set, older_than_s=0)
    assert {item.path for item in found.files} == {
        "manifest/gen-0003-deadbeef-00000.parquet",
        "_tmp/manifest-gen-0003-deadbeef-00001.parquet",
    }
    prepare(request_)  # who plans next removes them as well
    assert sorted(layout.manifest.iterdir()) == named
    assert list(layout.temporary.iterdir()) == []


# --- kills ---


def unit_list(folder: Path, most: int) -> list[str]:
    """The ids of the units of a folder's texts, computed from the files and the description of a unit alone."""
    ids = []
    for path in sorted(folder.glob("*.txt")):
        status, data = path.stat(), path.read_bytes()
        starts = [0] + [at + 1 for at, byte in enumerate(data) if byte == 10]
        for first in range(0, len(starts) - 1, most):
            last = min(first + most, len(starts) - 1)
            unit = {
                "kind": "lines",
                "source": str(path),
                "start": starts[first],
                "stop": starts[last],
                "first": first,
                "samples": last - first,
                "etag": f"{status.st_mtime_ns}-{status.st_size}",
                "items": [],
                "options": [],
            }
            text = json.dumps(unit, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            ids.append(hashlib.sha256(text.encode()).hexdigest()[:32])
    return ids


CHILD = (
    "import sys\nfrom pathlib import Path\nimport embq.core.run.manifest\nembq.core.run.manifest.SEGMENT_UNITS = 50\n"
    "from embq.core.process.libraries import leave_out_pandas\nleave_out_pandas()\n"
    "from embq.producer.enqueue import Request, prepare\nfrom embq.sources.reader_options import ReadOptions\n"
    "print('ready', flush=True)\nsys.stdin.readline()\n"
    "prepare(Request(inputs=(sys.argv[1],), output=Path(sys.argv[2]), models=('stub:4',), modalities=(),"
    " precision='fp32', part_rows=1000, options=ReadOptions(unit_samples=2), version='test'))\n"
)


def kill_at_random(inputs: str, output: Path, kills: int, rng: random.Random) -> int:
    """Plan in processes of their own that are killed at random moments; gives how many were killed in time."""
    command = [sys.executable, "-c", CHILD, inputs, str(output)]
    killed, longest_s = 0, 0.3
    for _ in range(kills):
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            began = time.monotonic()
            process.stdin.write(b"go\n")
            process.stdin.flush()
            # However fast or slow this machine is at that moment: about half of them are killed in time.
            try:
                process.wait(rng.random() * longest_s)
                longest_s = (time.monotonic() - began) / 1.5
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
                longest_s *= 1.5
            assert process.wait(60) in (0, -signal.SIGKILL)
        assert_whole(output)
    return killed


def assert_whole(output: Path) -> None:
    """After a kill there is no run, or all of its manifest can be read."""
    if (output / "run.json").exists():
        ids, ends = _read_manifest(output)
        assert ends[-1] == len(ids) == load_run(output).units


@pytest.mark.slow
def test_a_plan_killed_at_random_moments_and_repeated_is_exact(request_: Request, tmp_path: Path) -> None:
    rng = random.Random(int(os.environ.get("EMBQ_TEST_SEED", "4")))
    folder = tmp_path / "in"
    asked = replace(request_, options=ReadOptions(unit_samples=2))
    for number in range(20):
        write(folder / f"first-{number:02d}.txt", 40 + number)
    wanted = unit_list(folder, 2)
    killed = kill_at_random(request_.inputs[0], request_.output, 5, rng)
    prepare(asked)
    assert _read_manifest(request_.output) == (wanted, [len(wanted)])

    # And the same while units are added: the old generation or the new one, never a mix.
    for number in range(20):
        write(folder / f"later-{number:02d}.txt", 40 + number)
    later = [id_ for id_ in unit_list(folder, 2) if id_ not in set(wanted)]
    killed += kill_at_random(request_.inputs[0], request_.output, 5, rng)
    prepare(asked)
    ids, ends = _read_manifest(request_.output)
    assert (ids, ends) == (wanted + later, [len(wanted), len(wanted + later)])
    assert killed >= 2
    names = {path.name for path in (request_.output / "manifest").iterdir()}
    named = {name for one in read_generations(request_.output / "manifest") for name in one.segments}
    assert {name for name in names if name.startswith("gen-") and name.endswith(".parquet")} == named
    assert list((request_.output / "_tmp").iterdir()) == []
    assert sum(pq.read_metadata(path).num_rows for path in request_.output.glob("manifest/*.parquet")) == len(ids)


def test_two_that_add_at_once_add_each_unit_once(request_: Request, tmp_path: Path) -> None:
    prepare(replace(request_, options=ReadOptions(unit_samples=2)))
    for number in range(20):
        write(tmp_path / "in" / f"later-{number:02d}.txt", 40)
    run_at_once([sys.executable, "-c", CHILD, request_.inputs[0], str(request_.output)], 3, cwd=ROOT)
    ids, ends = _read_manifest(request_.output)
    assert sorted(ids) == sorted(unit_list(tmp_path / "in", 2))
    assert len(ends) == 2


def test_a_unit_that_is_known_is_the_same_unit(request_: Request) -> None:
    """The list that the kills are judged by is that of a plan."""
    prepare(request_)
    units: list[Unit] = list(Manifest(Layout(request_.output)))
    assert [unit.unit_id for unit in units] == unit_list(Path(request_.inputs[0]).parent, 10)
