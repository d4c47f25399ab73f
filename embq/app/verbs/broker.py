"""`embq broker`."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option, named_broker_option

HOSTS = ("localhost", "127.0.0.1", "::1", "broker")
"""Names of the server that every certificate has: on its machine, and in its stack of containers."""


@click.group("broker", epilog="Example: embq broker init secrets --server-name gpu-box.example.org")
def command() -> None:
    """Make users, passwords and certificates for a broker that other people or machines reach."""


@command.command(
    "init",
    cls=SectionedCommand,
    epilog="Examples: embq broker init | embq broker init --user worker-gpu2 --broker redis://localhost:6379",
)
@click.argument("folder", metavar="[DIR]", default="secrets", type=click.Path(file_okay=False, path_type=Path))
@option(
    "--server-name",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Additional name or address of the server for its certificate.  [this machine's name, localhost, broker]",
)
@option("--days", type=click.IntRange(min=1), default=825, help="Validity of the certificate in days.")
@option(
    "--user", "users", multiple=True, metavar="ROLE-NAME", help="Additional user, such as worker-gpu2 or laptop-ann."
)
@option("--remove", multiple=True, metavar="ROLE-NAME", help="Remove this user and its password.")
@option("--owner", default="", metavar="UID:GID", help="Owner of the files; needs root.")
@option(
    "--give",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Change the owner of an empty folder of root to --owner, such as a new Docker volume.",
)
@named_broker_option
def init(
    folder: Path,
    hosts: tuple[str, ...],
    days: int,
    users: tuple[str, ...],
    remove: tuple[str, ...],
    owner: str,
    give: tuple[Path, ...],
    broker: str,
) -> None:
    """Create what is missing in DIR: users.acl and a certificate for the server, a password for each user.

    Existing files stay; a certificate that ends soon is renewed, and the users' permissions are updated to this
    version. DIR/broker is for the server, DIR/laptop, DIR/worker, DIR/writer, DIR/admin and DIR/monitor are for the
    clients of that role. DIR/ca/ca.key signs certificates that all of them trust: it stays here.

    With --broker, a running broker has the users at once, as by `embq broker reload`.
    """
    from embq.app.broker_admin import accounts
    from embq.app.broker_admin.certificates import make as make_certificates
    from embq.app.broker_admin.owner import Owner
    from embq.core.errors import UsageError
    from embq.core.storage.durable import output_error

    if give and not owner:
        raise UsageError("--give needs to know to whom", next_step="add --owner UID:GID")
    to = Owner.parse(owner) if owner else None
    try:
        removed = accounts.remove(folder, remove) if remove else accounts.Changes()
        added = accounts.make(folder, users)
        # The names that a certificate has, it keeps; a container's own name is one that nobody calls.
        in_container = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
        here = () if in_container else (socket.gethostname(),)
        certificates = make_certificates(folder, [*HOSTS, *here, *hosts], days)
        handed = accounts.hand_out_authority(folder)
        if to is not None:
            to.take_ownership(folder, accounts.users_of(folder))
        given = [path for path in give if to is not None and to.give(path)]
    except OSError as error:
        raise output_error(error, Path(error.filename or folder)) from error
    for path in removed.paths:
        click.echo(f"{'removed' if not path.exists() else 'wrote'} {path}")
    for path in [*added.paths, *certificates, *handed]:
        click.echo(f"wrote {path}")
    for path in given:
        click.echo(f"gave {path} to {owner}")
    if not (removed.paths or added.paths or certificates or handed or given):
        click.echo(f"{folder}: nothing was missing")
    if broker:
        _reload(folder, broker)
    elif removed.users_changed or added.users_changed:
        click.echo(
            f"a broker that runs has to read its users again: embq broker reload {shlex.quote(str(folder))}", err=True
        )
    for user in users:
        click.echo(
            f"{user} logs in with what is in {folder / user}: copy that to its machine, and nothing else", err=True
        )


@command.command(
    "reload", cls=SectionedCommand, epilog="Example: embq broker reload secrets --broker redis://localhost:6379"
)
@click.argument("folder", metavar="[DIR]", default="secrets", type=click.Path(file_okay=False, path_type=Path))
@broker_option
def reload(folder: Path, broker: str) -> None:
    """Reload users.acl in a running broker, as the user admin with the password in DIR/admin.

    Clients of removed and changed users are disconnected; those with a valid password reconnect by themselves.
    """
    _reload(folder, broker)


def _reload(folder: Path, broker: str) -> None:
    from embq.app.broker_admin.accounts import reload as read_again
    from embq.app.cli.shared_options import settings_with

    users = read_again(settings_with(broker), folder)
    click.echo(f"the broker has the users {', '.join(users)}")
