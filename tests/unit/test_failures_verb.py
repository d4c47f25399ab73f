"""`embq failures` groups what has no embedding by cause, with examples that a user can find again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.standing_failures import missing_samples
from tests.support.outputs.build import build, file_path, write_jsonl, write_tar


def failing_run(folder: Path) -> Path:
    """Twelve lines in four units: five blank, two without text, the rest good; and nothing else."""
    lines: list[object] = [b"\n"] * 5 + [{"id": "no-text"}, {"id": "\x1b[2Jodd"}] + [{"text": str(n)} for n in range(5)]
    return build(folder / "out", [write_jsonl(folder / "t.jsonl", lines)])


def groups(out: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """The groups that --json prints."""
    assert run(["failures", str(out), "--json"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    found: list[dict[str, object]] = report["groups"]
    return found


def test_failures_are_grouped_by_code_with_the_largest_group_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = groups(failing_run(tmp_path), capsys)

    assert [(group["code"], group["count"], group["whole_unit"]) for group in found] == [
        ("empty_text", 5, False),
        ("missing_text", 2, False),
    ]


def test_a_group_has_three_examples_at_most_with_key_unit_source_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = failing_run(tmp_path)

    examples = groups(out, capsys)[0]["examples"]

    assert isinstance(examples, list)
    assert [example["key"] for example in examples] == ["t.jsonl:1", "t.jsonl:2", "t.jsonl:3"]
    unit = Manifest(Layout(out)).unit(0)
    assert examples[0] == {
        "key": "t.jsonl:1",
        "ordinal": 0,
        "unit": unit.unit_id,
        "source": str(tmp_path / "t.jsonl"),
        "message": "the line is blank",
        "attempt": 1,
    }


def test_examples_come_from_several_files_where_one_has_too_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[object] = [b"\n" if n % 3 == 0 else {"text": "x"} for n in range(12)]
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", lines)], units_per_commit=1)

    (group,) = groups(out, capsys)

    assert group["count"] == 4
    assert isinstance(group["examples"], list)
    assert [example["key"] for example in group["examples"]] == ["t.jsonl:1", "t.jsonl:4", "t.jsonl:7"]
    assert len({example["unit"] for example in group["examples"]}) == 3


def test_units_that_failed_whole_are_a_group_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_tar(tmp_path / "a.tar", [("a.jpg", b"a"), ("b.txt", b"no image")])
    cut = tmp_path / "b.tar"
    cut.write_bytes(good.read_bytes()[:1024])
    out = build(tmp_path / "out", [good, cut])

    found = {(group["code"], group["whole_unit"]): group for group in groups(out, capsys)}

    assert set(found) == {("missing_member", False), ("shard_no_end_marker", True)}
    (example,) = found["shard_no_end_marker", True]["examples"]  # type: ignore[misc]
    assert (example["key"], example["source"]) == ("", str(cut))


def test_the_samples_of_shards_that_failed_are_counted_where_a_file_beside_them_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_tar(tmp_path / "a.tar", [(f"{n}.jpg", b"a") for n in range(5)])
    cut = [tmp_path / name for name in ("b.tar", "c.tar", "d.tar")]
    for path in cut:
        path.write_bytes(good.read_bytes()[:1024])
    (tmp_path / "sizes.json").write_text('{"b.tar": 10000, "c.tar": 234}')
    out = build(tmp_path / "out", [good, *cut], units_per_commit=1)

    (group,) = groups(out, capsys)

    assert (group["count"], group["whole_unit"], group["samples"]) == (3, True, 10_234)
    assert run(["failures", str(out)]) == Exit.DONE
    assert "at least 10,234 samples, such as" in capsys.readouterr().out


def test_of_a_shard_that_is_kept_in_part_the_rest_is_counted() -> None:
    told = "cut at byte 9; s.idx says that it has 1,004 samples; 2 samples stand before it"
    ordinals = pa.array([4, None, None, 7], pa.int64())
    table = pa.table({"ordinal": ordinals, "message": [told, told, "cut", "; a says that it has 5 samples"]})
    assert missing_samples(table) == 1_000 + 1_004
    assert missing_samples(table.slice(2, 1)) == 0


def test_the_table_has_an_example_for_each_code_and_cannot_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = failing_run(tmp_path)

    assert run(["failures", str(out)]) == Exit.DONE

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "5",
        "samples",
        "empty_text",
        "such",
        "as",
        "t.jsonl:1",
        "in",
        str(tmp_path / "t.jsonl"),
    ]
    assert lines[1].strip() == "the line is blank"
    assert lines[2].strip() == f"next: mend them in their place, then: embq retry {out} --code empty_text"
    assert lines[3].split()[:3] == ["2", "samples", "missing_text"]
    assert "\x1b" not in "".join(lines)


def test_a_run_without_failures_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", [{"text": "x"}])])

    assert run(["failures", str(out)]) == Exit.DONE
    assert capsys.readouterr().out == "no failures\n"
    assert groups(out, capsys) == []


def test_a_failures_file_that_is_gone_is_an_output_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = failing_run(tmp_path)
    file_path(out, "failures").unlink()

    assert run(["failures", str(out)]) == Exit.OUTPUT
    assert "named by a commit record and is not there" in capsys.readouterr().err
