"""Coloured images, and a server of the thumbnails of runs in this process."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from embq.app.cli.entry_point import run
from embq.app.services import http_server as server
from embq.core.errors import Exit
from embq.core.networks import HostNames
from embq.retrieval.serving.app import Serving, application
from embq.retrieval.serving.middleware import AccessRules
from embq.retrieval.ui.thumbnails.routes import Thumbnails
from tests.support.picture_files import encoded

COLOURS = [(200, 30, 30), (30, 180, 40), (40, 60, 220), (230, 200, 20), (150, 40, 170), (20, 190, 190), (250, 140, 30)]
SIZE = (800, 500)


def image_of(number: int, kind: str = "JPEG", size: tuple[int, int] = SIZE, **options: object) -> bytes:
    """An encoded image of one colour, a lighter square in its top left corner."""
    image = Image.new("RGB", size, COLOURS[number % len(COLOURS)])
    image.paste((250, 250, 250), (0, 0, size[0] // 4, size[1] // 4))
    return encoded(image, kind, **options)


def pixels(jpeg: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def assert_shows(jpeg: bytes, number: int) -> None:
    """The thumbnail is that of `image_of(number)`: its shape, its colour, and which way is up."""
    found = pixels(jpeg)
    assert found.shape == (200, 320, 3)
    assert np.abs(found[150, 250] - COLOURS[number % len(COLOURS)]).max() < 12
    assert found[10, 10].min() > 235


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server of one run; `thumbnails` is what makes them."""

    client: TestClient
    thumbnails: Thumbnails
    cache: Path

    def get(self, id_: int, *, index: str = "out", **headers: str):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.get(f"/thumb/{index}/image/{id_}", headers=named)

    def code(self, id_: int) -> str:
        """The code of a refusal, which is a 404."""
        answer = self.get(id_)
        assert answer.status_code == 404, answer.text
        assert set(answer.json()) == {"code", "message", "next"}
        return str(answer.json()["code"])


class Pages:
    """A site of thumbnails alone."""

    def __init__(self, serving: Serving) -> None:
        self.thumbnails = Thumbnails(serving.indices)
        self.routes = self.thumbnails.routes

    def start(self) -> None:
        """Nothing runs beside them."""

    def stop(self) -> None:
        """End the child processes."""
        self.thumbnails.close()


def started(stack: ExitStack, *folders: Path, cache: Path, follow: bool = False) -> Server:
    """A server of these indexes, until the stack is closed; `cache` is XDG_CACHE_HOME."""
    made: list[Pages] = []

    def site(serving: Serving) -> Pages:
        made.append(Pages(serving))
        return made[0]

    app = application(
        [str(folder) for folder in folders],
        [],
        follow=follow,
        memory="ram",
        threads=1,
        with_models=False,
        image_urls=False,
        rules=AccessRules(hosts=HostNames(["testserver"])),
        try_decoding=len,
        site=site,
    )
    client = stack.enter_context(TestClient(app))
    return Server(client=client, thumbnails=made[0].thumbnails, cache=cache / "embq" / "thumbnails")


@contextmanager
def served_here(patch: pytest.MonkeyPatch, verb: str, *arguments: str | Path) -> Iterator[TestClient]:
    """`embq serve` or `embq ui` with these arguments, in this process: it listens on no address, whatever they say."""
    made: list[ASGIApp] = []
    with patch.context() as inner:
        inner.setattr(server, "bound", lambda *_: socket.socket())
        inner.setattr(server, "serve", lambda app, *_, **__: made.append(app))
        assert run([verb, *map(str, arguments), "--no-model"]) == Exit.DONE
    with TestClient(made[0], base_url="http://localhost") as client:
        yield client
