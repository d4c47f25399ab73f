"""Rights of the worker in the stack of containers, which reads inputs that others name and runs their models."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import SourceError
from embq.core.run.layout import Layout
from embq.core.run.reader import row_tables
from embq.core.settings import Settings
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.e2e.services import DIM, Services
from tests.e2e.session import closed, started, write_texts

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker-compose.yml", "compose.worker.yml")
NAMESPACE = ("unshare", "--mount", "sh", "-c")


def services_of(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]
    return found


@pytest.mark.parametrize(
    ("file", "name"),
    [(FILES[0], "worker"), (FILES[0], "embq"), (FILES[1], "worker")],
)
def test_the_stack_reads_below_data_and_out_alone(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop's upload names a file of the box's credentials."""
    secret = tmp_path / "credentials"
    secret.write_text('{"text": "aws_secret_access_key"}\n')
    found = re.fullmatch(r"\$\{EMBQ_ROOTS:?-(.*)\}", services_of(file)[name]["environment"]["EMBQ_ROOTS"])
    assert found is not None
    monkeypatch.setenv("EMBQ_ROOTS", found[1])
    (unit,) = SOURCES["jsonl"].split(str(secret), ReadOptions())
    with pytest.raises(SourceError) as caught:
        list(read(unit, Settings.from_environment().roots))
    assert caught.value.code == "source_denied"


@pytest.mark.parametrize("file", FILES)
def test_a_worker_of_the_stack_may_write_to_no_output(file: str) -> None:
    """The worker has /out read-write under the writer's uid."""
    worker = services_of(file)["worker"]
    mounts = {line.split(":")[-2 if line.endswith(":ro") else -1]: line.endswith(":ro") for line in worker["volumes"]}
    assert {target for target, only_read in mounts.items() if not only_read} <= {"/staging", "/models"}
    if "/out" in mounts:
        writer = services_of(file)["writer"]
        assert worker["environment"]["EMBQ_STAGING"] == writer["environment"]["EMBQ_STAGING"] == "/staging"
        assert "staging:/staging" in worker["volumes"]
        assert "staging:/staging" in writer["volumes"]


def _may_mount() -> bool:
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    return tried is not None and tried.returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="needs root and unshare, to mount the output read-only")
def test_a_worker_that_cannot_write_to_the_output_hands_files_over_all_the_same(
    own_server: EmbeddedServer, short_tmp: Path
) -> None:
    """Only the staging folder is writable."""
    out, staging, texts = short_tmp / "out", short_tmp / "staging", short_tmp / "texts.jsonl"
    out.mkdir()
    expected = write_texts(texts, 20)
    mount = f'mount --bind {out} {out} && mount -o remount,bind,ro {out} && exec "$0" "$@"'
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("writer", "producer"), environment={"EMBQ_STAGING": str(staging)})
        worker = stack.enter_context(
            started(
                *("worker", "--devices", "cpu", "--transport", "staging"),
                prefix=(*NAMESPACE, mount),
                environment=services.environment,
            )
        )
        services.call("enqueue", texts, "-o", out / "run", "-m", f"stub:{DIM}", "--unit-size", "5")
        services.until(lambda: closed(out / "run"))
        assert json.loads(services.call("failures", out / "run", "--json"))["groups"] == []
        assert "Traceback" not in worker.stderr
    keys = [key for table in row_tables(Layout(out / "run").root) for key in table["key"].to_pylist()]
    assert sorted(keys) == sorted(expected)
    assert [path.name for path in staging.glob("embq-*/.*")] == [".shared"]
