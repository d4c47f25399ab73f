"""torchrun for the processes of one machine: `python -m training.launch.torchrun FLAGS`, with torchrun's own flags.

torchrun's stores listen on all addresses of the machine and ask nobody who they are, and torchrun unpickles what it
reads in its own, so that whoever reaches the port runs code. Here torchrun's own store is in its memory, where no other
process needs it, and that of the training listens on the loopback alone.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

LOOPBACK = "127.0.0.1"


def stay_on_loopback() -> None:
    """Have the stores that this process serves from now on listen on the loopback alone."""
    distributed: Any = importlib.import_module("torch.distributed")
    # Its name in the package is that of a function.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

    class LoopbackStore(distributed.TCPStore):  # type: ignore[misc]
        """A TCPStore; the arguments are its own."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **more: Any,
        ) -> None:
            if is_master:
                listening = socket.create_server((LOOPBACK, port))
                port = listening.getsockname()[1]
                more = {**more, "master_listen_fd": listening.detach(), "use_libuv": True}
                host_name = LOOPBACK
            super().__init__(host_name, port, world_size, is_master, **more)

    distributed.TCPStore = rendezvous.TCPStore = LoopbackStore


def meet_in_memory() -> None:
    """Have torchrun keep in its memory what it says to torchruns of other machines."""
    distributed: Any = importlib.import_module("torch.distributed")
    backend: Any = importlib.import_module("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
    backend._create_tcp_store = lambda _: distributed.HashStore()


if __name__ == "__main__":
    stay_on_loopback()
    meet_in_memory()
    from torch.distributed.run import main

    main()
