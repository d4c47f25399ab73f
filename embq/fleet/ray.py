"""The launcher of a fleet on a Ray cluster: an actor for each machine, in a placement group with its GPUs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import embq
from embq.app.doctor.check import Check
from embq.app.remote.ray_cluster import join, settle
from embq.core.extras import missing
from embq.core.process.children import run_python
from embq.core.settings import child_environment
from embq.fleet.launcher import CHECK_S, Answer, AskingLauncher, FleetMember, answer_in

NAMESPACE = "embq"
PLACE_S = 60.0
"""Longest time until Ray has room for an actor, for which it would wait for ever."""


class Node:
    """An actor that holds the GPUs of a machine, and asks `embq.fleet.member` on its node."""

    def send(self, action: str, order: str) -> tuple[str, str]:
        """Standard output and error."""
        environment = child_environment()
        environment.pop("OMP_NUM_THREADS", None)  # Ray gives an actor one thread; a worker divides the cores itself
        arguments = ("-m", "embq.fleet.member", action)
        done = run_python(*arguments, timeout_s=None, request=order, environment=environment)
        return done.stdout, done.stderr


def ray_launcher(fleet: str, address: str, gpus: int) -> AskingLauncher:
    """Workers that stay on the nodes of a cluster, as long as their actors hold the GPUs.

    Args:
        address: of the cluster, as Ray takes it.
        gpus: of each machine; 0 for one core.
    """
    settle(address)
    try:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ModuleNotFoundError as error:
        raise missing("ray", "Ray is not installed here") from error
    join(ray, address, {"namespace": NAMESPACE, "log_to_driver": False})
    install = f"pip install 'embq[worker]=={embq.__version__}' on every node, for the Python of Ray"
    bundle = {"CPU": 1, **({"GPU": gpus} if gpus else {})}

    def placed(name: str) -> Any:
        with suppress(ValueError):
            return ray.get_actor(name)
        group = ray.util.placement_group([bundle], name=name, lifetime="detached")
        ray.get(group.ready(), timeout=PLACE_S)
        where = PlacementGroupSchedulingStrategy(group)
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": where}
        return ray.remote(Node).options(name=name, lifetime="detached", **options).remote()

    def request(action: str, member: FleetMember) -> Answer | Check:
        name, limit_s = f"{fleet}.{member.name}", CHECK_S + member.drain_s
        answer = None
        try:
            actor = placed(name) if action == "start" else ray.get_actor(name)
            output, errors = ray.get(actor.send.remote(action, member.order()), timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            needed = ", ".join(f"{number} {kind}" for kind, number in bundle.items())
            row = Check(member.name, "fail", f"the cluster has no room for {needed}, or its node hangs", "ray status")
        except ValueError:
            row = Check(member.name, "fail", "it has no actor", "embq fleet up")
            if action == "remove":
                return Answer(embq=embq.__version__)
        except ray.exceptions.RayError as error:
            detail = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            row = Check(member.name, "fail", f"its actor failed: {detail}", install)
        else:
            answer = answer_in(output)
            row = Check(member.name, "fail", (errors.strip().splitlines() or ["it printed nothing"])[-1], install)
        if action == "remove":
            with suppress(ValueError):  # there is none
                ray.util.remove_placement_group(ray.util.get_placement_group(name))
        return answer or row

    return AskingLauncher(fleet, request, lambda _: install)
