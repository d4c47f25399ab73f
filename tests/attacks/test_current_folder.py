"""No verb of embq runs code of the current folder, nor does a process that it starts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from PIL import Image

import embq
from embq.app.cli.verb_table import VERBS
from embq.core.broker.embedded import EmbeddedServer
from embq.core.process.children import die_with_parent, python, stop
from embq.core.process.current_folder import READERS
from embq.core.settings import child_environment
from tests.support.servers.guarded import guarded_server
from tests.support.waiting import wait_until

PACKAGE = Path(embq.__file__).parent
COMMAND = "from embq.app.cli import main\nif __name__ == '__main__':\n    main()\n"
"""What pip installs as `embq`."""
OTHERS = {
    *("deepspeed", "horovod", "ray", "tensorboard", "tensorboardX", "wandb"),  # used where they are installed
    *("sitecustomize", "usercustomize"),  # looked for at every start
    *("core", "producer", "worker", "writer"),  # once packages of embq
}
HEAVY = {"train"}
"""Verbs of the slow test: they import torch, in each of their processes."""
TINY = ("-m", "timm:test_resnet", "--image-size", "32", "--batch-size", "2", "--epochs", "1", "--device", "cpu")


class Trap:
    """A data folder that has every module once more; one that is run leaves a mark.

    Attributes:
        called: the verbs that were called.
    """

    def __init__(self, folder: Path) -> None:
        self.data, self.marks, script = folder / "data", folder / "marks", folder / "bin" / "embq"
        for made in (self.data, self.marks, script.parent):
            made.mkdir()
        script.write_text(COMMAND)
        mark = f"import sys\nprint(sys.orig_argv, file=open({str(self.marks)!r} + '/' + __name__, 'a'))\n"
        for name in {*sys.stdlib_module_names, *packages_distributions(), *OTHERS}:
            if name.isidentifier():
                (self.data / f"{name}.py").write_text(mark)
        # What libraries read there without importing anything: matplotlib says that it knows no such key.
        (self.data / "matplotlibrc").write_text("embq.trap: 1\n")
        if shutil.which("cc"):  # a library runs when it is loaded
            program = f'__attribute__((constructor)) void run() {{ creat("{self.marks}/libcuda", 0600); }}'
            command = ["cc", "-w", "-shared", "-fPIC", "-x", "c", "-o", str(self.data / "libcuda.so.1"), "-"]
            subprocess.run(command, input=program, text=True, check=True)
        self._start = [sys.executable, str(script)]
        caches = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
        # An entry that is empty or relative would be the current folder by the user's own wish.
        paths = [str(PACKAGE.parent), *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        self._environment = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(paths)}
        self._environment.pop("PYTHONSAFEPATH", None)
        self.called: set[str] = set()

    def embq(self, *words: str | Path, **changes: str) -> str:
        """Run a command in the folder to its end; gives its stdout."""
        done = self.run([*self._start, *map(str, words)], **changes)
        assert done.returncode == 0, f"{words}: {done.returncode}, marks {self.marked()}\n{done.stderr}"
        assert "embq.trap" not in done.stderr
        self.called.add(str(words[0]))
        return done.stdout

    def run(self, command: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
        """Run any command in the folder."""
        environment = {**self._environment, **changes}
        return subprocess.run(command, cwd=self.data, env=environment, capture_output=True, text=True, check=False)

    @contextmanager
    def started(self, *words: str, says: str, **changes: str) -> Iterator[str]:
        """A command that runs for the length of the block, once its output matches; gives the match."""
        log = self.log(words[0])
        with log.open("wb") as said:
            process = subprocess.Popen(
                [*self._start, *words],
                cwd=self.data,
                env={**self._environment, **changes},
                stdout=said,
                stderr=said,
                preexec_fn=die_with_parent,
            )
        try:
            wait_until(lambda: process.poll() is not None or re.search(says, log.read_text()))
            found = re.search(says, log.read_text())
            assert found is not None, f"{words}: {process.poll()}, marks {self.marked()}\n{log.read_text()}"
            yield found[0]
            self.called.add(words[0])
        finally:
            stop(process, 30)

    def log(self, verb: str) -> Path:
        """The output of a command that was started."""
        return self.marks.parent / f"{verb}.log"

    def marked(self) -> dict[str, str]:
        """The modules of the folder that ran, with the command lines that ran them."""
        return {path.name: path.read_text() for path in self.marks.iterdir()}


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    """A folder with traps, captions, a table and pictures."""
    trap = Trap(tmp_path)
    captions = [f"caption {number}" for number in range(8)]
    (trap.data / "captions.txt").write_text("\n".join(captions) + "\n")
    (trap.data / "captions.csv").write_text("\n".join(["text", *captions]) + "\n")
    for number in range(4):
        picture = trap.data / "pictures" / "cats" / f"{number}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(picture)
    np.save(trap.data / "query.npy", np.ones(4, np.float32))
    return trap


def use_a_run(trap: Trap) -> None:
    """The verbs that embed, and that read what was embedded."""
    trap.embq("run", "captions.txt", "captions.csv", "-o", "out", "-m", "stub:4", "--devices", "cpu")
    for verb in ("verify", "failures", "logs", "retry", "resume", "gc"):
        trap.embq(verb, "out")
    trap.embq("export", "out", "exported", "--output-format", "npy")
    trap.embq("index", "out")
    trap.embq("atlas", "out", "--no-serve")
    with trap.started("serve", "out", "--port", "0", says=r"http://\S+") as url:
        trap.embq("search", url, "--vector", "query.npy")
        trap.embq("health", "--url", f"{url}/health")


def use_a_fleet(trap: Trap, url: str) -> None:
    """Resident services, and the verbs that they serve."""
    fleet = {"EMBQ_BROKER_URL": url}
    with ExitStack() as stack:
        for service in ("producer", "writer"):
            stack.enter_context(trap.started(service, says="started", **fleet))
        trap.embq("enqueue", "pictures", "-o", "out2", "-m", "stub:4", "--modality", "image", **fleet)
        for verb in ("pause", "resume"):
            trap.embq(verb, "out2", **fleet)
        stack.enter_context(trap.started("worker", "--devices", "cpu", says="worker_started", **fleet))
        wait_until(lambda: "run_closed" in trap.log("writer").read_text())
        trap.embq("status", "out2", **fleet)
        trap.embq("enqueue", "captions.txt", "-o", "out3", "-m", "stub:4?ms_per_sample=10000", **fleet)
        trap.embq("cancel", "out3", **fleet)
    trap.embq("index", "out2")
    words = "clip-retrieval inference --input_dataset pictures --output_folder out4 --clip_model stub:4"
    trap.embq(*words.split())
    trap.embq(*["autofaiss", "build_index", "--embeddings", "out4/img_emb", "--index_path", "out4/knn.index"])
    with (
        trap.started("ui", "out2", "--port", "0", says=r"http://\S+") as page,
        urlopen(f"{page}/thumb/out2/image/0") as thumbnail,
    ):
        assert thumbnail.read(2) == b"\xff\xd8", "a JPEG of the decoder's process"


def use_a_machine(trap: Trap) -> None:
    """The verbs that look at this machine or prepare it."""
    for words in ("doctor", "config", "completion bash", "broker init secrets"):
        trap.embq(*words.split())
    trap.embq("shards", "convert", "pictures", "shards/%06d.tar", "--samples-per-shard", "2")
    with trap.started("shards", "serve", "shards", "--port", "0", says=r"http://\S+") as url:
        # Shards of a server are read by processes that multiprocessing spawns.
        trap.embq("shards", "verify", f"{url}/{{000000..000001}}.tar", "--workers", "2")
    quick = ("--counts", "1", "--records", "32", "--replicates", "2", "--devices", "cpu")
    trap.embq("bench", "workers", "-m", "stub:4", *quick)


def use_another_machine(trap: Trap, folder: Path) -> None:
    """The verb that starts workers over ssh."""
    ssh, hosts = local_ssh(folder), folder / "hosts.txt"
    hosts.write_text("gpu1\n")
    with guarded_server("valkey") as server:
        where = ("--hosts", hosts, "--ssh-command", ssh, "--broker", server.url("worker"), "--secrets", server.folder)
        trap.embq("fleet", "up", *where, "--", "--devices", "cpu")
        trap.embq("fleet", "down", *where)


def local_ssh(folder: Path) -> Path:
    """A stand-in for ssh: every host is this machine, without the part of our environment that protects."""
    ssh = folder / "ssh"
    # Asked for its configuration with -G HOST; else the last argument is a line for the shell of a host.
    ssh.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -G ] && echo hostname 127.0.0.1 && exit\n'
        "for line; do :; done\n"
        "unset PYTHONSAFEPATH\n"
        'exec sh -c "$line"\n'
    )
    ssh.chmod(0o755)
    return ssh


@pytest.mark.slow  # the tests below look at each way in which a process is started
def test_no_verb_runs_code_of_the_current_folder(trap: Trap, own_server: EmbeddedServer, short_tmp: Path) -> None:
    with ThreadPoolExecutor() as pool:
        uses = [pool.submit(use_a_run, trap), pool.submit(use_a_fleet, trap, own_server.url)]
        uses += [pool.submit(use_a_machine, trap), pool.submit(use_another_machine, trap, short_tmp)]
        for use in uses:
            use.result()
    assert not trap.marked()
    assert trap.called == {*VERBS} - HEAVY


@pytest.mark.slow
def test_no_training_runs_code_of_the_current_folder(trap: Trap, short_tmp: Path) -> None:
    trap.embq("shards", "convert", "pictures", "shards/%06d.tar", "--samples-per-shard", "2")
    ssh = local_ssh(short_tmp)
    for name, launcher in {
        "torchrun": ("--num-devices", "2"),
        "ssh": ("--hosts", "here", "--ssh-command", str(ssh)),
        **({"ray": ("--ray-address", "local")} if find_spec("ray") is not None else {}),
    }.items():
        trap.embq("train", "classify", "shards", "-o", name, *TINY, *launcher, TMPDIR=str(short_tmp))
    assert not trap.marked()
    assert trap.called >= HEAVY


def test_command_lines_of_python_are_made_in_one_place() -> None:
    made = re.compile(
        r"""sys\.(_base_)?executable|set_executable|\[\s*(PYTHON|executable|["']python[\d.]*["']),\s*(\*|["']-)"""
    )
    builders = [
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if made.search(file.read_text(encoding="utf-8"))
    ]
    assert builders == ["core/process/children.py"]


def test_a_child_and_what_multiprocessing_spawns_import_what_is_installed(trap: Trap) -> None:
    spawned = "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()"
    done = trap.run(python("-c", f"import redis; {spawned}"))
    assert (done.returncode, done.stderr, trap.marked()) == (0, "", {})


def test_what_a_library_starts_in_a_child_imports_what_is_installed(trap: Trap) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import redis'], check=True)"
    done = trap.run(python("-c", program), PYTHONSAFEPATH=child_environment()["PYTHONSAFEPATH"])
    assert (done.returncode, done.stderr, trap.marked()) == (0, "", {})


READ = """
import importlib, os, sys, threading
sys.path.insert(0, sys.argv[1])
import embq
from embq.core.process.current_folder import READERS
here = os.getcwd()
threading.Thread(target=threading.Event().wait, daemon=True).start()
for name in sys.argv[2:]:
    importlib.import_module(name)
others = []
thread = threading.Thread(target=lambda: others.append(os.getcwd()))
thread.start()
thread.join()
print(os.getcwd() == here, others == [here])
"""


def test_libraries_that_read_the_current_folder_are_imported_in_another(trap: Trap, tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    for name in READERS:
        (stubs / name).mkdir(parents=True)
        mark = f"import os\nopen({str(trap.marks)!r} + '/' + __name__, 'w').write(os.getcwd())\n"
        (stubs / name / "__init__.py").write_text(mark)
    done = trap.run(python("-c", READ, str(stubs), *READERS))
    assert (done.stdout, done.stderr) == ("True True\n", "")
    assert trap.marked() == dict.fromkeys(READERS, "/")


@pytest.mark.parametrize("is_first", [True, False])
def test_hooks_of_other_tools_see_the_libraries_that_are_imported_elsewhere(tmp_path: Path, is_first: bool) -> None:
    hook = """
import sys
class Hook:
    def find_spec(self, name, path, target=None):
        print(name) if name in READERS else None
"""
    leave_out = (
        "from embq.core.process.current_folder import READERS, leave_out_current_folder\nleave_out_current_folder()"
    )
    where = "0" if is_first else "1"
    imports = "import importlib\nfor name in ('torch', 'matplotlib'): importlib.import_module(name)"
    program = f"{leave_out}\n{hook}\nsys.meta_path.insert({where}, Hook())\n{imports}"
    ended = subprocess.run([*python(), "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert {"torch", "matplotlib"} <= set(ended.stdout.split())


def test_matplotlib_takes_no_settings_of_the_current_folder(trap: Trap) -> None:
    program = "import embq, matplotlib"
    assert "embq.trap" in trap.run([sys.executable, "-c", "import matplotlib"], PYTHONSAFEPATH="1").stderr
    assert trap.run(python("-c", program)).stderr == ""


@pytest.mark.slow  # imports torch
def test_torch_loads_no_library_of_the_current_folder(trap: Trap) -> None:
    pytest.importorskip("torch")
    done = trap.run(python("-c", "import embq, torch"))
    assert (done.returncode, trap.marked()) == (0, {})


def test_a_python_that_is_not_ours_runs_what_is_there(trap: Trap) -> None:
    trap.run([sys.executable, "-c", "import redis"])
    assert list(trap.marked()) == ["redis"]


def test_python_m_embq_imports_what_is_installed(trap: Trap) -> None:
    # What Python imports before it runs any of embq is beyond embq: the standard library, and embq itself.
    for name in {*sys.stdlib_module_names, "embq"}:
        (trap.data / f"{name}.py").unlink(missing_ok=True)
    done = trap.run([sys.executable, "-m", "embq", "--version"])
    assert (done.stdout, trap.marked()) == (f"embq, version {embq.__version__}\n", {})
