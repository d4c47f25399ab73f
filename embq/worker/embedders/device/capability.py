"""Check of a GPU's compute capability against the architectures that the installed torch has code for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from embq.core.errors import ConfigError, DeviceError

WHEELS = "pip install --index-url https://download.pytorch.org/whl"
BUILDS = (
    ((7, 5), "install a newer torch: pip install -U torch"),
    ((5, 0), f"install a torch for CUDA 12.6, which versions 2.6 to 2.14 have: {WHEELS}/cu126 'torch>=2.6,<2.15'"),
    ((3, 7), f"the last torch with code for it is 2.6.0 for CUDA 11.8, untried by us: {WHEELS}/cu118 torch==2.6.0"),
    ((0, 0), "no torch that embq works with has code for it"),
)
"""Least capability -> what serves it, from there on. Wheels for CUDA 12.8 and newer dropped 5.0 to 7.0 in steps, from
torch 2.7 on, and those for CUDA 12.6 end with torch 2.14 (pytorch issues 157517, 172352, 190385; .ci/manywheel)."""
OTHERS = "or leave it to an environment of its own with a second `embq worker`, or out of --devices"


def check_device(device: str) -> None:
    """Check that torch sees one GPU in this process, the one that the supervisor shows it, and has code for it.

    Raises DeviceError if torch does not see it, as one that has fallen off the bus, and ConfigError if it sees
    several, or lacks code.
    """
    if not device.startswith("cuda"):
        return
    try:
        import torch
    except ImportError:
        return  # a model that needs it tells so
    if torch.version.cuda is None and torch.version.hip is None:
        raise ConfigError(
            f"torch {torch.__version__} is a build for CPUs",
            next_step="install the build of torch for this GPU, or use --devices cpu",
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError(
            f"torch {torch.__version__} does not see the device",
            next_step="look for it with nvidia-smi and in dmesg: a card that fell off the bus may be back after a "
            "restart of the machine; a driver that is too old for this torch has to be updated",
        )
    if count > 1:
        raise ConfigError(
            f"torch {torch.__version__} sees {count} devices, where CUDA_VISIBLE_DEVICES shows it one",
            next_step="see that nothing in this process's environment sets another, such as GPU_DEVICE_ORDINAL",
        )
    try:
        properties, archs = torch.cuda.get_device_properties(0), torch.cuda.get_arch_list()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"the device failed: {(str(error).splitlines() or ['no reason given'])[0]}") from error
    if torch.version.hip is None:
        capability = (properties.major, properties.minor)
        what, runs = f"compute capability {capability[0]}.{capability[1]}", serves(archs, capability)
        remedy = next(remedy for least, remedy in BUILDS if capability >= least)
    else:
        architecture = properties.gcnArchName.partition(":")[0]
        what, runs = f"architecture {architecture}", any(arch == architecture or "generic" in arch for arch in archs)
        remedy = "install a torch for it, or set HSA_OVERRIDE_GFX_VERSION as its maker says"
    if archs and not runs:
        code = f"torch {torch.__version__} has code for {', '.join(archs)} only"
        raise ConfigError(f"{properties.name} has {what}, and {code}", next_step=f"{remedy}; {OTHERS}")


def serves(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures, as `torch.cuda.get_arch_list` names them, runs on a GPU.

    Machine code for X.Y runs on X.Z from Z = Y on, PTX on everything from X.Y on, and what is marked "a" on X.Y alone
    (CUDA C++ Programming Guide, binary and PTX compatibility).
    """
    for arch in archs:
        if not (match := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)):
            continue
        kind, major, minor, mark = match[1], int(match[2]), int(match[3]), match[4]
        if mark == "a":
            runs = capability == (major, minor)
        elif kind == "compute" and not mark:
            runs = capability >= (major, minor)
        else:
            runs = capability[0] == major and capability[1] >= minor
        if runs:
            return True
    return False
