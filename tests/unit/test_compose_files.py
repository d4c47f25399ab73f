"""The files of the stack: what is published, what a container may do, whose secrets it sees, what .env.example says.

No engine is needed; `make test-compose` starts what stands here.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from embq.app.cli.entry_point import cli

ROOT = Path(__file__).resolve().parents[2]
STACK, CPU = "docker-compose.yml", "deploy/docker-compose.cpu.yml"
WORKER, WORKER_CPU = "compose.worker.yml", "deploy/compose.worker.cpu.yml"
FILES = (STACK, CPU, WORKER, WORKER_CPU)
WHOLE = (STACK, WORKER)
"""Files that stand alone; the others go over these."""
VARIABLE = re.compile(r"\$\{([A-Z_]+)(?:(:?[-?])([^}]*))?\}")
NEEDED = {"EMBQ_BROKER_URL": "rediss://worker-gpu2@10.0.0.5:6380"}
"""What has no default, as .env.example shows it."""
ROLES = {
    "broker": "broker",
    "producer": "writer",
    "writer": "writer",
    "worker": "worker",
    "embq": "laptop",
    "ui": "monitor",
}
"""Whose folder of secrets a service has as its own; the others have none."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def as_started(name: str, **given: str) -> dict[str, dict[str, Any]]:
    """The services of a file, with the variables of .env and the defaults of others."""
    filled = VARIABLE.sub(lambda found: (NEEDED | given).get(found[1], found[3] or ""), text_of(name))
    services: dict[str, dict[str, Any]] = yaml.safe_load(filled)["services"]
    return services


SERVICES = [pytest.param(file, name, id=f"{file}:{name}") for file in WHOLE for name in as_started(file)]
PUBLISHED = [
    (file, name, port)
    for file in FILES
    for name, service in as_started(file).items()
    for port in service.get("ports", [])
]


def seconds(duration: str) -> float:
    found = re.fullmatch(r"(\d+)s", duration)
    assert found is not None, duration
    return float(found[1])


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Place in the container -> what is there, and whether it can be written."""
    found = {}
    for line in service.get("volumes", []):
        source, target, *mode = line.split(":")
        found[target] = (source, mode != ["ro"])
    return found


@pytest.mark.parametrize(("file", "name", "port"), PUBLISHED)
def test_what_is_published_is_on_the_loopback_unless_another_address_is_asked_for(
    file: str, name: str, port: str
) -> None:
    assert port.split(":")[0] == "127.0.0.1"


@pytest.mark.parametrize("file", FILES)
def test_nothing_gets_more_of_the_machine_than_a_container_has(file: str) -> None:
    for name, service in as_started(file).items():
        assert not {"privileged", "devices", "pid", "ipc", "uts", "userns_mode", "volumes_from"} & service.keys(), name
        assert service.get("network_mode", "none") == "none"
        assert all("docker.sock" not in source for source, _ in mounts(service).values())
        assert set(service.get("cap_add", [])) <= ({"CHOWN", "DAC_OVERRIDE", "FOWNER"} if name == "init" else set())


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_service_has_no_rights_a_root_that_cannot_be_written_and_bounded_logs(file: str, name: str) -> None:
    service = as_started(file)[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert all("size=" in folder for folder in service["tmpfs"])
    assert service["logging"] == {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}}
    assert service["user"] == ("0:0" if name == "init" else "1000:1000")
    assert service["restart"] == ("no" if name in ("init", "embq", "users") else "unless-stopped")
    assert name == "init" or service["init"] is True


def size_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([mg])b?", text).groups()  # type: ignore[union-attr]
    return int(number) << {"m": 20, "g": 30}[unit]


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_service_has_a_bound_for_memory_and_for_processes(file: str, name: str) -> None:
    service = as_started(file)[name]
    assert 64 << 20 <= size_of(service["mem_limit"]) <= 32 << 30
    assert 64 <= service["pids_limit"] <= 8192
    # Files in memory count as well.
    assert sum(size_of(folder.partition("size=")[2].split(",")[0]) for folder in service["tmpfs"]) < size_of(
        service["mem_limit"]
    )


def test_the_broker_has_room_for_what_it_holds_twice() -> None:
    broker = as_started(STACK)["broker"]
    memory = broker["command"][broker["command"].index("--maxmemory") + 1]
    assert size_of(broker["mem_limit"]) >= 2 * size_of(memory)


def test_the_one_service_that_is_root_reaches_no_network_and_ends() -> None:
    init = as_started(STACK)["init"]
    assert init["network_mode"] == "none"
    waiting = {name for name, service in as_started(STACK).items() if "init" in service.get("depends_on", {})}
    assert waiting == as_started(STACK).keys() - {"init"}


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_service_sees_its_own_secrets_and_writes_where_its_work_is(file: str, name: str) -> None:
    if name in ("init", "users"):  # they make the secrets
        return
    found = mounts(as_started(file)[name])
    assert all(not writable for target, (_, writable) in found.items() if target.startswith(("/run/", "/etc/")))
    assert "/data" not in found or found["/data"] == ("./data", False)
    secret = {source for source, _ in found.values() if source.startswith("./secrets")} - {"./secrets/storage"}
    own = {f"./secrets/{ROLES[name]}"} if name in ROLES else set()
    assert secret == own | ({"./secrets/monitor"} if name == "broker" else set())
    writable = {target for target, (_, writable) in found.items() if writable}
    assert writable <= {"/out", "/models", "/staging", "/state", "/broker", "/monitoring"}
    assert name not in ("ui", "worker") or "/out" not in writable


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_password_stands_in_no_environment_and_on_no_command_line(file: str, name: str) -> None:
    service = as_started(file)[name]
    environment = service.get("environment", {})
    assert not [key for key in environment if re.search(r"PASSWORD$|TOKEN$|SECRET|_KEY$", key)]
    assert ":" not in environment.get("EMBQ_BROKER_URL", "").partition("://")[2].partition("@")[0]


@pytest.mark.parametrize("file", WHOLE)
def test_docker_waits_for_a_worker_longer_than_the_worker_for_its_units(file: str) -> None:
    worker = cli.get_command(click.Context(cli), "worker")
    assert worker is not None
    drain = next(option.default for option in worker.params if option.name == "drain_timeout")
    assert isinstance(drain, float)
    assert seconds(as_started(file)["worker"]["stop_grace_period"]) >= drain + 20


def test_writer_and_broker_get_a_minute_to_finish() -> None:
    services = as_started(STACK)
    assert [seconds(services[name]["stop_grace_period"]) for name in ("writer", "broker")] == [60, 60]


@pytest.mark.parametrize("file", FILES)
def test_every_command_is_one_that_embq_understands(file: str) -> None:
    for name, service in as_started(file).items():
        words = [*service.get("entrypoint", ["embq"]), *service.get("command", ["--help"])]
        if words[0] != "embq" or words[1] == "--help" or name in ("broker", "prometheus"):
            continue
        verb, *options = (word for word in words[1:] if word != "--help")
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None, verb
        context = command.make_context(verb, list(options))
        if isinstance(command, click.Group):
            _, nested, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            assert nested is not None
            nested.make_context(nested.name, rest, parent=context)


def test_the_overlay_for_machines_without_gpus_covers_every_service_that_asks_for_one() -> None:
    for whole, overlay in ((STACK, CPU), (WORKER, WORKER_CPU)):
        gpu = {name for name, service in as_started(whole).items() if service.get("runtime") == "nvidia"}
        over = as_started(overlay)
        assert over.keys() == gpu
        for service in over.values():
            assert service["runtime"] == "runc"
            assert service["build"]["args"]["FAISS"] == "index"
            assert service["image"] != as_started(whole)["worker"]["image"]


@pytest.mark.parametrize("files", [(STACK,), (STACK, CPU), (WORKER,), (WORKER, WORKER_CPU)], ids=" with ".join)
def test_no_two_services_are_built_under_one_name(files: tuple[str, ...]) -> None:
    # Builders that work side by side end a first `up` with "already exists": https://github.com/docker/buildx/issues/3576
    names: dict[str, str] = {}
    for file in files:
        names |= {name: service["image"] for name, service in as_started(file).items() if "build" in service}
    assert len(set(names.values())) == len(names)


def test_the_gpu_stack_says_so_where_it_finds_no_gpu() -> None:
    assert all(as_started(file)["worker"]["command"] == ["worker", "--devices", "cuda"] for file in WHOLE)


def test_one_variable_decides_where_the_broker_is_reached_with_tls_and_whom_its_certificate_names() -> None:
    """In .env it holds for `docker compose up -d`, with whatever files."""
    services = yaml.safe_load(text_of(STACK))["services"]
    assert "--server-name=${EMBQ_BROKER_BIND:-127.0.0.1}" in services["init"]["command"]
    plain, tls = services["broker"]["ports"]
    assert "BIND" not in plain
    assert tls == "${EMBQ_BROKER_BIND:-127.0.0.1}:${EMBQ_BROKER_TLS_PORT:-6380}:6380"
    assert "broker" not in as_started(CPU)


def test_pages_switch_nothing_of_the_stack_by_a_variable_or_a_file_that_is_kept_nowhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.yml"), ROOT / WORKER]
    once = re.compile(r"(EMBQ_\w+=\S+ |COMPOSE_\w+=\S+ )docker compose|docker compose (-f|--file|--project)")
    assert [path.name for path in pages if once.search(" ".join(path.read_text(encoding="utf-8").split()))] == []


def test_every_variable_is_explained_with_its_default_and_no_other_is() -> None:
    used: dict[str, set[str]] = {}
    for file in FILES:
        for name, _, default in VARIABLE.findall(text_of(file)):
            used.setdefault(name, set()).add(NEEDED.get(name, default))
    explained = dict(re.findall(r"^# ((?!COMPOSE_)[A-Z_]+)=(.*)$", text_of(".env.example"), re.MULTILINE))
    # A default that stands in several files is the same in all, but for what the machine itself is called.
    assert used.pop("EMBQ_MACHINE") == {"box", "set it in .env to a name of its own, such as gpu2"}
    assert explained.pop("EMBQ_MACHINE") == "box"
    # So is the index of torch, which stays empty for what PyPI has.
    assert used.pop("EMBQ_TORCH_INDEX") == {"", "https://download.pytorch.org/whl/cpu"}
    assert explained.pop("EMBQ_TORCH_INDEX") == ""
    assert {name: {value} for name, value in explained.items()} == used


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_what_a_service_is_told_embq_knows(file: str, name: str) -> None:
    settings = text_of("docs/reference/settings.md")
    told = {key for key in as_started(file)[name].get("environment", {}) if key.startswith("EMBQ_")}
    assert {key for key in told if f"| `{key}` |" not in settings} == set()


def test_nothing_is_set_in_the_example_of_settings() -> None:
    assert not [line for line in text_of(".env.example").splitlines() if line and not line.startswith("#")]


def test_the_broker_keeps_what_it_is_told_and_asks_who_is_there() -> None:
    lines = [line.split(maxsplit=1) for line in text_of("deploy/valkey.conf").splitlines() if line and line[0] != "#"]
    conf = dict(lines)
    assert conf["appendonly"] == "yes"
    assert conf["maxmemory-policy"] == "noeviction"
    assert conf["protected-mode"] == "yes"
    found = mounts(as_started(STACK)["broker"])
    assert conf["dir"] in found
    assert str(Path(conf["aclfile"]).parent) in found


@pytest.mark.parametrize("made_here", [False, True])
def test_every_base_image_can_be_named_by_its_digest(tmp_path: Path, made_here: bool) -> None:
    """A tag is moved by whoever publishes it."""
    digest, engine = "sha256:" + "0" * 64, tmp_path / "engine"
    answer = '"<no value>"' if made_here else f'"library/x@{digest}"'
    engine.write_text(f"#!/bin/sh\n[ $1 = pull ] || echo {answer}\n", encoding="utf-8")
    engine.chmod(0o755)
    told = subprocess.run(
        ["sh", ROOT / "deploy" / "pin.sh"],
        env={"PATH": os.environ["PATH"], "DOCKER": str(engine)},
        capture_output=True,
        text=True,
        check=False,
    )
    if made_here:
        assert (told.returncode, told.stdout) == (1, "")
        assert "has no digest" in told.stderr
        return
    images = {name: image for file in FILES for name, _, image in VARIABLE.findall(text_of(file)) if "_IMAGE" in name}
    assert told.stdout.splitlines() == [f"{name}={images[name]}@{digest}" for name in sorted(images)]
    named = {service["image"] for file in WHOLE for service in as_started(file).values() if "build" not in service}
    assert named <= set(images.values())
    assert re.findall(r"^FROM (?!base|\w+-packages)(.*?) AS", text_of("Dockerfile"), re.MULTILINE) == [
        "${PYTHON_IMAGE}"
    ]


def test_images_install_what_the_project_asks_for() -> None:
    requirements = runpy.run_path(str(ROOT / "deploy" / "requirements.py"))["requirements"]
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    found = requirements(ROOT / "pyproject.toml", ["writer", "http"])
    extras = project["optional-dependencies"]
    assert found == [*project["dependencies"], *extras["writer"], *extras["http"]]
    for line in re.findall(r"requirements\.py (.*?) >", text_of("Dockerfile")):
        assert {word for word in line.split() if word.isidentifier()} <= extras.keys(), line


def _pins(text: str) -> dict[str, str]:
    """Name as PyPI compares it -> version."""
    pins = re.findall(r"^([^\s=#]+)==(\S+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


def test_what_images_install_from_pypi_has_its_hash_and_the_version_of_the_constraints() -> None:
    again = "constraints.txt or pyproject.toml has changed: run `make hashes`"
    lines = text_of("deploy/hashes.txt").splitlines()[1:]
    assert [line for line in lines if not re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line)] == []
    hashed, pinned = _pins("\n".join(lines)), _pins(text_of("constraints.txt"))
    assert {name for name in hashed.keys() & pinned if hashed[name] != pinned[name]} == set(), again
    # CUDA's libraries alone are not pinned: torch and faiss name those that they were built with.
    assert {name for name in hashed.keys() - pinned if not name.startswith(("nvidia-", "cuda-"))} == set(), again
    module = runpy.run_path(str(ROOT / "deploy" / "requirements.py"))
    asked = [
        re.split(r"[^\w.-]", line)[0] for line in module["requirements"](ROOT / "pyproject.toml", module["EXTRAS"])
    ]
    assert _pins("".join(f"{name}==0\n" for name in [*asked, *module["BUILD"]])).keys() <= hashed.keys(), again


def test_images_install_nothing_from_pypi_without_its_hash_but_torch() -> None:
    """Its index is the builder's to choose, and each has files of its own."""
    installs = re.findall(r"\bpip (?:install|wheel) [^\n]*", text_of("Dockerfile"))
    of_ours = ("/wheels/*.whl", "--wheel-dir /wheels .", "--wheel-dir /wheels ./native")
    from_pypi = [line for line in installs if not line.endswith(of_ours)]
    assert [line for line in from_pypi if "--require-hashes" not in line] == [
        f'pip install ${{TORCH_INDEX:+{index} "$TORCH_INDEX"{alone}}} "torch==$TORCH" "torchvision==$TORCHVISION"{more}'
        for index, alone, more in (("--index-url", " --no-deps", " \\"), ("--extra-index-url", "", ""))
    ]
    assert all("--no-deps" in line for line in installs if line not in from_pypi)
    assert all("--no-build-isolation" in line for line in installs if line.startswith("pip wheel"))
    of_images = {
        word for line in re.findall(r"requirements\.py (.*?) >", text_of("Dockerfile")) for word in line.split()
    }
    named = runpy.run_path(str(ROOT / "deploy" / "requirements.py"))["EXTRAS"]
    assert {word for word in of_images if word.isidentifier()} <= set(named)


def test_the_image_has_the_torch_that_the_rest_is_tested_with() -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", text_of("constraints.txt"), re.MULTILINE))
    named = dict(re.findall(r"^ARG (TORCH|TORCHVISION)=(\S+)$", text_of("Dockerfile"), re.MULTILINE))
    assert named == {"TORCH": pinned["torch"], "TORCHVISION": pinned["torchvision"]}
    for file in WHOLE:
        arguments = as_started(file)["worker"]["build"]["args"]
        assert {name: arguments[name] for name in named} == named


def test_a_machine_with_an_older_card_gets_the_torch_that_its_env_names(tmp_path: Path) -> None:
    """hashes.txt pinned the default over it, so that an image for a GTX 1070 had no code for one."""
    asked = {"TORCH": "2.9.1", "TORCHVISION": "0.24.1", "TORCH_INDEX": "https://download.pytorch.org/whl/cu126"}
    for file in FILES:
        arguments = as_started(file, **{f"EMBQ_{name}": value for name, value in asked.items()})["worker"]["build"][
            "args"
        ]
        assert (
            asked.items() & arguments.items()
            == (asked if file in WHOLE else {"TORCH_INDEX": asked["TORCH_INDEX"]}).items()
        )
    step = re.search(
        r"^RUN (python deploy/requirements.py broker gcs http minilm.*?)\n\n", text_of("Dockerfile"), re.M | re.S
    )
    assert step is not None
    pip = tmp_path / "pip"
    there = "numpy==2.4.0 nvidia-cublas-cu12==12.6.4.1 torch==2.9.1+cu126 torchvision==0.24.1+cu126 triton==3.5.1"
    pip.write_text(f"#!/bin/sh\n[ $1 = install ] || printf '%s\\n' {there}\n", encoding="utf-8")
    pip.chmod(0o755)
    (tmp_path / "python").symlink_to(sys.executable)
    for name in ("deploy", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAISS": "index", "EXTRAS": ""}
    subprocess.run(["sh", "-ec", step[1]], cwd=tmp_path, env=variables, check=True)
    every, kept = _pins(text_of("deploy/hashes.txt")), _pins((tmp_path / "hashes.txt").read_text(encoding="utf-8"))
    assert every.keys() - kept.keys() == {"nvidia-cublas-cu12", "torch", "torchvision", "triton"}


def test_workflows_take_actions_by_their_commits_and_publish_every_image_of_the_stack_with_its_contents() -> None:
    """A tag of an action is moved by its owner, and with it what has the rights to publish."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    used = re.findall(r"\buses: (.*)", "\n".join(texts.values()))
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line)] == []
    release = yaml.safe_load(texts["release.yml"])
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert release["permissions"] == {"contents": "read"}
    images = release["jobs"]["images"]
    named = [name for one in images["strategy"]["matrix"]["include"] for name in one["names"].split()]
    built = {service["image"] for file in FILES for service in as_started(file).values() if "embq-" in service["image"]}
    assert sorted(f"{name}:latest" for name in named) == sorted(built)
    push = images["steps"][-1]["with"]
    assert {"sbom": push["sbom"], "provenance": push["provenance"]} == {"sbom": True, "provenance": "mode=max"}


def test_each_image_ends_as_a_user_without_rights_with_a_check_of_its_health() -> None:
    targets = [stage for stage in text_of("Dockerfile").split("\nFROM ")[1:] if "ENTRYPOINT" in stage]
    assert [stage.split("\n")[0].split(" AS ")[1] for stage in targets] == ["producer", "writer", "worker"]
    for stage in targets:
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["embq"]
        assert 'CMD ["embq", "health"]' in stage


def test_models_are_compiled_in_no_container_because_none_has_a_compiler_or_a_tmp_to_run_code_from() -> None:
    assert not re.search(r"\b(gcc|clang|build-essential)\b", text_of("Dockerfile"))
    for file in WHOLE:
        for name, service in as_started(file).items():
            assert "EMBQ_COMPILE_S" not in service.get("environment", {}), name
            assert all("exec" not in folder.partition(":")[2].split(",") for folder in service["tmpfs"]), name


def test_monitoring_is_started_only_when_asked_for_and_reads_files_that_are_there() -> None:
    services = as_started(STACK)
    found = {name for name, service in services.items() if service.get("profiles") == ["monitoring"]}
    assert found == {"prometheus", "grafana"}
    for name in found:
        source, writable = mounts(services[name])["/etc/embq"]
        named = re.findall(r"/etc/embq/([\w./]+)", str(services[name]))
        assert not writable
        assert named
        assert all((ROOT / source / path).exists() for path in named)
    jobs = yaml.safe_load(text_of("deploy/monitoring/prometheus.yml"))["scrape_configs"]
    assert {job["job_name"] for job in jobs} <= services.keys()
    for job in jobs:
        port = services[job["job_name"]].get("environment", {}).get("EMBQ_METRICS", "ui:1234").rpartition(":")[2]
        assert f":{port}" in str(job) or f"'port': {port}" in str(job)


def test_only_named_files_travel_to_the_builder() -> None:
    lines = [line for line in text_of(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert not [line for line in lines if "secrets" in line or ".env" in line or ".git" in line]
