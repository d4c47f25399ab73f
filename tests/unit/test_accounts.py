"""`embq broker init`: what it makes, what it leaves alone, and whose it is."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from embq.app.broker_admin import accounts
from embq.app.broker_admin.accounts import reload
from embq.app.broker_admin.owner import Owner
from embq.app.cli import entry_point
from embq.core.broker.client import connect
from embq.core.broker.embedded import server_binary
from embq.core.broker.users import ROLES
from embq.core.errors import ConfigError, Exit, UsageError
from embq.core.settings import Settings
from tests.support.planning import snapshot
from tests.support.waiting import wait_until


def password(folder: Path, user: str) -> str:
    return (folder / user / "password").read_text().strip()


def line(folder: Path, user: str) -> str:
    lines = (folder / "broker" / "users.acl").read_text().splitlines()
    (found,) = [text for text in lines if text.split()[1] == user]
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    accounts.make(tmp_path / "secrets")
    return tmp_path / "secrets"


# --- what is made ---


def test_each_role_has_a_password_of_its_own_and_the_server_only_its_hash(made: Path) -> None:
    passwords = {password(made, role) for role in ROLES}
    assert len(passwords) == len(ROLES)
    acl = (made / "broker" / "users.acl").read_text()
    for role in ROLES:
        assert hashlib.sha256(password(made, role).encode()).hexdigest() in line(made, role)
        assert len(bytes.fromhex(password(made, role))) == 32
        assert password(made, role) not in acl


def test_files_and_folders_are_for_their_owner_alone(made: Path) -> None:
    for path in made.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_a_folder_that_others_could_look_into_is_closed(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir(mode=0o755)
    accounts.make(tmp_path)
    assert stat.S_IMODE((tmp_path / "worker").stat().st_mode) == 0o700


def test_the_verb_makes_everything_and_the_second_time_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "secrets"
    assert entry_point.run(["broker", "init", str(folder)]) == Exit.DONE
    before = snapshot(folder)
    role_files = {f"{role}/{name}" for role in ROLES for name in ("password", "ca.crt")}
    servers = {"broker/users.acl", "broker/tls/server.crt", "broker/tls/server.key", "ca/ca.crt", "ca/ca.key"}
    assert set(before) == role_files | servers
    assert {before[f"{role}/ca.crt"] for role in ROLES} == {before["ca/ca.crt"]}
    capsys.readouterr()
    assert entry_point.run(["broker", "init", str(folder)]) == Exit.DONE
    assert snapshot(folder) == before
    assert capsys.readouterr().out == f"{folder}: nothing was missing\n"


def test_the_verb_prints_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry_point.run(["broker", "init", str(tmp_path), "--user", "worker-gpu2"]) == Exit.DONE
    said = "".join(capsys.readouterr())
    assert str(tmp_path / "worker-gpu2" / "password") in said
    assert not [role for role in [*ROLES, "worker-gpu2"] if password(tmp_path, role) in said]


# --- what stays ---


def test_a_password_that_is_there_stays_and_one_that_was_removed_is_replaced(made: Path) -> None:
    before = {role: password(made, role) for role in ROLES}
    old_line = line(made, "laptop")
    (made / "laptop" / "password").unlink()
    again = accounts.make(made)
    assert again.users_changed
    assert {role for role in ROLES if password(made, role) != before[role]} == {"laptop"}
    assert line(made, "laptop").count("#") == 1
    assert line(made, "laptop") != old_line


def test_a_password_that_a_person_chose_is_taken(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "password").write_text("correct horse\n")
    accounts.make(tmp_path)
    assert f"#{hashlib.sha256(b'correct horse').hexdigest()} " in line(tmp_path, "laptop")


def test_the_folder_of_a_further_user_may_be_taken_away(made: Path) -> None:
    accounts.make(made, ["worker-gpu2"])
    before = line(made, "worker-gpu2")
    (made / "worker-gpu2" / "password").rename(made.parent / "elsewhere")
    (made / "worker-gpu2").rmdir()
    assert accounts.make(made).paths == []
    assert line(made, "worker-gpu2") == before
    assert not (made / "worker-gpu2").exists()


def test_rights_of_another_version_are_brought_up_to_this_one(made: Path) -> None:
    path = made / "broker" / "users.acl"
    wanted = path.read_text()
    path.write_text("".join(f"{' '.join(text.split()[:4])} ~*\n" for text in wanted.splitlines()))
    assert accounts.make(made).users_changed
    assert path.read_text() == wanted


def test_a_user_with_another_name_is_kept(made: Path) -> None:
    path = made / "broker" / "users.acl"
    path.write_text(path.read_text() + "user grafana on nopass ~x +get\n")
    accounts.make(made, ["laptop-ann"])
    assert "user grafana on nopass ~x +get\n" in path.read_text()
    assert line(made, "laptop-ann").split()[4:] == line(made, "laptop").split()[4:]


def test_a_file_that_is_no_list_of_users_is_named(made: Path) -> None:
    (made / "broker" / "users.acl").write_text("hello\n")
    with pytest.raises(ConfigError, match=r"users\.acl has a line that is none"):
        accounts.make(made)


def test_an_empty_password_is_refused(made: Path) -> None:
    (made / "laptop" / "password").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        accounts.make(made)


# --- further users ---


def test_a_user_is_removed_with_its_password(made: Path) -> None:
    accounts.make(made, ["worker-gpu2"])
    accounts.remove(made, ["worker-gpu2"])
    assert "worker-gpu2" not in (made / "broker" / "users.acl").read_text()
    assert not (made / "worker-gpu2").exists()


@pytest.mark.parametrize("name", ["gpu2", "worker gpu2", "worker-", "worker-a b", "worker-../x", "root-1", ""])
def test_a_user_without_a_role_is_refused(made: Path, name: str) -> None:
    before = snapshot(made)
    with pytest.raises(UsageError, match="is no user of embq"):
        accounts.make(made, [name])
    assert snapshot(made) == before


@pytest.mark.parametrize(("name", "why"), [("laptop", "is a role, and stays"), ("worker-x", "has no user worker-x")])
def test_who_cannot_be_removed_is_named(made: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        accounts.remove(made, [name])


# --- whose the files are ---

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def owners(folder: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in [folder, *folder.rglob("*")]}


@as_root
def test_all_of_it_is_given_to_the_owner(tmp_path: Path) -> None:
    assert entry_point.run(["broker", "init", str(tmp_path / "secrets"), "--owner", "4711:4712"]) == Exit.DONE
    assert owners(tmp_path / "secrets") == {(4711, 4712)}


@as_root
def test_what_else_lies_in_the_folder_is_not_given_away(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "laptop").symlink_to(outside)
    accounts.make(tmp_path)
    Owner(4711, 4712).take_ownership(tmp_path, accounts.users_of(tmp_path))
    assert {path.lstat().st_uid for path in (tmp_path, tmp_path / "notes.txt", outside)} == {0}


@as_root
def test_the_stacks_folder_of_secrets_is_given_though_docker_has_made_storage_in_it(tmp_path: Path) -> None:
    """Its users could be made by root alone."""
    (tmp_path / "secrets" / "storage").mkdir(parents=True)
    assert entry_point.run(["broker", "init", str(tmp_path / "secrets"), "--owner", "4711:4712"]) == Exit.DONE
    assert owners(tmp_path / "secrets") == {(4711, 4712), (0, 0)}
    assert [path.name for path in tmp_path.rglob("*") if path.lstat().st_uid == 0] == ["storage"]


@as_root
def test_only_an_empty_folder_of_root_is_given(tmp_path: Path) -> None:
    empty, full, others = (tmp_path / name for name in ("empty", "full", "others"))
    for folder in (empty, full, others):
        folder.mkdir()
    (full / "file").touch()
    os.chown(others, 4000, 4000)
    owner = Owner(4711, 4712)
    assert [owner.give(folder) for folder in (empty, full, others)] == [True, False, False]
    assert [folder.stat().st_uid for folder in (empty, full, others)] == [4711, 0, 4000]


@pytest.mark.parametrize("text", ["1000", "embq:embq", "1000:", "1000:1000:1", "-1:0"])
def test_an_owner_is_two_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="is not UID:GID"):
        Owner.parse(text)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--give", "x"], "--give needs to know to whom"),
        (["--owner", "me"], "is not UID:GID"),
        (["--server-name", "not a name"], "neither a host name nor an IP address"),
        (["--user", "gpu2"], "is no user of embq"),
        (["--remove", "worker-gpu2"], "has no user"),
    ],
)
def test_bad_options_are_one_message(
    tmp_path: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry_point.run(["broker", "init", str(tmp_path / "s"), *arguments]) == Exit.USAGE
    said = capsys.readouterr().err
    assert why in said
    assert "next:" in said


# --- a server that reads them ---


@pytest.fixture(params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest, made: Path, short_tmp: Path) -> Iterator[tuple[str, Path]]:
    """URL of a server with the users of a folder, and the folder."""
    binary = str(server_binary()) if request.param == "valkey" else shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not on PATH")
    socket = short_tmp / "s"
    options = ["--port", "0", "--unixsocket", str(socket), "--dir", str(short_tmp), "--save", ""]
    process = subprocess.Popen(
        [binary, *options, "--aclfile", str(made / "broker" / "users.acl")], stdout=subprocess.DEVNULL
    )
    try:
        wait_until(socket.exists, 20)
        yield f"unix://{socket}", made
    finally:
        process.terminate()
        process.wait(20)


def who(url: str, folder: Path, user: str) -> str:
    with connect(url.replace("://", f"://{user}@"), password=password(folder, user)) as client:
        said = client.acl_whoami()
        return said.decode() if isinstance(said, bytes) else str(said)


def test_a_server_reads_the_users_and_reads_them_again(guarded: tuple[str, Path]) -> None:
    url, folder = guarded
    assert [who(url, folder, role) for role in ROLES] == list(ROLES)
    accounts.make(folder, ["worker-gpu2"])
    with pytest.raises(redis.AuthenticationError):
        who(url, folder, "worker-gpu2")
    assert reload(Settings(broker_url=url), folder) == sorted([*ROLES, "worker-gpu2"])
    assert who(url, folder, "worker-gpu2") == "worker-gpu2"
    with connect(url) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.ping()


def test_who_has_an_old_password_or_none_any_more_is_out_at_once(guarded: tuple[str, Path]) -> None:
    url, folder = guarded
    accounts.make(folder, ["worker-gpu2"])
    reload(Settings(broker_url=url), folder)
    users = ("laptop", "worker", "worker-gpu2")
    clients = {
        user: connect(url.replace("://", f"://{user}@"), password=password(folder, user), patient=True)
        for user in users
    }
    assert all(client.ping() for client in clients.values())
    (folder / "worker" / "password").unlink()
    accounts.remove(folder, ["worker-gpu2"])
    accounts.make(folder)
    reload(Settings(broker_url=url), folder)
    assert clients["laptop"].ping()
    for user in ("worker", "worker-gpu2"):
        with pytest.raises(redis.AuthenticationError):
            clients[user].ping()
    assert who(url, folder, "worker") == "worker"
    for client in clients.values():
        client.close()


def connections(admin: redis.Redis) -> dict[str, set[str]]:
    """User -> ids of its connections."""
    found: dict[str, set[str]] = {}
    for one in admin.client_list():
        found.setdefault(one["user"], set()).add(one["id"])
    return found


def test_a_user_is_made_changed_and_revoked_by_one_command_while_the_others_stay_connected(
    guarded: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    url, folder = guarded

    def init(*options: str) -> None:
        assert entry_point.run(["broker", "init", str(folder), "--broker", url, *options]) == Exit.DONE

    def client(user: str) -> redis.Redis:
        return connect(url.replace("://", f"://{user}@"), password=password(folder, user))

    init("--user", "worker-gpu2", "--user", "worker-gpu3")
    said = capsys.readouterr()
    assert "worker-gpu2" in said.out.splitlines()[-1]
    assert "embq broker reload" not in said.err
    with (
        client("admin") as admin,
        client("worker") as other,
        client("worker-gpu2") as gpu2,
        client("worker-gpu3") as gpu3,
    ):
        assert all(one.ping() for one in (other, gpu2, gpu3))
        revoked = connections(admin)
        waiting = threading.Thread(target=lambda: broken.append(error_of(gpu2)))
        broken: list[Exception | None] = []
        waiting.start()
        wait_until(lambda: any(one["cmd"] == "blmove" for one in admin.client_list()))
        (folder / "worker-gpu3" / "password").unlink()
        init("--remove", "worker-gpu2", "--user", "worker-gpu3")
        waiting.join(20)
        assert isinstance(broken[0], redis.ConnectionError | redis.AuthenticationError)
        left = connections(admin)
        assert "worker-gpu2" not in left
        assert not left.get("worker-gpu3", set()) & revoked["worker-gpu3"]
        if "valkey_version" in admin.info():  # Redis 7 ends every connection when it reads its users
            assert left["worker"] == revoked["worker"]
        assert other.ping()
    assert who(url, folder, "worker-gpu3") == "worker-gpu3"


def error_of(client: redis.Redis) -> Exception | None:
    """The error that ends a wait for a hint."""
    try:
        client.blmove("rq:queue:embq.none", "rq:queue:embq.none", 60, "LEFT", "RIGHT")
    except redis.RedisError as error:
        return error
    return None


def test_a_server_that_reads_another_list_of_users_is_told_of(guarded: tuple[str, Path], tmp_path: Path) -> None:
    url, folder = guarded
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    accounts.make(copied, ["worker-gpu3"])
    with pytest.raises(ConfigError, match=r"does not read .*copied/broker/users\.acl"):
        reload(Settings(broker_url=url), copied)


def test_reload_without_the_admins_password_says_where_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="admin/password cannot be read"):
        reload(Settings(broker_url="redis://127.0.0.1:1"), tmp_path)


def test_init_needs_no_torch_and_no_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from embq.app.cli.entry_point import run; status = run(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'pyarrow'} & set(sys.modules), 'too much'; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, "broker", "init", str(tmp_path / "s")], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
