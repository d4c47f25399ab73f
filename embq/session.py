"""A run on this machine from start to finish: server, producer, writer and workers, started and stopped together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from core.broker.client import check, connect
from core.broker.embedded import EmbeddedServer, keep_to_ourselves
from core.errors import AwayError
from core.queue.ledger import Ledger
from core.run.layout import Layout
from core.run.run_info import RunInfo
from core.service.stopping import REPEAT_S
from core.settings import Settings
from core.storage.paths import Place
from embq.children import Child
from embq.display import Display
from embq.progress import Progress
from embq.rights import require
from embq.watch import Watch
from producer.announce import announce

LOOK_S = 0.25
LOOK_FAR_S = 2.0
"""Between two looks at an object store, each of which is a few requests."""
HURRY_S = 1.5 * REPEAT_S
"""After which a second request to stop is taken for a second one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a session ended: the last look at the run, and whether a user stopped it."""

    progress: Progress
    interrupted: bool


class Session:
    """Brings one planned run to its end, or to a clean stop.

    Args:
        info: the run.
        root: its output folder.
        wishes: what is asked of the run at the start, see `core.run.control`.
        worker_arguments: options for `embq worker`.
        settings: with `broker_url` set where the user named a broker; otherwise a server is started beside the output.
        stops: number of times the user has asked to stop so far.
    """

    def __init__(
        self,
        info: RunInfo,
        root: Place,
        *,
        wishes: Mapping[str, str],
        worker_arguments: list[str],
        settings: Settings,
        drain_s: float,
        stops: Callable[[], int],
        display: Display,
    ) -> None:
        self.info = info
        self.layout = Layout(root)
        self.wishes = wishes
        self.worker_arguments = worker_arguments
        self.settings = settings
        self.drain_s = drain_s
        self.stops = stops
        self.display = display
        self.server: EmbeddedServer | None = None
        self._last: Progress | None = None

    def run(self) -> Outcome:
        """Work until the run is closed or a stop was asked for. Raises the error of a service that cannot go on."""
        with ExitStack() as stack:
            url = self.settings.broker_url or self._start_server(stack)
            if self.server is None:
                # Whatever the broker is: of two sessions on one output the second is sent away.
                stack.callback(keep_to_ourselves(self.layout.broker).close)
            # Not a patient one: whoever is to start a server that died must not wait for it.
            client = connect(url, password=self.settings.broker_password)
            check(client, url)
            require(client, "run")
            announce(client, self.info, self.layout.root)
            Ledger(client, self.info.run).ask(self.wishes)
            self.layout.logs.mkdir(exist_ok=True)
            children = self._children(url)
            watch = Watch(self.layout.root, client)
            try:
                for child in children:
                    child.start()
                interrupted = self._until_closed(children, watch)
            finally:
                self._stop(children)
            return Outcome(Watch(self.layout.root, None).look().ended_after(self._last), interrupted)

    def _start_server(self, stack: ExitStack) -> str:
        server = EmbeddedServer(self.layout.broker)
        # On the stack first: what `start` has taken hold of must be let go even where it fails.
        stack.callback(server.stop)
        server.start()
        self.server = server
        return server.url

    def _children(self, url: str) -> list[Child]:
        only = ["--run", self.info.run]
        # Nobody else has a server that we hold: leases and locks of before are void, the queue is built anew.
        first, again = (["--rebuild", "--takeover"], ["--takeover"]) if self.server is not None else ([], [])
        logs = self.layout.logs

        def child(verb: str, arguments: list[str], later: list[str]) -> Child:
            return Child(
                verb,
                [*only, *arguments],
                again=[*only, *later],
                log=logs / f"{verb}.log",
                broker_url=url,
                environment={"EMBQ_PRIVATE_HOSTS": ",".join(self.settings.private_hosts)},
            )

        return [
            child("writer", first, again),
            child("producer", [], []),
            child("worker", self.worker_arguments, self.worker_arguments),
        ]

    def _until_closed(self, children: list[Child], watch: Watch) -> bool:
        """True where the user stopped it."""
        while True:
            if self.stops():
                self.display.say("stopping: begun units are finished and committed (Ctrl-C again: at once)")
                return True
            if self.server is not None and not self.server.running():
                self.display.say("the embedded server died; starting it again")
                self.server.start()
            for child in children:
                child.look_after()
            # Without an answer the server is being started again, or a child is about to say what is wrong with it.
            with suppress(redis.exceptions.RedisError, AwayError):
                progress = watch.look()
                self.display.show(progress)
                self._last = progress if progress.limits.so_far.name else self._last
                if progress.state == "cancelled":
                    self.display.say("the run was cancelled: what is published is committed, the rest is left")
                    return True
            with suppress(AwayError):  # the writer waits for it as well
                if watch.log_state().closed:
                    return False
            time.sleep(LOOK_S if isinstance(self.layout.root, Path) else LOOK_FAR_S)

    def _stop(self, children: list[Child]) -> None:
        """Workers first, so that the writer commits all that they still publish; then producer and writer."""
        writer, producer, worker = children
        asked = self.stops()
        if worker.process is not None and worker.process.poll() is None:
            worker.process.terminate()
            deadline = time.monotonic() + self.drain_s + 20
            # Where the writer has given up, nobody takes what workers finish, and they may have no room to leave it.
            hurry_at = time.monotonic() + HURRY_S if writer.ended() else deadline
            while worker.process.poll() is None and time.monotonic() < deadline:
                if self.server is not None and not self.server.running():
                    self.server.start()
                if self.stops() > max(1, asked) or time.monotonic() > hurry_at:
                    worker.hurry()
                    asked, hurry_at = self.stops(), deadline
                time.sleep(0.05)
            worker.stop(1.0)
        producer.stop(10.0)
        writer.stop(120.0)
