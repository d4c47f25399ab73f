"""The ssh launcher of a fleet, as far as it needs no host."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from embq.app.remote.ssh import away, ssh_line, words
from embq.core.errors import ConfigError, UsageError
from embq.fleet.ssh import read_hosts, ssh_launcher


@pytest.mark.parametrize("act", ["drain", "remove", "states"])
def test_a_machine_without_an_ssh_client_is_told_to_install_one(act: str) -> None:
    launcher = ssh_launcher("f", {"m": "host"}, ["/nowhere/ssh"], "python3")
    calls = {
        "drain": lambda: list(launcher.drain(["m"], 1.0)),
        "remove": lambda: list(launcher.remove(["m"])),
        "states": lambda: launcher.states(["m"]),
    }
    with pytest.raises(ConfigError, match="/nowhere/ssh is not installed here") as refused:
        calls[act]()
    assert "ssh client" in refused.value.next_step


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"# ours\ngpu1\na b  # and this\n", "line 3: 'a b' is no host"),
        (b"gpu1\r\ngpu\xff\r\n", "line 2: 'gpu\\udcff' is no host"),
        (b"gpu1\n\ngpu2\ngpu1\n", "hosts.txt line 1, hosts.txt line 4: gpu1 is named 2 times"),
        (b"# gpu1\n", "hosts.txt names no host"),
    ],
)
def test_what_is_wrong_in_a_file_of_hosts_is_named_with_its_line(text: bytes, said: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_bytes(text)
    with pytest.raises(UsageError, match=re.escape(said).replace("hosts\\.txt", re.escape(str(hosts)))):
        read_hosts(hosts)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed here")
@pytest.mark.parametrize(("given", "seconds"), [("ssh", 10), ("ssh -o ConnectTimeout=60", 60)])
def test_the_time_that_a_host_has_to_answer_is_raised_by_the_options_of_ssh(given: str, seconds: int) -> None:
    line = ssh_line([*words("--ssh-command", given), "-G"], "gpu1", ["true"])
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert f"connecttimeout {seconds}\n" in shown
    assert "-o ConnectTimeout=" in away("gpu1", "it timed out", ["ssh"])[1]
