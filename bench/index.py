"""`embq index` beside autofaiss: same vectors, same memory, one thread, one scorer.

    python -m bench.index [--data bench/cache] [--cases minilm-60000-12M,...] [--reuse-builds] [--result index]

For each case of `bench.index_cases` both sides build an index within the same memory, autofaiss 2.18 in an environment
of its own (`bench.index_theirs`, `make bench-index`), ours by `embq index`. Both answer the same held-out queries one
by one on one thread, in turns, in processes of their own; recall is scored against exact search by the scorer of
tuning. Autofaiss tunes itself by time, ours by the recall asked for; beside what each has chosen, both are measured
over the whole range of their settings, and compared at equal recall.

What the peer builds is kept under the data and not built again; with `--reuse-builds` neither is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.index_cases import CASES, DATA, QUERIES, RECALL, Case, chosen
from bench.index_data import make_images, make_texts
from bench.index_ours import build as build_ours
from bench.index_ours import on_one_core
from bench.index_picture import plot
from bench.index_scoring import compared, points, truth_of
from bench.report import table, write
from embq.index.tune.recall import Truth

ROOT = Path(__file__).parent.parent
THEIR_PYTHON = ROOT / ".venv-autofaiss" / "bin" / "python"
TURNS = 2
"""Measurements of each side, one after the other; of each query the least seconds count."""


def main() -> None:
    """Measure, print, write and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES if case.rows <= 300_000))
    parser.add_argument("--reuse-builds", action="store_true", help="measure answers alone, where indexes are there")
    parser.add_argument("--build-only", action="store_true", help="build what the peer builds, and nothing else")
    parser.add_argument("--result", default="index")
    options = parser.parse_args()
    cases = chosen(options.cases)
    bench = Bench(options.data.resolve(), reuse=options.reuse_builds)
    if options.build_only:
        for case in cases:
            print(case.name, bench.theirs(case)["seconds"], "s")
        return
    measured = [bench.measure(case) for case in cases]
    report(measured)
    figures = {"recall_asked": RECALL, "load_average": round(os.getloadavg()[0], 2), "cases": measured}
    print("wrote", write(options.result, figures), "and", plot(measured, options.result))


class Bench:
    """The two sides over one folder of data.

    Args:
        data: made by `bench.index_data`; indexes and answers are kept in it as well.
        reuse: whether our indexes are taken as they are, where they are there.
    """

    def __init__(self, data: Path, *, reuse: bool) -> None:
        self._data = data
        self._reuse = reuse

    def measure(self, case: Case) -> dict[str, Any]:
        """Both builds, the answers in turns, and what follows."""
        print("measuring", case.name, file=sys.stderr)
        vectors = self.vectors(case)
        builds = {"theirs": self.theirs(case), "ours": self.ours(case)}
        sets = []
        for name, file in case.queries:
            queries = self._queries(case, file)
            asked = np.load(queries, allow_pickle=False)
            found = self._answers(case, name, queries)
            truth = self._truth(case, name, vectors, asked)
            sides = {side: points(folders, truth, vectors, asked) for side, folders in found.items()}
            sets.append(
                {
                    "queries": name,
                    "count": len(asked),
                    **compared(sides["theirs"], sides["ours"]),
                    "points": {side: [asdict(point) for point in each] for side, each in sides.items()},
                    "opened": {side: _opened(folders[0]) for side, folders in found.items()},
                }
            )
        return {
            "case": case.name,
            "vectors": case.vectors,
            "rows": len(vectors),
            "dim": int(vectors.shape[1]),
            "index_memory": case.index_memory,
            "memory": case.memory,
            "key_asked": case.key,
            "builds": builds,
            "query_sets": sets,
        }

    def vectors(self, case: Case) -> np.ndarray:
        """The rows of a case, mapped; both sides read them from a folder with one npy file."""
        file = self._folder(case) / "part.npy"
        if not file.exists():
            if case.vectors == "minilm":
                make_texts(self._data, case.rows)
            else:
                make_images(self._data, case.rows)
            every = np.load(self._data / case.vectors / "vectors.npy", mmap_mode="r", allow_pickle=False)
            if len(every) < case.rows:
                raise SystemExit(f"{case.name} wants {case.rows:,} rows, and {case.vectors} has {len(every):,}")
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file.with_name("partial.npy"), every[: case.rows])
            file.with_name("partial.npy").rename(file)
        rows: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        return rows

    def theirs(self, case: Case) -> dict[str, Any]:
        """Their index, built where it is not there, and its figures."""
        self.vectors(case)
        index = self._built(case, "theirs")
        if not (index / "build.json").exists():
            command = [THEIR_PYTHON, ROOT / "bench" / "index_theirs.py", "build", self._folder(case), index]
            command += ["--index-memory", case.index_memory, "--memory", case.memory]
            subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, preexec_fn=on_one_core)
        figures: dict[str, Any] = json.loads((index / "build.json").read_text())
        return figures

    def ours(self, case: Case) -> dict[str, Any]:
        """Our index, built anew unless it is to be reused, and its figures."""
        index = self._built(case, "ours")
        record = index.with_suffix(".json")
        if not (self._reuse and record.exists()):
            shutil.rmtree(index, ignore_errors=True)
            further = {name: self._queries(case, file, tuning=True) for name, file in case.queries if name != "image"}
            made = build_ours(
                self._folder(case),
                index,
                case.index_memory,
                case.memory,
                key=case.key,
                queries=further if case.vectors == "openclip" else None,
            )
            record.write_text(json.dumps(made, indent=1))
        figures: dict[str, Any] = json.loads(record.read_text())
        return figures

    def _answers(self, case: Case, name: str, queries: Path) -> dict[str, list[Path]]:
        """The folders with the answers of each side, measured in turns."""
        root = self._data / "answers" / case.name / name
        shutil.rmtree(root, ignore_errors=True)
        commands = {
            "theirs": [THEIR_PYTHON, ROOT / "bench" / "index_theirs.py", "search"],
            "ours": [sys.executable, "-m", "bench.index_ours"],
        }
        found: dict[str, list[Path]] = {side: [] for side in commands}
        for turn in range(TURNS):
            for side, command in commands.items():
                answers = root / f"{side}-{turn}"
                words = [*command, self._built(case, side), queries, answers]
                subprocess.run(list(map(str, words)), check=True, cwd=ROOT, preexec_fn=on_one_core)
                found[side].append(answers)
        return found

    def _queries(self, case: Case, file: str, *, tuning: bool = False) -> Path:
        """Held-out queries: one half to measure with, the other for tuning."""
        path = self._data / "sets" / f"{case.vectors}-{'tuning' if tuning else 'asked'}-{file}"
        every = np.load(self._data / case.vectors / file, allow_pickle=False)
        half = every[len(every) // 2 :] if tuning else every[: len(every) // 2]
        np.save(path, half[:QUERIES])
        return path

    def _truth(self, case: Case, name: str, vectors: np.ndarray, asked: np.ndarray) -> Truth:
        """Exact search, kept."""
        file = self._folder(case).parent / f"truth-{name}"
        file.mkdir(exist_ok=True)
        if not (file / "scores.npy").exists():
            truth = truth_of(vectors, asked)
            np.save(file / "ids.npy", truth.ids)
            np.save(file / "scores.npy", truth.scores)
        ids, scores = (np.load(file / f"{each}.npy", allow_pickle=False) for each in ("ids", "scores"))
        return Truth(ids=ids, scores=scores)

    def _folder(self, case: Case) -> Path:
        return self._data / "sets" / f"{case.vectors}-{case.rows}" / "vectors"

    def _built(self, case: Case, side: str) -> Path:
        name = case.name if side == "ours" else case.name.removesuffix("-their-key")
        return self._data / "built" / name / side


def _opened(answers: Path) -> dict[str, Any]:
    told = json.loads((answers / "answers.json").read_text())
    return {name: told[name] for name in ("open_s", "open_bytes")}


def report(measured: Sequence[dict[str, Any]]) -> None:
    """Print what matters, in columns."""
    header = ["case", "queries", "their key", "our key", "recall@10 theirs", "ours", "at recall", "their ms", "our ms"]
    rows = []
    for one in measured:
        keys = [one["builds"][side]["key"] for side in ("theirs", "ours")]
        for each in one["query_sets"]:
            equal = max(each["at_equal_recall"], key=lambda at: at["recall"])
            recalls = [each["recall_theirs"], each["recall_ours"], equal["recall"]]
            rows.append([one["case"], each["queries"], *keys, *recalls, equal["theirs_ms"], equal["ours_ms"]])
    table(header, rows)
    table(
        ["case", "build s theirs", "ours", "times", "CPU s theirs", "ours", "peak MB theirs", "ours", "of it merge"],
        [_build_row(one) for one in measured],
    )
    table(
        ["case", "limit MB", "bytes a vector in RAM, theirs", "ours", "on disk theirs", "ours", "ours for re-ranking"],
        [_bytes_row(one) for one in measured],
    )


def _build_row(one: dict[str, Any]) -> list[object]:
    theirs, ours = one["builds"]["theirs"], one["builds"]["ours"]
    merge = ours["infos"]["peak_rss_bytes"].get("merge", 0)
    return [
        *(one["case"], theirs["seconds"], ours["seconds"], round(theirs["seconds"] / ours["seconds"], 1)),
        *(theirs["cpu_s"], ours["cpu_s"]),
        *(round(count / 2**20) for count in (theirs["peak_rss_bytes"], ours["peak_rss_bytes"], merge)),
    ]


def _bytes_row(one: dict[str, Any]) -> list[object]:
    """An index of autofaiss is loaded into memory whole; of ours all but identities and the rows for re-ranking."""
    theirs, ours, rows = one["builds"]["theirs"], one["builds"]["ours"], one["rows"]
    kept = ours["bytes_on_disk"]
    searched = sum(kept.get(kind, 0) for kind in ("lists", "trained"))
    per_row = (theirs["bytes_on_disk"], ours["infos"]["bytes"]["index"], theirs["bytes_on_disk"], searched)
    return [
        *(one["case"], one["index_memory"]),
        *(round(count / rows, 1) for count in (*per_row, kept.get("rows", 0))),
    ]


if __name__ == "__main__":
    main()
