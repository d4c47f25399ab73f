"""Mistakes of a user and faults of their data: one clear message, the right status, and a way on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from embq.app.local.unused_runs import undone_on_error
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import InputError
from embq.producer.enqueue import prepare
from tests.e2e.check import check_complete, read_output
from tests.e2e.session import called, closed, ended, logs, succeed, write_shards, write_tar, write_texts
from tests.support.outputs.build import build, request_of
from tests.support.waiting import wait_until

DIM = 8
MODEL = f"stub:{DIM}"


def assert_refused(status: int, stdout: str, stderr: str, *, exits: int, code: str, says: str = "") -> None:
    """One message that begins with its code, one next step, nothing on stdout, no traceback."""
    assert status == exits, stderr
    assert stdout == ""
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error[")]
    assert len(errors) == 1, stderr
    assert errors[0].startswith(f"error[{code}]: "), stderr
    assert says in errors[0], stderr
    assert len([line for line in lines if line.startswith("  next:  ") and line.split("next:")[1].strip()]) == 1, stderr
    assert "Traceback" not in stderr


def assert_a_correct_run_can_be_made(root: Path, folder: Path, broker: EmbeddedServer) -> None:
    """A refused command left nothing behind that stands in the way."""
    write_texts(folder / "good.jsonl", 3)
    answer = succeed(
        "enqueue", folder / "good.jsonl", "-o", root, "-m", MODEL, "--json", environment={"EMBQ_BROKER_URL": broker.url}
    )
    assert json.loads(answer)["new"] is True


# --- the command line and the input ---


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("no-such-file.jsonl", "source_missing"),
        ("no-such-folder", "source_missing"),
        ("no-*.tar", "bad_input"),
        ("{a..5}.tar", "source_missing"),
        ("{a,b.tar", "bad_input"),
        ("nothing-inside", "empty_input"),
        ("nothing.jsonl", "empty_input"),
        ("table.csv", "table_damaged"),
        ("table.xlsx", "bad_input"),
        ("a-folder.tar", "not_a_file"),
        ("pipe:cat shard.tar", "shard_scheme_denied"),
        ("memory://example/shard.tar", "shard_scheme_denied"),
        ("images-and-shards", "bad_input"),
        ("dataset-that-names-others", "bad_input"),
    ],
)
def test_an_input_that_cannot_be_used_is_refused_at_once(short_tmp: Path, given: str, code: str) -> None:
    for folder in ("nothing-inside", "a-folder.tar"):
        (short_tmp / folder).mkdir()
    for file in ("nothing.jsonl", "table.csv", "table.xlsx"):
        (short_tmp / file).touch()
    write_shards(short_tmp / "images-and-shards", 1, 1)
    (short_tmp / "images-and-shards" / "photo.jpg").touch()
    (short_tmp / "dataset-that-names-others").mkdir()
    (short_tmp / "dataset-that-names-others" / "dataset_info.json").write_text("{}")
    listing = {"_data_files": [{"filename": "../table.arrow"}]}
    (short_tmp / "dataset-that-names-others" / "state.json").write_text(json.dumps(listing))
    root = short_tmp / "out"
    said = called("run", given, "-o", root, "-m", MODEL, cwd=short_tmp)
    assert_refused(*said, exits=65, code=code)
    assert not root.exists()
    if given.startswith("pipe:"):
        assert "s3://BUCKET/KEY" in said[2]


@pytest.mark.parametrize("verb", ["run", "enqueue"])
def test_a_missing_shard_among_others_is_named(short_tmp: Path, broker: EmbeddedServer, verb: str) -> None:
    write_shards(short_tmp / "shards", 3, 2)
    root = short_tmp / "out"
    environment = {"EMBQ_BROKER_URL": broker.url} if verb == "enqueue" else {}
    braces = short_tmp / "shards" / "{00000..00004}.tar"
    said = called(verb, braces, "-o", root, "-m", MODEL, environment=environment)
    assert_refused(*said, exits=65, code="source_missing", says="00003.tar")
    assert "2 of 5 inputs" in said[2]
    assert not root.exists()
    assert_a_correct_run_can_be_made(root, short_tmp, broker)


def test_an_input_that_this_user_may_not_read_is_refused(short_tmp: Path) -> None:
    # Root may read everything, unless it goes without that right.
    rights = "-dac_override,-dac_read_search"
    prefix = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.getuid() == 0 else []
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("root may read everything here, and cannot give up that right")
    write_texts(short_tmp / "texts.jsonl", 1)
    (short_tmp / "texts.jsonl").chmod(0)
    (short_tmp / "photos").mkdir(mode=0)
    for given in ("texts.jsonl", "photos"):
        said = ended("run", short_tmp / given, "-o", short_tmp / "out", "-m", MODEL, prefix=prefix)
        assert_refused(*said, exits=65, code="source_denied", says=given)
    assert not (short_tmp / "out").exists()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("resnet50", "unknown model"),
        ("stub:wide", "dimension"),
        ("open_clip", "not complete"),
        ("stub:8?speed", "name=value"),
    ],
)
def test_a_model_spec_that_says_nothing_is_refused_before_anything_is_planned(
    short_tmp: Path, broker: EmbeddedServer, model: str, says: str
) -> None:
    write_texts(short_tmp / "texts.jsonl", 3)
    root = short_tmp / "out"
    said = called("run", short_tmp / "texts.jsonl", "-o", root, "-m", model)
    assert_refused(*said, exits=65, code="model", says=says)
    assert_a_correct_run_can_be_made(root, short_tmp, broker)


@pytest.mark.parametrize("log", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_a_model_that_the_workers_cannot_load_ends_the_run_with_their_message(log: str, short_tmp: Path) -> None:
    texts = short_tmp / "texts.jsonl"
    write_texts(texts, 3)
    root = short_tmp / "out"
    command = ["run", texts, "-o", root, "-m", f"{MODEL}?speed=9", "--quiet"]
    said = ended(*command, environment={"EMBQ_LOG": log})
    assert_refused(*said, exits=65, code="model", says="unknown parameter 'speed'")
    assert not root.exists()
    # Of a run that was interrupted before its first commit, the next attempt is told that nothing is worth keeping.
    prepare(request_of(root, texts, models=(f"{MODEL}?ms_per_sample=9",)))
    said = called("run", texts, "-o", root, "-m", MODEL, "--quiet")
    assert_refused(*said, exits=65, code="other_run", says=f"model: {MODEL}?ms_per_sample=9 there, {MODEL} asked for")
    assert "nothing of it is committed" in said[2]


def test_options_that_make_no_sense_are_usage_errors(short_tmp: Path) -> None:
    write_texts(short_tmp / "texts.jsonl", 3)
    texts, root = short_tmp / "texts.jsonl", short_tmp / "out"
    for extra in (["--unit-size", "0"], ["--dtype", "float8"], ["--modality", "sound"], ["--no-such-option"]):
        status, stdout, stderr = called("run", texts, "-o", root, "-m", MODEL, *extra)
        assert (status, stdout) == (2, ""), stderr
        assert "Traceback" not in stderr
    assert called("run", texts, "-m", MODEL)[0] == 2
    said = called("run", texts, "-o", root, "-m", MODEL, "--modality", "image")
    assert_refused(*said, exits=65, code="bad_input", says="texts only")
    said = ended("run", texts, "-o", root, "-m", MODEL, "--devices", "tpu:0", "--quiet")
    assert_refused(*said, exits=2, code="usage", says="tpu:0")
    assert not root.exists()


# --- the broker ---


def test_a_broker_that_does_not_answer_is_named_within_seconds(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(short_tmp / "texts.jsonl", 3)
    planning = [
        [verb, str(short_tmp / "texts.jsonl"), "-o", str(short_tmp / verb), "-m", MODEL] for verb in ("enqueue", "run")
    ]
    commands = [["producer"], ["writer"], ["worker"], ["status"], *planning]
    for arguments in commands:
        url = f"unix://:secret@{short_tmp}/nobody.sock"
        if arguments[0] == "run":  # which uses a broker only when it is named
            said = called(*arguments, "--broker", url.replace(":secret@", ""))
        else:
            said = called(*arguments, environment={"EMBQ_BROKER_URL": url})
        assert_refused(*said, exits=69, code="broker", says="no broker answers")
        assert "secret" not in said[2]
        monkeypatch.setattr("embq.core.broker.client.FEW_TRIES", 1)  # one command shows how long they all try


def test_a_broker_that_would_lose_work_is_refused(own_server: EmbeddedServer, short_tmp: Path) -> None:
    write_texts(short_tmp / "texts.jsonl", 3)
    enqueue = ["enqueue", short_tmp / "texts.jsonl", "-o", short_tmp / "out", "-m", MODEL]
    with connect(own_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        for arguments in (enqueue, ["producer"], ["writer"], ["worker"]):
            said = called(*arguments, environment={"EMBQ_BROKER_URL": own_server.url})
            assert_refused(*said, exits=78, code="broker", says="maxmemory-policy is allkeys-lru")
            assert "CONFIG SET maxmemory-policy noeviction" in said[2]
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "no")
        said = ended(*enqueue, environment={"EMBQ_BROKER_URL": own_server.url})
        assert_refused(*said, exits=78, code="broker", says="append-only file is off")
        client.config_set("appendonly", "yes")
        # A server does not end before the file is whole.
        wait_until(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0)
    assert_a_correct_run_can_be_made(short_tmp / "out", short_tmp, own_server)


def test_wrong_urls_and_settings_are_refused(short_tmp: Path, broker: EmbeddedServer) -> None:
    assert_refused(*called("producer"), exits=78, code="config", says="no broker is configured")
    said = called("producer", environment={"EMBQ_BROKER_URL": "http://:secret@localhost"})
    assert_refused(*said, exits=78, code="config", says="must start with redis://")
    assert "secret" not in said[2]
    wrong = broker.url.replace("unix://:", "unix://:x")
    said = called("producer", environment={"EMBQ_BROKER_URL": wrong})
    assert_refused(*said, exits=78, code="config", says="does not take this password")
    said = called("producer", environment={"EMBQ_BROKER_URL": broker.url, "EMBQ_LEASE_S": "soon"})
    assert_refused(*said, exits=78, code="config", says="EMBQ_LEASE_S='soon'")
    said = called("producer", environment={"EMBQ_BROKER_PASSWORD_FILE": str(short_tmp / "none")})
    assert_refused(*said, exits=78, code="config", says="EMBQ_BROKER_PASSWORD_FILE")


# --- the output folder ---


def test_an_output_folder_that_holds_something_else_is_left_alone(short_tmp: Path) -> None:
    root, texts, others = short_tmp / "out", short_tmp / "texts.jsonl", short_tmp / "others.jsonl"
    write_texts(texts, 3)
    write_texts(others, 3, name="other")
    build(root, [texts])
    before = read_output(root).records

    said = called("run", others, texts, "-o", root, "-m", MODEL)
    assert_refused(*said, exits=2, code="other_inputs", says=f"{others} would be added to it")
    said = called("run", others, texts, "-o", root, "-m", MODEL, "--unit-size", "2", "--add")
    assert_refused(*said, exits=65, code="input_changed", says="texts.jsonl (the same file, cut into other units)")
    said = called("run", texts, "-o", root, "-m", "stub:9")
    assert_refused(*said, exits=65, code="other_run", says="model: stub:8 there, stub:9 asked for")
    said = called("run", texts, "-o", root, "-m", MODEL, "--dtype", "float32")
    assert_refused(*said, exits=65, code="other_run", says="dtype: float16 there, float32 asked for")
    assert f"embq resume {root}" in said[2]
    said = called("run", texts, "-o", root, "-m", MODEL, "--output-format", "npy")
    assert_refused(*said, exits=65, code="other_run", says="output format: parquet there, npy asked for")
    assert read_output(root).records == before

    foreign = short_tmp / "foreign"
    foreign.mkdir()
    (foreign / "thesis.doc").write_text("mine")
    said = called("run", texts, "-o", foreign, "-m", MODEL)
    assert_refused(*said, exits=65, code="foreign_output", says="thesis.doc")
    assert [path.name for path in foreign.iterdir()] == ["thesis.doc"]


@pytest.mark.slow
def test_a_run_whose_command_is_wrong_leaves_nothing_for_the_corrected_one_to_stumble_over(short_tmp: Path) -> None:
    root, texts, shards = short_tmp / "out", short_tmp / "texts.jsonl", short_tmp / "shards"
    write_texts(texts, 3)
    write_shards(shards, 1, 3)
    for there in (False, True):
        if there:
            root.mkdir()
        status, _, stderr = called("run", texts, "-o", root, "-m", f"{MODEL}?colour=red")  # refused by planning
        assert (status in (2, 65, 78), "Traceback" in stderr) == (True, False), stderr
        assert root.exists() is there
        assert not there or [*root.iterdir()] == [], "a folder of the user stays as it was"
        by_gpu = ("-m", f"{MODEL}?pixels=8", "--decode", "gpu", "--modality", "image", "--devices", "cpu")
        said = called("run", shards, "-o", root, *by_gpu)  # refused by a worker
        assert_refused(*said, exits=65, code="model", says="decodes by the CPU only")
        assert not root.exists()
    assert called("run", texts, "-o", root, "-m", MODEL)[0] == 0

    status, _, stderr = called("run", texts, "-o", short_tmp / "other", "-m", MODEL, "--devices", "gpu")
    assert (status, "unknown device 'gpu'" in stderr, (short_tmp / "other").exists()) == (2, True, False)


def test_a_failed_command_leaves_a_run_of_another_process_alone(short_tmp: Path) -> None:
    root, texts = short_tmp / "out", short_tmp / "texts.jsonl"
    write_texts(texts, 3)
    theirs = prepare(request_of(root, texts)).info
    for made, stays in ((None, True), (replace(theirs, run="0" * 16), True), (theirs, False)):
        with pytest.raises(InputError), undone_on_error(root, made, broker=""):
            raise InputError("no such model", code="model")
        assert root.exists() is stays


def test_a_damaged_commit_record_is_never_skipped(short_tmp: Path) -> None:
    texts = short_tmp / "texts.jsonl"
    write_texts(texts, 3)
    root = build(short_tmp / "out", [texts])
    before = listing(root)
    record = root / "commits" / "00000002.json"
    whole = record.read_bytes()
    damage: dict[str, Callable[[], object]] = {
        "changed": lambda: record.write_bytes(whole.replace(b'"rows":3', b'"rows":2')),
        "cut": lambda: record.write_bytes(whole[:-30]),
        "gone": record.unlink,
    }
    for how, verbs in {"changed": ("resume",), "cut": ("status", "verify"), "gone": ("status", "failures")}.items():
        damage[how]()
        for verb in verbs:
            said = called(verb, root)
            assert_refused(*said, exits=74, code="commit_damaged", says="00000002.json")
    record.write_bytes(whole)
    assert listing(root) == before, "nothing was overwritten"


def listing(root: Path) -> dict[str, bytes]:
    """Committed files and the plan: path -> content."""
    folders = [root / name for name in ("commits", "parts", "failures", "manifest")]
    return {str(path): path.read_bytes() for folder in folders for path in folder.iterdir()}


def test_an_output_that_cannot_be_written_is_named(short_tmp: Path, broker: EmbeddedServer) -> None:
    texts, file = short_tmp / "texts.jsonl", short_tmp / "file"
    write_texts(texts, 3)
    file.write_text("not a folder")
    said = called("run", texts, "-o", file / "out", "-m", MODEL)
    assert_refused(*said, exits=74, code="not_writable", says=str(file))
    status, stdout, stderr = called("run", texts, "-o", file, "-m", MODEL)
    assert (status, stdout) == (2, "")
    assert "is a file" in stderr
    file.unlink()
    assert_a_correct_run_can_be_made(file / "out", short_tmp, broker)


# --- storage in a mount namespace of its own ---


def in_namespace(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount; nothing of it is seen outside, and all ends with it."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("this system permits no mount namespaces")
    environment = {name: value for name, value in os.environ.items() if name != "EMBQ_BROKER_URL"}
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'embq() {{ "$PYTHON" -m embq "$@"; }}\n{script}', "sh", *map(str, arguments)],
        env={**environment, "PYTHON": sys.executable},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_read_only_output_is_refused(short_tmp: Path) -> None:
    texts, disk = short_tmp / "texts.jsonl", short_tmp / "disk"
    write_texts(texts, 3)
    disk.mkdir()
    script = f'mount -t tmpfs -o ro none "$2" && embq run "$1" -o "$2/out" -m {MODEL}'
    done = in_namespace(script, texts, disk)
    assert_refused(done.returncode, done.stdout, done.stderr, exits=74, code="not_writable", says="Read-only")


# --- the data ---


def test_samples_that_cannot_be_embedded_become_failures_and_stop_nothing(short_tmp: Path) -> None:
    root = short_tmp / "out"
    lines = [
        b'{"id": "good", "text": "a text"}',
        b'{"id": "empty", "text": ""}',
        b'{"id": "blank", "text": " \\t "}',
        b'{"id": "latin", "text": "caf\xe9"}',
        b'{"id": "half", "text": "\\ud800"}',
        b'{"id": "good", "text": "another text under the same key"}',
        b'{"id": "none", "body_text": "no column of this name"}',
        b"not json",
        b"",
        '{"id": "sch\u00f6n", "text": "stra\u00dfe"}'.encode(),
    ]
    (short_tmp / "texts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (short_tmp / "lines.txt").write_bytes(b"first\n\ncaf\xe9\nlast")
    inputs = [short_tmp / "texts.jsonl", short_tmp / "lines.txt"]

    status, stdout, stderr = ended("run", *inputs, "-o", root, "-m", MODEL, "--quiet")

    assert status == 3, stderr
    assert "in 14 = rows 4 + failures 10" in stdout
    assert f"embq failures {root}" in stdout
    assert "Traceback" not in stderr + logs(root)
    output = read_output(root)
    texts = {"good": b"a text", "sch\u00f6n": "stra\u00dfe".encode(), "lines.txt:1": b"first", "lines.txt:4": b"last"}
    failures = {
        "empty": "empty_text",
        "blank": "empty_text",
        "texts.jsonl:4": "text_not_utf8",
        "half": "text_not_utf8",
        "good": "duplicate_key",
        "none": "missing_text",
        "texts.jsonl:8": "bad_json",
        "texts.jsonl:9": "empty_text",
        "lines.txt:2": "empty_text",
        "lines.txt:3": "text_not_utf8",
    }
    assert {key: code for _, _, key, code in output.failures} == failures
    check_complete(root, texts, units=2, dim=DIM, failures=failures)

    groups = json.loads(succeed("failures", root, "--json"))["groups"]
    assert {group["code"]: group["count"] for group in groups} == Counter(failures.values())
    examples = [example for group in groups for example in group["examples"]]
    assert all(set(example) >= {"key", "unit", "source", "message"} for example in examples)
    assert "text_not_utf8" in succeed("failures", root)
    succeed("verify", root)
    # Asked again, it is the finished run, and still says that something failed.
    assert called("run", *inputs, "-o", root, "-m", MODEL)[0] == 3


def test_an_input_that_changes_after_planning_fails_whole(short_tmp: Path, broker: EmbeddedServer) -> None:
    shards, root = short_tmp / "shards", short_tmp / "out"
    expected = write_shards(shards, 4, 5)
    succeed("enqueue", shards, "-o", root, "-m", MODEL, environment={"EMBQ_BROKER_URL": broker.url})
    write_tar(shards / "00001.tar", [("x.jpg", b"another picture")])
    (shards / "00002.tar").unlink()
    with open(shards / "00003.tar", "ab") as growing:
        growing.write(bytes(512))

    status, stdout, stderr = ended("resume", root, "--quiet")

    assert status == 3, stdout + stderr
    output = read_output(root)
    assert sorted(code for _, _, _, code in output.failures) == ["shard_changed", "shard_changed", "source_missing"]
    assert set(output.keys) == {key for key in expected if key.startswith("000-")}
    assert "Traceback" not in stderr + logs(root)


@pytest.fixture
def textless(tmp_path: Path) -> Path:
    """100 lines, of which the first 60 have no text."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": 5 if i < 60 else "x"}) + "\n" for i in range(100)))
    return path


def test_a_first_unit_that_fails_whole_stops_the_run_and_a_corrected_command_replaces_it(tmp_path: Path) -> None:
    root, textless = tmp_path / "out", tmp_path / "in.jsonl"
    textless.write_text("".join(json.dumps({"id": i, "text": 5}) + "\n" for i in range(20_000)))
    options = ["--unit-size", "20", "-m", MODEL, "-o", root]
    status, stdout, stderr = ended("run", textless, *options, "--quiet")
    assert (status, "error[all_failed]: all " in stderr) == (65, True), stderr
    assert "missing_text" in stdout
    assert not closed(root)
    assert "Traceback" not in stderr

    other = tmp_path / "good.jsonl"
    write_texts(other, 30)
    assert "this command replaces it" in ended("run", other, *options)[2]
    assert len(read_output(root).keys) == 30


@pytest.mark.slow
def test_a_first_unit_that_fails_whole_is_passed_with_keep_going(textless: Path, tmp_path: Path) -> None:
    arguments = [textless, "--unit-size", "20", "-m", f"{MODEL}?ms_per_sample=100", "-o", tmp_path / "out"]
    assert ended("run", *arguments, "--quiet", "--keep-going")[0] == 3
    check = read_output(tmp_path / "out")
    assert len(check.keys) == 40


@pytest.mark.slow
def test_a_run_with_rows_or_with_files_of_others_is_not_replaced(textless: Path, tmp_path: Path) -> None:
    root, good = tmp_path / "out", tmp_path / "good.jsonl"
    write_texts(good, 30)
    succeed("run", good, "-m", MODEL, "-o", root, "--quiet")
    assert "error[other_run]" in ended("run", good, "-m", "stub:16", "-o", root)[2]
    assert len(read_output(root).keys) == 30

    failed = tmp_path / "failed"
    ended("run", textless, "--limit", "1", "--unit-size", "20", "-m", MODEL, "-o", failed, "--quiet")
    (failed / "notes.txt").write_text("mine")
    assert "error[other_run]" in ended("run", textless, "--limit", "1", "-m", "stub:16", "-o", failed)[2]
    assert (failed / "notes.txt").read_text() == "mine"


def test_a_run_of_a_broker_of_others_is_not_replaced(short_tmp: Path, broker: EmbeddedServer) -> None:
    root = short_tmp / "out"
    write_texts(short_tmp / "in.jsonl", 3)
    there = {"EMBQ_BROKER_URL": broker.url}
    succeed("enqueue", short_tmp / "in.jsonl", "-o", root, "-m", MODEL, environment=there)
    said = called("run", short_tmp / "in.jsonl", "-o", root, "-m", "stub:9")
    assert_refused(*said, exits=65, code="other_run", says="stub:8 there, stub:9 asked for")
    assert read_output(root).records == []


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize("name", ["EMBQ_OUTPUTS", "EMBQ_ROOTS"])
def test_a_place_that_the_settings_do_not_allow_is_refused_before_anything_is_written(
    name: str, dry: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"id": "1", "text": "a"}\n')
    options = ("run", source, "-o", tmp_path / "out", "-m", "stub:8", *dry)
    said = ended(*options, environment={name: str(tmp_path / "elsewhere")})
    code = {"EMBQ_OUTPUTS": "outside_outputs", "EMBQ_ROOTS": "source_denied"}[name]
    assert_refused(*said, exits=65, code=code, says=str(tmp_path / "elsewhere"))
    assert not (tmp_path / "out").exists()
