"""A fleet: its machines, their users at the broker, and a launcher that has their workers started and ended."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from embq.app.broker_admin import accounts
from embq.app.cli.shared_options import required_url
from embq.app.doctor.check import Check
from embq.app.doctor.fleet_checks import device_checks
from embq.app.status.fleet import fleet_status
from embq.core.errors import ConfigError, EmbqError, UsageError
from embq.core.queue.heartbeats import REPORT_S, services, shared_devices
from embq.core.settings import Settings
from embq.fleet.kubernetes import KubernetesLauncher
from embq.fleet.launcher import FleetMember, Launcher

LOOK_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,19}")


class Fleet:
    """The machines of one name. They are the users `worker-NAME.MACHINE` of the broker: no other record is kept.

    Args:
        secrets: folder that `embq broker init` has made, with the password of the user admin.
        settings: with the broker's URL as the machines reach it, whatever user it names.
        names: machines that it is to have.
    """

    def __init__(self, name: str, secrets: Path, settings: Settings, launcher: Launcher, names: Sequence[str]) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--fleet-name {name}: this names no fleet", next_step="20 letters, digits and hyphens at most"
            )
        if not (secrets / "broker" / accounts.USERS).exists():
            raise ConfigError(
                f"{secrets} has no users of a broker",
                next_step=f"embq broker init {shlex.quote(str(secrets))}, or --secrets DIR",
            )
        self.name = name
        self._secrets = secrets
        self._settings = settings
        self._launcher = launcher
        self._machines = names
        self._prefix = f"worker-{name}."

    def up(self, arguments: Sequence[str], *, drain_s: float, wait_s: float) -> Iterator[Check]:
        """Give each machine a user, check it and start its worker; a row for each, when its worker reports.

        A machine that fails loses its user again, unless it had one before: its worker may run all the same.

        Args:
            arguments: options of `embq worker`.
            wait_s: longest time until a started worker reports to the broker.
        """
        machines, had, failed = self._machines, self.named(()), set[str]()
        members = self._members(arguments, drain_s)
        try:
            for row in self._launcher.start(members):
                failed.add(row.name)
                yield row
        except EmbqError:  # the engine itself cannot be used
            self._revoke([machine for machine in machines if machine not in had])
            raise
        for row in self._reported([machine for machine in machines if machine not in failed], wait_s):
            failed |= {row.name} if row.state == "fail" else set()
            yield row
        if new := sorted(failed - set(had)):
            self.down(new)
        yield from self._shared(2 * REPORT_S)

    def manifests(self, arguments: Sequence[str], *, drain_s: float) -> str:
        """Give each machine a user, and return the manifests that `up` applies; UsageError without Kubernetes."""
        if not isinstance(self._launcher, KubernetesLauncher):
            raise UsageError("--print: only Kubernetes has manifests", next_step="--launcher kubernetes")
        return self._launcher.manifests(self._members(arguments, drain_s))

    def status(self) -> Iterator[Check]:
        """A row for each machine: what the launcher knows of it, and what the broker does; then shared devices."""
        yield from self._states(self.named(()))
        yield from self._shared()

    def drain(self, machines: Sequence[str], drain_s: float) -> Iterator[Check]:
        """Have machines finish their begun units and end; a row for each."""
        failed = {row.name: row for row in self._launcher.drain(machines, drain_s)}
        return (failed.get(machine) or Check(machine, "ok", "drained") for machine in machines)

    def down(self, machines: Sequence[str]) -> Iterator[Check]:
        """End the workers, and remove what they left and their users; a row for each.

        A machine that is not reached loses its user all the same: the broker disconnects its worker.
        """
        failed = {row.name: row for row in self._launcher.remove(machines)}
        self._revoke(machines)
        return (failed.get(machine) or Check(machine, "ok", "gone, and its user") for machine in machines)

    def _revoke(self, machines: Sequence[str]) -> None:
        accounts.remove(self._secrets, [self._prefix + machine for machine in machines])
        accounts.reload(self._settings, self._secrets)

    def named(self, names: Sequence[str]) -> list[str]:
        """These machines, all that have a user without names; UsageError for one that the fleet does not have."""
        users = accounts.users_of(self._secrets)
        machines = [user.removeprefix(self._prefix) for user in users if user.startswith(self._prefix)]
        if unknown := [name for name in names if name not in machines]:
            raise UsageError(
                f"the fleet {self.name} has no machine {unknown[0]}",
                next_step=f"it has {', '.join(machines) or 'none'}",
            )
        return list(names) or machines

    def _members(self, arguments: Sequence[str], drain_s: float) -> list[FleetMember]:
        """The named machines, each with a user that the broker knows."""
        if not self._machines:
            raise UsageError("nothing says how many machines are meant", next_step="--machines N")
        url = required_url(self._settings)
        accounts.make(self._secrets, [self._prefix + machine for machine in self._machines])
        if url.startswith("rediss:"):
            accounts.hand_out_authority(self._secrets)
        accounts.reload(self._settings, self._secrets)
        return [self._member(machine, arguments, drain_s) for machine in self._machines]

    def _member(self, machine: str, arguments: Sequence[str], drain_s: float) -> FleetMember:
        user = self._prefix + machine
        parts = urlsplit(required_url(self._settings))
        url = urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc.rpartition('@')[2]}"))
        authority = self._secrets / user / "ca.crt"
        return FleetMember(
            fleet=self.name,
            name=machine,
            url=url,
            password=(self._secrets / user / "password").read_text(encoding="utf-8").strip(),
            ca=authority.read_text(encoding="utf-8") if url.startswith("rediss:") and authority.exists() else "",
            arguments=arguments,
            drain_s=drain_s,
        )

    def _reported(self, machines: Sequence[str], wait_s: float) -> Iterator[Check]:
        """A row for each machine, as soon as its worker reports, has ended, or is late."""
        missing, end = list(machines), time.monotonic() + wait_s
        while missing:
            time.sleep(LOOK_S)
            late = time.monotonic() > end
            for row in self._states(missing):
                if late or row.state != "warn":
                    missing.remove(row.name)
                    yield row

    def _states(self, machines: Sequence[str]) -> Iterator[Check]:
        states, reporting = self._launcher.states(machines), self._reporting()
        for machine in list(machines):
            row = states.get(machine) or Check(machine, "fail", "not there", "embq fleet up")
            state = "warn" if row.state == "ok" and machine not in reporting else row.state
            yield Check(machine, state, f"{row.detail}; {reporting.get(machine, 'it does not report')}", row.fix)

    def _reporting(self) -> dict[str, str]:
        """Machine -> its devices and their rates, of those whose workers report to the broker.

        A worker of an earlier version does not say to which fleet it belongs, and counts where no other reports.
        """
        with accounts.administrator(self._settings, self._secrets) as client:
            rows = fleet_status(client).to_json()
        return {
            row["host"]: f"embq {row['version']}, {row['state']}: " + ", ".join(map(_device, row["devices"]))
            for row in sorted(rows, key=lambda row: row["fleet"] is not None)
            if row["role"] == "worker" and row["fleet"] in (self.name, None)
        }

    def _shared(self, wait_s: float = 0.0) -> list[Check]:
        """A row for each worker that shares devices with one of this fleet.

        Args:
            wait_s: time until a running worker has reported again since the start of another.
        """
        with accounts.administrator(self._settings, self._secrets) as client:
            if shared_devices(services(client)):
                time.sleep(wait_s)
            return device_checks(services(client), fleet=self.name)


def _device(device: dict[str, object]) -> str:
    rate = f" {device['rows_per_s']:,.1f} rows/s" if device["rows_per_s"] else ""
    return f"{device['device']} {device['state']}{rate}"
