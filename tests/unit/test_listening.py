"""[HOST:]PORT, and what is said where it cannot be listened on."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from core.errors import ConfigError, TryLaterError
from core.networks import Address, bound
from core.settings import Settings


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("9101", "127.0.0.1", 9101, "http://127.0.0.1:9101/x"),
        ("0.0.0.0:9101", "0.0.0.0", 9101, "http://127.0.0.1:9101/x"),
        ("[::]:1", "::", 1, "http://[::1]:1/x"),
        ("[::1]:65535", "::1", 65535, "http://[::1]:65535/x"),
        ("gpu-box:0", "gpu-box", 0, "http://gpu-box:0/x"),
    ],
)
def test_an_address_is_a_port_with_or_without_a_host(text: str, host: str, port: int, url: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.url("/x")) == (host, port, url)


@pytest.mark.parametrize("text", ["x", ":9101", "box:", "65536", "-1", "::1:9101", "1.5", "http://box:9101", "٣"])
def test_what_is_no_address_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"\[HOST:\]PORT|brackets"):
        Address.parse(text)
    monkeypatch.setenv("EMBQ_METRICS", text)
    with pytest.raises(ConfigError, match="EMBQ_METRICS"):
        Settings.from_environment()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_another_programs_matter(taken: int) -> None:
    with pytest.raises(TryLaterError, match=f"port {taken} of 127.0.0.1 is taken") as error:
        bound(Address(port=taken), taken="another port", example="")
    assert (error.value.code, error.value.next_step) == ("port_in_use", "another port")


def test_an_address_of_another_machine_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1, port 9101") as error:
        bound(Address(host="192.0.2.1", port=9101), taken="", example="--metrics 9101")
    assert (error.value.code, error.value.next_step) == ("not_bindable", "--metrics 9101")
