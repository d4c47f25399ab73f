"""A container engine as tests use it: the stack in a checkout of its own, under names and ports of its own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = {"producer": "embq-producer", "writer": "embq-writer", "worker": "embq-worker-cpu"}
"""Service -> name of the image that it is built as, without GPUs."""
VERSION = "test"
"""Tag of the images that tests build."""
CPU = ("docker-compose.yml", "deploy/docker-compose.cpu.yml")
WORKER_CPU = ("compose.worker.yml", "deploy/compose.worker.cpu.yml")


def outside() -> dict[str, str]:
    """The environment without what is embq's: Compose's own variables too, and paths under which it would find us."""
    ours = ("EMBQ_", "COMPOSE_", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def compose_command() -> list[str]:
    """Command of Compose, the second generation if it is there, else the first; empty without it or an engine."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and _works(*command, "version") and _works("docker", "info"):
            return command
    return []


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, timeout=60, check=False, env=outside()).returncode == 0


def said(*command: str | Path, status: int = 0, timeout_s: float = 600, **popen: Any) -> str:
    """Run a command that ends with `status`; gives what it wrote, both streams in one."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout_s,
        check=False,
        **popen,
    )
    assert done.returncode == status, (
        f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    )
    return done.stdout


def docker(*arguments: str | Path, status: int = 0, timeout_s: float = 600) -> str:
    """A command of the engine."""
    return said("docker", *arguments, status=status, timeout_s=timeout_s).strip()


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as door:
        door.bind((address, 0))
        return int(door.getsockname()[1])


def own_ids() -> tuple[int, int]:
    """Owner of files that containers make: the user who runs the tests, or user 1000 if that is root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (1000, 1000)


def checkout(folder: Path, *, tls: bool = False) -> Path:
    """Copy the repository's files to `folder`, as a clone would have them.

    Args:
        tls: whether the broker listens with TLS as well: the image here may be one that was built without.
    """
    names = said("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY).split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (REPOSITORY / name).exists():
            shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)
    if not tls:
        conf = folder / "deploy" / "valkey.conf"
        lines = conf.read_text(encoding="utf-8").splitlines(keepends=True)
        conf.write_text("".join(line for line in lines if not line.startswith("tls-")), encoding="utf-8")
    return folder


@dataclass(slots=True)
class Stack:
    """One project of Compose in a checkout of its own.

    Attributes:
        folder: the checkout; secrets, inputs and outputs are below it as in a user's.
        files: compose files, later ones over earlier ones.
        settings: what would stand in .env.
    """

    folder: Path
    files: Sequence[str] = CPU
    settings: dict[str, str] = field(default_factory=dict)
    project: str = field(default_factory=lambda: f"embqtest{secrets.token_hex(3)}")
    broker_port: int = field(default_factory=free_port)
    tls_port: int = field(default_factory=free_port)
    ui_port: int = field(default_factory=free_port)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of Compose: of embq's variables only the source of torch and the base images."""
        given = ("EMBQ_TORCH_INDEX", "EMBQ_PYTHON_IMAGE", "EMBQ_NGINX_IMAGE", "EMBQ_BROKER_IMAGE")
        uid, gid = own_ids()
        return {
            **outside(),
            **{name: os.environ[name] for name in given if name in os.environ},
            "COMPOSE_FILE": ":".join(self.files),
            "COMPOSE_PROJECT_NAME": self.project,
            "EMBQ_VERSION": VERSION,
            "EMBQ_UID": str(uid),
            "EMBQ_GID": str(gid),
            "EMBQ_BROKER_PORT": str(self.broker_port),
            "EMBQ_BROKER_TLS_PORT": str(self.tls_port),
            "EMBQ_UI_PORT": str(self.ui_port),
            "HF_HUB_OFFLINE": "1",
            **self.settings,
        }

    def compose(self, *arguments: str | Path, status: int = 0, timeout_s: float = 600) -> str:
        """A command of Compose."""
        return said(
            *compose_command(),
            *("--project-directory", self.folder),
            *arguments,
            status=status,
            timeout_s=timeout_s,
            cwd=self.folder,
            env=self.environment,
        )

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers that run, in order of their names."""
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        found = docker("ps", "--format", "{{.Names}} {{.ID}}", *filters).splitlines()
        return [line.split()[1] for line in sorted(found)]

    def wait_for_health(self, *services: str, deadline_s: float = 180) -> None:
        """Wait until every container of these services is healthy."""
        deadline = time.monotonic() + deadline_s
        while True:
            state = {name: [health_of(one) for one in self.containers(name)] for name in services}
            if all(found and set(found) == {"healthy"} for found in state.values()):
                return
            assert time.monotonic() < deadline, f"{state}\n{self.logs(*services)}"
            time.sleep(1)

    def logs(self, *services: str) -> str:
        """Log of services."""
        return self.compose("logs", "--no-color", *services)[-12000:]

    def embq(self, *arguments: str | Path, role: str = "laptop", status: int = 0, **changes: str) -> str:
        """`embq` of this machine through the published port, as it is reached by `ssh -L`; gives what it wrote."""
        environment = {
            **os.environ,
            "EMBQ_BROKER_URL": f"redis://{role}@127.0.0.1:{self.broker_port}",
            "EMBQ_BROKER_PASSWORD_FILE": str(self.folder / "secrets" / role / "password"),
            **changes,
        }
        return said(sys.executable, "-m", "embq", *arguments, status=status, env=environment, cwd=self.folder)

    def status(self, run: str = "") -> dict[str, Any]:
        """`embq status --json`, as a laptop sees it."""
        shape: dict[str, Any] = json.loads(self.embq("status", *filter(None, [run]), "--json").splitlines()[-1])
        return shape

    def take_down(self) -> None:
        """Stop and remove everything of the project, and see that nothing of it is left."""
        self.compose(
            "--profile", "shards", "--profile", "tools", "down", "--volumes", "--remove-orphans", "--timeout", "5"
        )
        label = f"label=com.docker.compose.project={self.project}"
        left = [
            docker(*kind, "--quiet", "--filter", label)
            for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        ]
        assert left == ["", "", ""], left


def health_of(container: str) -> str:
    """ "healthy", "unhealthy" or "starting"."""
    return docker("inspect", "--format", "{{.State.Health.Status}}", container)


def kill_from_inside(container: str, image: str) -> None:
    """SIGKILL for all processes of a container, as the system sends it: Docker sees it end, and starts it again.

    `docker kill` would count as somebody's wish, after which it stays away.
    """
    pid = docker("inspect", "--format", "{{.State.Pid}}", container)
    program = f"import os; os.kill({pid}, 9)"
    docker("run", "--rm", "--pid=host", "--user=0:0", "--entrypoint=python", image, "-c", program)


def image_of(role: str) -> str:
    """The image of "producer", "writer" or "worker" with its tag."""
    return f"{IMAGES[role]}:{VERSION}"


def address_of_this_machine() -> str:
    """By which containers of any network reach this machine, as other machines reach the box: docker0's."""
    route = "print(next(line.split()[2] for line in open('/proc/net/route') if line.split()[1] == '00000000'))"
    told = docker("run", "--rm", "--network=bridge", "--entrypoint=python", image_of("producer"), "-c", route)
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(told)))


def ip_of(stack: Stack, service: str) -> str:
    """A container's address in the network of the stack."""
    container = stack.containers(service)[0]
    return docker("inspect", "--format", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container)


def published(stack: Stack) -> set[str]:
    """Ports that the engine publishes for the stack."""
    label = f"label=com.docker.compose.project={stack.project}"
    lines = docker("ps", "--format", "{{.Ports}}", "--filter", label).splitlines()
    return {port for line in lines for port in line.split(", ") if "->" in port}


@contextmanager
def network(name: str, *options: str) -> Iterator[str]:
    """A network of containers that is removed afterwards."""
    docker("network", "create", *options, name)
    try:
        yield name
    finally:
        docker("network", "rm", name)


def in_container(
    *arguments: str | Path,
    image: str,
    networks: str,
    mounts: Mapping[Path, str],
    environment: Mapping[str, str],
    status: int = 0,
    entrypoint: str = "embq",
) -> str:
    """Run a command in a container that is removed afterwards; gives what it wrote.

    Args:
        mounts: folder of this machine -> where it is seen, read only.
    """
    uid, gid = own_ids()
    volumes = [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
    variables = [f"--env={name}={value}" for name, value in environment.items()]
    return docker(
        "run",
        "--rm",
        f"--network={networks}",
        f"--user={uid}:{gid}",
        f"--entrypoint={entrypoint}",
        *volumes,
        *variables,
        image,
        *arguments,
        status=status,
    )
