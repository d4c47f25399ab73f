"""Plans of devices that are not there: constants and their sources, speeds, limits, and the pages that show them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from bench import fleet
from embq.app.cli.entry_point import cli
from embq.app.planning.constants import MEASURED, REFERENCES, TEXT_TOKENS
from embq.app.planning.fleet_plan import broker_cores
from embq.app.planning.speeds import flop_of
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import InputError, UsageError
from embq.core.models import ModelConfig, ModelSpec
from embq.core.queue.heartbeats import Rate, report_rate
from embq.core.queue.scripts import load_scripts
from tests.e2e.session import write_shards, write_texts

ROOT = Path(__file__).parents[2]
LAION = ["--image-count", "5.85e9", "--bytes-per-image", "30000", "-m", "open_clip:ViT-L-14"]


def told(*arguments: str | Path, broker: str = "") -> str:
    environment = {"EMBQ_BROKER_URL": broker, "COLUMNS": "200"}
    done = CliRunner().invoke(cli, ["plan", *map(str, arguments)], env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def plan(*arguments: str | Path, broker: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(*arguments, "--json", broker=broker))
    return found


def result(source: str) -> Any:
    """The value of a source in bench/results."""
    file, _, path = source.partition(":")
    found = json.loads((ROOT / "bench" / "results" / file).read_text(encoding="utf-8"))["figures"]
    for part in path.split("/"):
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


# --- constants ---


@pytest.mark.parametrize("name", MEASURED)
def test_a_constant_is_the_figure_of_its_source(name: str) -> None:
    value, source = MEASURED[name]
    assert result(source) == value


@pytest.mark.parametrize("one", REFERENCES, ids=lambda one: one.model)
def test_a_reference_is_a_figure_of_the_h100(one: Any) -> None:
    assert result(one.source) == one.rows_per_s
    assert result(f"{one.source.rsplit('/', 2)[0]}/forward/flops") == one.flop


@pytest.mark.parametrize("one", [one for one in REFERENCES if one.modality == "image"], ids=lambda one: one.model)
def test_the_work_of_an_image_follows_from_open_clips_config(one: Any) -> None:
    pytest.importorskip("open_clip")
    assert flop_of(ModelSpec.parse(f"open_clip:{one.model}/openai"), "image", 0) == pytest.approx(one.flop, rel=0.001)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"dim": 768, "hidden_dim": 3072, "n_layers": 6}, "DistilBERT"),
        ({"n_embd": 768, "n_inner": 3072, "n_layer": 12, "activation_function": "swiglu"}, "nomic-v1.5"),
    ],
)
def test_the_work_of_a_text_follows_from_the_config_of_its_encoder(
    tmp_path: Path, config: dict[str, Any], model: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (expected,) = (one.flop for one in REFERENCES if one.model == model)
    assert flop_of(ModelSpec.parse(f"hf:{tmp_path}"), "text", TEXT_TOKENS) == pytest.approx(expected, rel=0.001)


# --- speeds ---


def test_5_billion_images_on_4_machines_of_8_a100() -> None:
    found = plan(*LAION, "--gpus", "4x8xA100")
    # clip-retrieval has 2,500/s for this model on 8 A100, which is 16% of what they compute, and 7,000/s for ViT-B-32.
    assert found["rows_per_s"] == pytest.approx(32 * 2606.4 * 312 / 989, rel=0.001)
    assert found["rows_per_s"] > 4 * 2_500
    assert found["seconds"] == pytest.approx(5.85e9 / found["rows_per_s"])
    assert (found["limit"], found["precision"], found["rows"]) == ("device", "bf16", 5_850_000_000)
    (devices,) = found["devices"]
    assert devices["source"].startswith("assumed: 2,606/s of ViT-L-14 on an H100 in bf16 (bench/results/gpu_without_na")
    assert devices["read_bytes_per_s"] == pytest.approx(devices["rows_per_s"] * 30_000)
    assert found["needs"]["disk_bytes"]["value"] == pytest.approx(5.85e9 * 1_544)


def test_the_speed_of_an_h100_is_the_measured_one_and_of_others_assumed() -> None:
    found = plan(*LAION, "--gpus", "8xH100,4xL4")
    h100, l4 = found["devices"]
    assert (round(h100["rows_per_s_alone"]), "assumed" in h100["source"]) == (2606, False)
    assert l4["rows_per_s_alone"] == pytest.approx(h100["rows_per_s_alone"] * 121 / 989, rel=0.001)
    assert "assumed" in l4["source"]
    assert h100["share"] + l4["share"] == pytest.approx(1)
    assert h100["share"] / l4["share"] == pytest.approx(2 * 989 / 121, rel=0.001)


def test_a_precision_that_one_card_imposes_is_told_with_its_cost(tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text("H100 = 2.5\nGTX1070 = 0.1\n")
    priced = [*LAION, "--gpus", "1xH100,2xGTX1070", "--prices", tmp_path / "prices.toml"]
    found, without = plan(*priced), plan(*priced, "--precision", "bf16")
    assert (found["precision"], without["precision"]) == ("fp32", "bf16")
    assert found["cost"] == pytest.approx(2.7 * found["seconds"] / 3600)
    assert without["cost"] == pytest.approx(2.5 * without["seconds"] / 3600)
    assert found["cost"] > 10 * without["cost"]
    assert f"--precision bf16 on 1 x H100 alone: 26.0 days, {without['cost']:,.2f}; fp32 on all: " in found["instead"]
    assert ("GTX1070 is left out: it refuses bf16" in without["assumed"], without["instead"]) == (True, "")


def test_a_speed_that_the_broker_has_measured_goes_first(own_server: EmbeddedServer) -> None:
    config = ModelConfig(spec="open_clip:ViT-L-14", modalities=("image",), precision="bf16", decode="cpu-exact")
    with redis.Redis.from_url(own_server.url) as client:
        scripts = load_scripts(client)
        for device, speed in (("NVIDIA L40S", 900.0), ("NVIDIA L4", 250.0)):
            report_rate(client, config, Rate(device=device, rows_per_s=speed, dims=768), scripts=scripts)
    (device,) = plan(*LAION, "--gpus", "L4", broker=own_server.url)["devices"]
    assert (device["rows_per_s"], device["source"]) == (250.0, "measured by the broker")


def test_inputs_are_counted_by_planning_them(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", 250)
    write_shards(tmp_path / "in", 6, 20)
    texts = plan(tmp_path / "a.jsonl", "-m", "minilm", "--gpus", "H100", "--unit-size", "100")
    assert (texts["rows"], texts["counted"]) == (250, "counted in 3 units")
    assert "tokens a text" in texts["assumed"][-1]
    images = plan(tmp_path / "in", "-m", "open_clip:ViT-B-32/openai", "--gpus", "H100", "--modality", "image")
    assert (images["rows"], images["counted"]) == (120, "estimated in 6 units")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "in"]


# --- limits ---


@pytest.mark.parametrize(
    ("words", "limit", "remedy"),
    [
        ("8xH100 --threads 16", "writer", "units of 16,384 rows and more, or 4 runs with a writer each would"),
        ("8xH100 --threads 16 --unit-size 20000", "decoding", "the devices wait 42% of the time; 28 cores for each"),
        ("8xH100 --unit-size 20000 --storage-gbps 10", "storage", "60.6 Gbit/s would keep them busy"),
        ("600xH100 --unit-size 17000", "writer", "; 2 runs with a writer each"),
        ("30000xL4 --unit-size 100000", "broker", "runs with a broker each, would keep them busy"),
    ],
)  # fmt: skip
def test_the_limit_is_told_with_what_would_end_it(words: str, limit: str, remedy: str) -> None:
    found = plan(
        "--image-count", "1e9", "--bytes-per-image", "30000", "-m", "open_clip:ViT-B-32", "--gpus", *words.split()
    )
    assert (found["limit"], found["sentence"].partition(":")[0]) == (limit, limit)
    assert remedy in found["sentence"]
    assert found["rows_per_s"] == found["limits"][limit] == min(one for one in found["limits"].values() if one)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ("--image-count 1 --bytes-per-image 1 -m stub:8 --gpus 8xFOO", UsageError, "is not a number of known cards"),
        (
            "--image-count 1 --bytes-per-image 1 -m stub:8 --gpus H100",
            UsageError,
            "the speed of stub:8 on H100 is not known",
        ),
        ("--image-count 1 -m stub:8 --gpus H100", UsageError, "the rows are not clear"),
        ("--image-count 1 --bytes-per-image 1 -m stub:8 --gpus V100 --precision bf16", UsageError, "computes in bf16"),
        (
            "--image-count 1 --bytes-per-image 1 -m stub:8 --gpus H100 --prices none.toml",
            UsageError,
            "no price of each card",
        ),
        ("none.tar -m stub:8 --gpus H100", InputError, "none.tar"),
    ],
)
def test_what_cannot_be_planned_is_told(words: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        told(*words.split())


# --- the broker ---


@pytest.mark.parametrize("row", result("fleet.json:rows"), ids=lambda row: f"{row['devices']} devices")
def test_the_broker_of_the_simulated_fleets_is_planned_within_a_factor_of_two(row: dict[str, Any]) -> None:
    planned = broker_cores(row["devices"], row["devices"] * row["rate_of_ideal"] / 10)
    assert planned / 2 < row["broker_share"] < 2 * planned


@pytest.mark.slow
def test_the_broker_of_a_simulated_fleet_takes_what_is_planned(tmp_path: Path) -> None:
    found = fleet.measure(tmp_path, 40, 8, 2)
    planned = broker_cores(40, 40 * found["rate_of_ideal"] / 2)
    # Small fleets pay more for each unit, and this machine is shared: a factor of four.
    assert found["verified"]
    assert planned / 4 < found["broker_share"] < 4 * planned


# --- the page ---

PAGE = (ROOT / "docs" / "how-to" / "deploy" / "sizing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "shown"), re.findall(r"```sh\nembq plan ([^\n]+)\n```\n+```\n(.+?)```", PAGE, re.DOTALL)
)
def test_the_page_shows_what_the_command_prints(
    line: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (prices,) = re.findall(r"```toml\n(.+?)```", PAGE, re.DOTALL)
    (tmp_path / "prices.toml").write_text(prices)
    assert told(*shlex.split(line)) == shown
