"""The ssh launcher of a fleet, as far as it needs no host."""

from __future__ import annotations

import pytest

from embq.app.fleet.ssh import ssh_launcher
from embq.core.errors import ConfigError


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
