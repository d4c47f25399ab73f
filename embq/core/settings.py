"""Process-wide settings. This is the only file that reads the environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import ConfigError
from embq.core.networks import Address, Hosts

_PLACE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:\[[^\]/]*\]|[^/:]*)(?::\d+(?=[/:]|$))?(?:/[^:]*)?|[^:]+")
"""A folder or a URL in EMBQ_ROOTS and EMBQ_OUTPUTS, between colons that are neither a scheme's nor a port's."""


THUMBNAIL_CACHE_BYTES = 10**9
"""Room for some 60,000 thumbnails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of this machine and process, never of a run.

    Attributes:
        broker_url: redis://, rediss:// or unix:// URL; "" if none is configured.
        broker_password: from EMBQ_BROKER_PASSWORD_FILE, so that no password stands in a URL or a process list.
        lease_s: time for which a unit stays with a worker that sends no heartbeat; several times `beat_s`, so that
            one lost heartbeat frees nothing.
        beat_s: seconds between heartbeats.
        stall_s: seconds without progress in one step of a worker, after which its process is replaced.
        slice_s: seconds that a worker serves one model while another one has work.
        roots: folders and URLs that workers may read inputs from or below; empty allows all.
        allow_hosts: names by which clients may address the HTTP servers of this machine, see
            `embq.core.networks.HostNames`.
        private_hosts: hosts and networks that are not public and may be read from, also by redirects; see
            `embq.core.networks.Hosts`.
        outputs: folders and URLs that producer and writer may have outputs in or below; empty allows all.
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.
        trace: folder for the traces of worker processes, see `embq.worker.meter.batch_trace`; "" for none.
        omp_threads: OMP_NUM_THREADS, or "" if embq divides the cores itself.
        metrics: address of a service's metrics and health endpoint; None for none.
        compile_s: seconds for which a vision model may be compiled for a GPU when it is loaded; 0 for no compiling.
    """

    broker_url: str = ""
    broker_password: str = ""
    lease_s: float = 20.0
    beat_s: float = 5.0
    stall_s: float = 45.0
    slice_s: float = 60.0
    roots: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    cuda_visible: str | None = None
    omp_threads: str = ""
    trace: str = ""
    compile_s: float = 0.0
    metrics: Address | None = None

    @classmethod
    def from_environment(cls) -> Settings:
        """Read every EMBQ_* variable; ConfigError names the variable that cannot be used."""
        password = ""
        if path := password_file():
            try:
                password = Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise ConfigError(
                    f"EMBQ_BROKER_PASSWORD_FILE names {path}, which cannot be read: {error.strerror}",
                    next_step="point it to a readable file that holds only the password",
                ) from error
        defaults = cls()
        settings = cls(
            broker_url=os.environ.get("EMBQ_BROKER_URL", ""),
            broker_password=password,
            lease_s=_seconds("EMBQ_LEASE_S", defaults.lease_s),
            beat_s=_seconds("EMBQ_BEAT_S", defaults.beat_s),
            stall_s=_seconds("EMBQ_STALL_S", defaults.stall_s),
            slice_s=_seconds("EMBQ_SLICE_S", defaults.slice_s),
            roots=_places(os.environ.get("EMBQ_ROOTS", "")),
            allow_hosts=allowed_hosts(),
            private_hosts=_hosts("EMBQ_PRIVATE_HOSTS"),
            outputs=_places(os.environ.get("EMBQ_OUTPUTS", "")),
            cuda_visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
            omp_threads=os.environ.get("OMP_NUM_THREADS", ""),
            trace=os.environ.get("EMBQ_TRACE", ""),
            compile_s=_seconds("EMBQ_COMPILE_S", defaults.compile_s),
            metrics=_address("EMBQ_METRICS"),
        )
        if settings.lease_s < 2 * settings.beat_s:
            raise ConfigError(
                f"EMBQ_LEASE_S={settings.lease_s:g} is too short for EMBQ_BEAT_S={settings.beat_s:g}: one late beat "
                "would free units that are being worked on",
                next_step="make the lease at least twice the beat, better four times",
            )
        return settings


def _places(text: str) -> tuple[str, ...]:
    return tuple(_PLACE.findall(text))


def allowed_hosts() -> tuple[str, ...]:
    """EMBQ_ALLOW_HOSTS, for a server that needs no other setting."""
    return _hosts("EMBQ_ALLOW_HOSTS")


def _hosts(name: str) -> tuple[str, ...]:
    entries = tuple(os.environ.get(name, "").replace(",", " ").split())
    try:
        Hosts(entries)
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error} is neither a host nor a network",
            next_step="write names, addresses and networks, for example files.lan,10.0.0.5:8080,10.1.0.0/16",
        ) from error
    return entries


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name}={text!r} is not a positive number of seconds", next_step=f"unset {name} or mend it")
    return value


def _address(name: str) -> Address | None:
    text = os.environ.get(name, "")
    try:
        return Address.parse(text) if text else None
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}", next_step="for example 9101, or 0.0.0.0:9101 for all who reach this machine"
        ) from error


TARGET_SECRETS = ("QDRANT_API_KEY", "MILVUS_TOKEN", "PGPASSWORD")


def target_secret(name: str) -> str | None:
    """The secret for the server of an export, one of `TARGET_SECRETS`; None if the variable is not set."""
    return os.environ.get(name) or None


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A variable of the environment, and the value in effect, "" for none.

    `source` is "environment", "default", or the variable that decides the default.
    """

    name: str
    value: str
    source: str
    meaning: str


_SECONDS = {"EMBQ_LEASE_S": "lease_s", "EMBQ_BEAT_S": "beat_s", "EMBQ_STALL_S": "stall_s", "EMBQ_SLICE_S": "slice_s"}
MEANINGS = {
    "EMBQ_BROKER_URL": "broker, as --broker",
    "EMBQ_BROKER_PASSWORD_FILE": "file with the password alone, for a URL without one",
    "EMBQ_BROKER_CA": "certificate authority that alone is trusted for rediss://; else the system's",
    "EMBQ_PLAIN_BROKER": "yes: redis:// to public addresses, unencrypted",
    "EMBQ_MACHINE": "name of this machine in status and logs; else its host name",
    "EMBQ_FLEET_NAME": "fleet that this machine's worker belongs to, as embq fleet sets it",
    "EMBQ_LEASE_S": "seconds that a silent worker keeps its unit",
    "EMBQ_BEAT_S": "seconds between heartbeats",
    "EMBQ_STALL_S": "seconds without progress before a worker process is replaced",
    "EMBQ_SLICE_S": "seconds of one model's turn where several have work",
    "EMBQ_COMPILE_S": "seconds for torch to compile a vision model on a GPU",
    "EMBQ_ROOTS": "folders and URLs that workers may read, separated by ':'; none allows all",
    "EMBQ_OUTPUTS": "folders that producer and writer may have outputs in; none allows all",
    "EMBQ_PRIVATE_HOSTS": "hosts that are not public and may be read from",
    "EMBQ_METRICS": "[HOST:]PORT of /metrics and /healthz, as --metrics",
    "EMBQ_ALLOW_HOSTS": "names by which clients may address HTTP servers of embq, as --allow-host",
    "EMBQ_LOG": "form of logs: text or json",
    "EMBQ_STAGING": "folder for results between workers and writer; else in the output folder",
    "EMBQ_SPOOL": "folder for files between disk and object store",
    "EMBQ_PLUGINS": "packages whose plug-ins are used",
    "EMBQ_INDEX_CACHE_GB": "gigabytes for copies of remote indexes; else half of the disk",
    "EMBQ_THUMBNAIL_CACHE_GB": "gigabytes for thumbnails",
    "EMBQ_TRACE": "folder for traces of worker processes, a line for each batch",
    "CUDA_VISIBLE_DEVICES": "GPUs that are used, of CUDA",
    "OMP_NUM_THREADS": "threads of a worker process; else an equal share of the cores",
    "HF_HUB_CACHE": "folder of the models of the Hugging Face hub",
    "XDG_STATE_HOME": "folder above that for the local part of outputs on object stores, and for measured speeds",
    "XDG_CACHE_HOME": "folder above that for what can be made or fetched again",
    "NO_COLOR": "anything: no colours",
}
"""Every variable, in the order in which `embq config` shows them."""


OF_DEPLOYMENTS = {
    f"EMBQ_{name}"
    for name in (
        *("COMPLETE", "VERSION", "REGISTRY", "UID", "GID", "OUT", "DATA", "STORAGE"),
        *("FLEET", "FLEET_MACHINES", "EXTRAS", "FAISS", "GPUS", "CARDS", "TORCH"),
        *("TORCHVISION", "TORCH_INDEX", "WORKER_MEMORY", "UI_PORT", "METRICS_KEPT"),
        *("BROKER_BIND", "BROKER_IMAGE", "BROKER_LIMIT", "BROKER_MEMORY", "BROKER_NAME"),
        *("BROKER_PORT", "BROKER_TLS_PORT", "SHARDS_BIND", "SHARDS_PORT", "PYTHON_IMAGE"),
        *("NGINX_IMAGE", "GRAFANA_IMAGE", "GRAFANA_PORT", "PROMETHEUS_IMAGE", "PROMETHEUS_PORT"),
    )
}
"""Variables of completion, of `.env` of a compose stack and of fleets, which no process of embq reads as settings."""


def check_settings() -> None:
    """Raise ConfigError for the value of any setting that cannot be used, whether or not this process needs it."""
    Settings.from_environment()
    for check in (log_format, index_cache_bytes, thumbnail_cache_bytes, broker_ca, plain_broker_allowed):
        check()


def effective_settings() -> list[EffectiveSetting]:
    """Every setting in effect, secrets in URLs included; ConfigError for a value that cannot be used."""
    check_settings()
    defaults = {
        **{name: f"{getattr(Settings(), field):g}" for name, field in _SECONDS.items()},
        "EMBQ_PLAIN_BROKER": "no",
        "EMBQ_LOG": "text",
        "EMBQ_THUMBNAIL_CACHE_GB": f"{THUMBNAIL_CACHE_BYTES / 1e9:g}",
        "HF_HUB_CACHE": str(model_cache()),
        "XDG_STATE_HOME": str(state_folder().parent),
        "XDG_CACHE_HOME": str(cache_folder().parent),
    }
    sources = {"HF_HUB_CACHE": "HF_HOME" if os.environ.get("HF_HOME") else "default"}
    return [
        EffectiveSetting(name, text, "environment", meaning)
        if (text := os.environ.get(name))
        else EffectiveSetting(name, defaults.get(name, ""), sources.get(name, "default"), meaning)
        for name, meaning in MEANINGS.items()
    ]


def unknown_settings() -> dict[str, str]:
    """EMBQ_* variables of the environment that embq does not have -> the one that was meant; "" if none is like it."""
    names = [name for name in MEANINGS if name.startswith("EMBQ_")]
    unknown = sorted(name for name in os.environ if name.startswith("EMBQ_") and name not in {*names, *OF_DEPLOYMENTS})
    return {name: _meant(name[:64], names) for name in unknown}


def _meant(name: str, names: list[str]) -> str:
    """The setting that is like a name: first the one that it begins, a URL before others; "" for none."""
    from difflib import get_close_matches

    if longer := [setting for setting in names if setting.startswith(f"{name}_")]:
        return min(longer, key=lambda setting: (not setting.endswith("_URL"), len(setting)))
    own = {setting.removeprefix("EMBQ_"): setting for setting in names}  # the common beginning makes all alike
    return next((own[near] for near in get_close_matches(name.removeprefix("EMBQ_"), own, 1, 0.7)), "")


def settings_warnings() -> list[str]:
    """Sentences on EMBQ_* variables that are meant for a setting and are none, for a user."""
    return [f"{name} is not a setting; did you mean {meant}?" for name, meant in unknown_settings().items() if meant]


def state_folder() -> Path:
    """Folder of this machine for the local part of outputs on object stores, see `Layout.home`, and for measured
    speeds."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "embq"


def cache_folder() -> Path:
    """Folder of this machine for what can be computed or fetched again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embq"


def input_limits() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """EMBQ_ROOTS and EMBQ_PRIVATE_HOSTS, for a process that reads inputs and needs no other setting."""
    return _places(os.environ.get("EMBQ_ROOTS", "")), _hosts("EMBQ_PRIVATE_HOSTS")


def index_cache_bytes() -> int:
    """Bytes that the cached copies of remote indexes may take, by EMBQ_INDEX_CACHE_GB; 0 if it is not set."""
    return _gigabytes("EMBQ_INDEX_CACHE_GB")


def thumbnail_cache_bytes() -> int:
    """Bytes that the thumbnails of `embq serve` may take on this machine, by EMBQ_THUMBNAIL_CACHE_GB."""
    return _gigabytes("EMBQ_THUMBNAIL_CACHE_GB") or THUMBNAIL_CACHE_BYTES


def _gigabytes(name: str) -> int:
    """Bytes by a variable in gigabytes; 0 if it is not set."""
    text = os.environ.get(name, "")
    try:
        count = int(float(text) * 1e9) if text else 0
    except (ValueError, OverflowError):
        count = -1
    if count < 0 or (text and not count):
        raise ConfigError(f"{name}={text!r} is not a positive number", next_step="unset it or mend it")
    return count


def log_format() -> str:
    """Log format of EMBQ_LOG: "text" or "json"; ConfigError for anything else."""
    text = os.environ.get("EMBQ_LOG", "") or "text"
    if text not in ("text", "json"):
        raise ConfigError(f"EMBQ_LOG={text!r} is neither text nor json", next_step="unset it, or write json")
    return text


def wants_json_logs() -> bool:
    """True if EMBQ_LOG is json; False also for a value that cannot be used."""
    return os.environ.get("EMBQ_LOG") == "json"


def model_cache() -> Path:
    """Folder of the models of the Hugging Face libraries (huggingface_hub, environment variables)."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    home = os.environ.get("HF_HOME")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(home) if home else caches / "huggingface") / "hub"


def plugin_packages() -> frozenset[str]:
    """The names of packages in EMBQ_PLUGINS, as they stand there."""
    return frozenset(os.environ.get("EMBQ_PLUGINS", "").replace(",", " ").split())


def spool_folder() -> Path | None:
    """The folder of EMBQ_SPOOL for files on their way to or from an object store; None if it is not set."""
    return Path(os.environ["EMBQ_SPOOL"]).absolute() if os.environ.get("EMBQ_SPOOL") else None


def staging_folder() -> Path | None:
    """The folder of EMBQ_STAGING for results on their way from workers to the writer; None if it is not set."""
    return Path(os.environ["EMBQ_STAGING"]).absolute() if os.environ.get("EMBQ_STAGING") else None


def machine_name() -> str:
    """The name under which the services of this machine report: EMBQ_MACHINE, or the host name."""
    return os.environ.get("EMBQ_MACHINE") or socket.gethostname()


def fleet_name() -> str:
    """The fleet to which the worker of this machine belongs: EMBQ_FLEET_NAME, which `embq fleet` sets; "" for none."""
    return os.environ.get("EMBQ_FLEET_NAME", "")


def password_file() -> str:
    """The file of EMBQ_BROKER_PASSWORD_FILE; "" if there is none."""
    return os.environ.get("EMBQ_BROKER_PASSWORD_FILE", "")


def broker_ca() -> str:
    """The file of EMBQ_BROKER_CA, with the CAs that may vouch for the broker; "" for those of this system."""
    path = os.environ.get("EMBQ_BROKER_CA", "")
    if path and not os.access(path, os.R_OK):
        raise ConfigError(
            f"EMBQ_BROKER_CA names {path}, which {'cannot be read' if os.path.exists(path) else 'is not there'}",
            next_step="point it to the ca.crt that `embq broker init` made for this broker",
            code="tls",
        )
    return path


def plain_broker_allowed() -> bool:
    """True if redis:// may be used to public addresses, unencrypted."""
    text = os.environ.get("EMBQ_PLAIN_BROKER", "")
    if text not in ("", "no", "yes"):
        raise ConfigError(f"EMBQ_PLAIN_BROKER={text!r} is neither yes nor no", next_step="unset it, or write yes")
    return text == "yes"


def compute_in_one_thread() -> None:
    """Have numpy's OpenBLAS, if it is not imported yet, multiply matrices in the calling thread.

    The matrices of one query are small: on two cores the threads of OpenBLAS take ten times the processor time of the
    query, and on a busy machine they wait for each other. A number of threads that is set already is kept.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def change_environment(changes: Mapping[str, str]) -> None:
    """Set variables that a library reads later: torch does when it first uses a GPU."""
    os.environ.update(changes)


def child_environment(**changes: str) -> dict[str, str]:
    """The environment of this process with `changes`, for child processes.

    Python processes import nothing of the current folder, nor do those that they start.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1", **changes}
