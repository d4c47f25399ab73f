"""Number of times that each unit was begun, told by the server itself: every attempt that is charged goes past here."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from types import TracebackType

from tests.faults.kit.cluster import Broker

_CHARGED = re.compile(rb'"HINCRBY" "embq:\{[^}]*\}:att" "(\d+)" "1"')
_SPARED = re.compile(rb'"HSET" "embq:\{[^}]*\}:spare" "(\d+)"')


class Attempts:
    """Listens to a server that lives as long as this does.

    Attributes:
        begun: unit -> how often its samples began to be read.
        helped: units that were run a second time at the tail, on purpose.
    """

    def __init__(self, broker: Broker) -> None:
        self.begun: Counter[int] = Counter()
        self.helped: set[int] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"{broker.folder}/b.sock")
        self._socket.sendall(f"AUTH {broker.password}\r\nMONITOR\r\n".encode())
        self._lines = self._socket.makefile("rb")
        assert [self._lines.readline() for _ in range(2)] == [b"+OK\r\n"] * 2
        self._thread = threading.Thread(target=self._listen, name="monitor", daemon=True)

    def reruns(self) -> dict[int, int]:
        """Unit -> how often it was begun again although nobody meant to."""
        return {u: count - 1 for u, count in self.begun.items() if count > 1 and u not in self.helped}

    def _listen(self) -> None:
        for line in self._lines:
            if b" lua] " not in line[:40]:
                continue
            if found := _CHARGED.search(line):
                self.begun[int(found[1])] += 1
            elif found := _SPARED.search(line):
                self.helped.add(int(found[1]))

    def __enter__(self) -> Attempts:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._lines.close()
        self._socket.close()
