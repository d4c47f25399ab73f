"""Allowed places of outputs, and inputs that must not travel: EMBQ_OUTPUTS, and secrets in URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.errors import ConfigError, InputError, UsageError
from embq.core.run.layout import ENTRIES, MARKS, run_above
from embq.core.settings import Settings
from embq.core.storage.paths import Outputs
from embq.producer.announce import refuse_secrets

# --- outputs ---


def allowed(output: str | Path, *roots: str | Path) -> bool:
    try:
        Outputs([str(root) for root in roots]).check(str(output))
    except InputError:
        return False
    return True


def test_a_refusal_says_what_is_allowed() -> None:
    with pytest.raises(
        InputError, match=r"/etc is outside of where outputs may lie here \(/out, s3://b/p\)"
    ) as refused:
        Outputs(["/out", "s3://b/p"]).check("/etc")
    assert refused.value.code == "outside_outputs"
    assert "EMBQ_OUTPUTS" in refused.value.next_step


def test_without_roots_every_output_is_allowed() -> None:
    assert allowed("/anywhere")
    assert allowed("s3://bucket/anywhere")


def test_a_root_and_what_is_below_it_is_allowed_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "out"
    assert allowed(root, root)
    assert allowed(root / "a" / "b", tmp_path / "other", root)
    assert not allowed(tmp_path, root)
    assert not allowed(tmp_path / "out2", root)
    assert not allowed("/", root)


def test_dots_do_not_lead_out(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert not allowed(f"{tmp_path}/out/../etc", tmp_path / "out")
    assert not allowed(f"{tmp_path}/out/a/../../etc", tmp_path / "out")
    assert allowed(f"{tmp_path}/out/a/../b", tmp_path / "out")


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "inner").symlink_to(root / "a")
    (root / "loop").symlink_to(root / "loop")
    assert not allowed(root / "link", root)
    assert not allowed(root / "link" / "a", root)
    assert allowed(root / "inner" / "b", root)
    # `link/..` is where the link leads to, and not where it stands.
    assert not allowed(f"{root}/link/../x", root)


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    assert allowed(tmp_path / "out" / "a", tmp_path / "out")
    assert allowed(tmp_path / "real" / "a", tmp_path / "out")


@pytest.mark.parametrize(
    ("output", "is_allowed"),
    [
        ("s3://bucket/embq", True),
        ("s3://bucket/embq/notes", True),
        ("s3a://bucket/embq/notes/", True),
        ("s3://bucket/embq2", False),
        ("s3://bucket", False),
        ("s3://bucket2/embq", False),
        ("gs://bucket/embq", False),
        ("s3://bucket/embq/../x", False),
        ("s3://user:secret@bucket/embq", False),
        ("/bucket/embq", False),
    ],
)
def test_urls_are_compared_by_their_parts(output: str, is_allowed: bool) -> None:
    assert allowed(output, "s3://bucket/embq") is is_allowed


def test_a_path_is_in_no_url_and_a_path_with_a_zero_byte_nowhere() -> None:
    assert not allowed("s3://bucket/embq", "/out")
    assert not allowed("/out/\0", "/out")


def test_the_roots_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBQ_OUTPUTS", "/out:s3://bucket/embq:/data/more")
    assert Settings.from_environment().outputs == ("/out", "s3://bucket/embq", "/data/more")


def test_a_root_that_can_hold_no_output_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="EMBQ_OUTPUTS names http://h/p"):
        Outputs(["/out", "http://h/p"])


# --- inputs ---


@pytest.mark.parametrize(
    "url",
    [
        "https://ann:hunter2@example.org/{000..099}.tar",
        "https://:hunter2@example.org/a.tar",
        "sftp://ann:hunter2@example.org:22/a.tar",
        "https://b.s3.amazonaws.com/a.tar?X-Amz-Algorithm=AWS4&X-Amz-Credential=AK%2F1&X-Amz-Signature=hunter2",
        "https://b.s3.amazonaws.com/a.tar?AWSAccessKeyId=AK&Signature=hunter2&Expires=1",
        "https://storage.googleapis.com/b/a.tar?x-goog-signature=hunter2",
        "https://a.blob.core.windows.net/c/a.tar?sv=2024-01-01&sig=hunter2",
        "https://example.org/a.tar?access_token=hunter2",
        "https://example.org/a.tar?x=1&token=hunter2",
        "https://example.org/a.tar?api_key=hunter2",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        refuse_secrets(["plain.tar", url])
    assert refused.value.code == "secret_in_url"
    assert "hunter2" not in refused.value.message + refused.value.next_step
    assert "a.tar" in refused.value.message or "{000..099}.tar" in refused.value.message
    assert refused.value.next_step


@pytest.mark.parametrize(
    "text",
    [
        "shards/{000..099}.tar",
        "s3://bucket/shards/00.tar",
        "https://example.org:8443/a@b/00.tar",
        "https://example.org/00.tar?versionId=3",
        "hdfs://ann@namenode:8020/shards",
        "/data/password=x/token=y.tar",
        "hf://datasets/user/name@main/a.parquet",
    ],
)
def test_other_inputs_are_taken(text: str) -> None:
    refuse_secrets([text])


@pytest.mark.parametrize("entry", sorted(ENTRIES - MARKS))
def test_a_folder_of_somebody_elses_is_no_part_of_a_run(tmp_path: Path, entry: str) -> None:
    inner = tmp_path / entry / "below"
    inner.mkdir(parents=True)
    (tmp_path / "run.json").write_text("{}")  # of another tool
    assert run_above(inner) is None
    (tmp_path / "manifest").mkdir()
    assert run_above(inner) == tmp_path
