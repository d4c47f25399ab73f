"""Ports of an address that answer, seen from a container on some network."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.compose.engine import docker, image_of

PORT_NUMBERS = (1234, 6379, 6380, 8080, 9101, 9102, 9103)
"""Ports on which services of the stack listen, inside of their containers."""

SCAN = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
address, ports = socket.gethostbyname(sys.argv[1]), json.loads(sys.argv[2])
def answers(port):
    with socket.socket() as line:
        line.settimeout(1.5)
        return line.connect_ex((address, port)) == 0
with ThreadPoolExecutor(200) as pool:
    print(json.dumps([port for port, open_ in zip(ports, pool.map(answers, ports)) if open_]))
"""


def open_ports(network: str, address: str, ports: Sequence[int] = ()) -> set[int]:
    """The ports that answer to a container on `network`, of all there are unless `ports` are named."""
    wanted = json.dumps(list(ports)) if ports else "range"
    program = SCAN.replace("json.loads(sys.argv[2])", "range(1, 65536)") if not ports else SCAN
    image = image_of("producer")
    told = docker("run", "--rm", f"--network={network}", "--entrypoint=python", image, "-c", program, address, wanted)
    return set(json.loads(told.splitlines()[-1]))
