"""The summary at the end of a build: what a searcher will get, in some lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indexer.report import INFOS, NO_PICTURE, PICTURE


def summary(infos: Mapping[str, Any], *, report: Path | str = "") -> str:
    """What the user reads at the end of a build: some lines of text, without a line break at the end.

    Args:
        infos: what infos.json says.
        report: the folder with infos.json and report.png.
    """
    plan, search = infos["plan"], infos["search"]
    per = infos["bytes_per_vector"]
    lines = [
        f"index      {infos['index_key']}, {infos['nb vectors']:,} vectors of {infos['vectors dimension']} dimensions",
        f"size       {_bytes(infos['size in bytes'])} in memory, {per['ram']:.0f} bytes per vector; "
        f"{_bytes(sum(infos['bytes'].values()))} on disk, {per['disk']:.0f} per vector",
        f"search     looks at {search['nprobe']:,} of {plan['nlist']:,} lists"
        + (f", re-ranks {search['k_factor']} times as many rows as it returns" if search["k_factor"] > 1 else ""),
    ]
    for name, recalls in infos["recall"].items():
        values = ", ".join(f"{value:.3f}@{key.removeprefix('recall@')}" for key, value in recalls.items())
        times = infos["latency_ms"][name]
        lines.append(
            f"{name:<10} recall {values}; {times['p50']:.2g} ms per search (p95 {times['p95']:.2g}, "
            f"p99 {times['p99']:.2g})"
        )
    lines += [f"target     {_target(infos)}", *(f"note       {note}" for note in infos["notes"])]
    if report:
        drawn = infos.get("picture", "")
        lines.append(f"report     {Path(report) / INFOS}" + (f" and {PICTURE}" if drawn == PICTURE else ""))
        if drawn == NO_PICTURE:
            lines.append(f"picture    {drawn}")
    return "\n".join(lines)


def _target(infos: Mapping[str, Any]) -> str:
    wanted = [
        f"{name} >= {value:g} for every set" if name.startswith("recall") else f"{value:g} ms per search at most"
        for name, value in infos["target"].items()
        if value is not None
    ]
    said = {True: "met", False: "MISSED", None: "not measured"}[infos["target_met"]]
    return f"{', '.join(wanted) or 'none'}: {said}"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1024 or unit == "TB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit in ("B", "KB") else f"{count:.1f} {unit}"
