"""The plan that is shown before anything is written or sent."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import redis
from click.testing import CliRunner, Result

from embq.app.verbs.run import enqueue
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import EmbqError
from embq.core.models import ModelConfig, ModelSpec
from embq.core.queue.heartbeats import WORKER_REPORTS, Rate, measured_rates, report_rate
from embq.core.queue.keys import RATES
from embq.core.queue.scripts import load_scripts
from embq.core.rows.spec import RowSpec
from embq.core.settings import Settings
from embq.producer.estimate import known_dims
from embq.producer.model_args import vector_dim
from embq.worker.claim.heartbeat import Heartbeat
from embq.worker.claim.lease import Leases
from embq.worker.embedders.device.hardware import device_name
from embq.worker.meter.meter import Meter
from tests.e2e.session import write_shards, write_texts

MODEL = ModelConfig(spec="stub:8", modalities=("image",), precision="fp32", decode="cpu-exact")


def ask(*arguments: str | Path, broker: str = "") -> Result:
    return CliRunner().invoke(
        enqueue, [*map(str, arguments), "--dry-run"], env={"EMBQ_BROKER_URL": broker}, catch_exceptions=False
    )


def said(*arguments: str | Path, broker: str = "") -> dict[str, object]:
    result = ask(*arguments, "--json", broker=broker)
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.stdout)
    return answer


def test_texts_are_counted_and_nothing_is_written(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.jsonl", 250)
    answer = said(tmp_path / "a.jsonl", "-o", tmp_path / "out", "-m", "stub:8", "--unit-size", "100")
    assert (answer["units"], answer["rows"], answer["rows_exact"], answer["kinds"]) == (3, 250, True, {"jsonl": 3})
    assert answer["bytes"] == (tmp_path / "a.jsonl").stat().st_size
    assert answer["vector_bytes"] == {"float16": 250 * 16, "float32": 250 * 32, "int8": 250 * 8, "binary": 250}
    assert (answer["devices"], answer["total_hours"], answer["run"]) == (None, None, None)
    assert not (tmp_path / "out").exists()


def test_the_columns_of_metadata_are_shown(tmp_path: Path) -> None:
    asked = [tmp_path / "a.jsonl", "-o", tmp_path / "out", "-m", "stub:8"]
    (tmp_path / "a.jsonl").write_text('{"text":"t","n":1,"size":{"w":2.5}}\n{"text":"t","n":2}\n')
    assert said(*asked)["columns"] == [{"name": "n", "type": "int64"}, {"name": "size.w", "type": "float64"}]
    assert "n int64, size.w float64" in ask(*asked).stdout


def test_only_the_numbers_that_are_kept_are_counted(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 2, 10)
    both = ["-o", tmp_path / "out", "-m", "stub:32", "--modality", "image,text"]
    answer = said(tmp_path / "in", *both, "--truncate-dim", "8")
    assert answer["dims"] == 16
    assert answer["vector_bytes"] == {"float16": 20 * 32, "float32": 20 * 64, "int8": 20 * 16, "binary": 20 * 2}
    assert said(tmp_path / "in", *both)["dims"] == 64


def test_rows_of_shards_are_estimated_from_a_few_that_are_read(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 6, 20)
    answer = said(tmp_path / "in", "-o", tmp_path / "out", "-m", "stub:8")
    assert (answer["units"], answer["rows"], answer["rows_exact"], answer["rows_from_units"]) == (6, 120, False, 3)
    for shard in (tmp_path / "in").iterdir():
        shard.write_bytes(b"\1" * 1024)
    answer = said(tmp_path / "in", "-o", tmp_path / "out", "-m", "stub:8")
    assert (answer["units"], answer["rows"], answer["vector_bytes"]) == (6, None, {})
    assert "only reading tells" in ask(tmp_path / "in", "-o", tmp_path / "out", "-m", "stub:8").stdout


def test_chunks_of_texts_are_estimated_from_the_lengths_of_some(tmp_path: Path) -> None:
    texts, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    rows = [{"id": f"d{n}", "text": "word " * (10 if n % 2 else 2000)} for n in range(20)]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), table)
    for source in (texts, table):
        cut = [source, "-o", tmp_path / "out", "-m", "stub:8", "--unit-size", "5", "--chunk-tokens", "100"]
        answer = said(*cut)
        assert (answer["documents"], answer["rows_exact"], answer["rows_from_units"]) == (20, False, 3)
        # Ten of one chunk, and ten of 10,000 characters at 330 a chunk; a unit has two or three of each.
        assert 10 * (1 + 31) * 0.75 <= answer["rows"] <= 10 * (1 + 31) * 1.25
        assert f"{answer['rows']:,} chunks" in ask(*cut).stdout
        assert said(*cut[:-2])["documents"] is None


def test_a_selection_is_shown_before_it_is_sent(tmp_path: Path) -> None:
    write_shards(tmp_path / "in", 6, 20)
    some = ["-o", tmp_path / "out", "-m", "stub:8", "--exclude", "*3.tar", "--limit", "50"]
    assert (said(tmp_path / "in", *some)["units"], said(tmp_path / "in", *some)["rows"]) == (3, 50)
    assert said(tmp_path / "in", "-o", tmp_path / "out", "-m", "stub:8", "--include", "*3.tar")["units"] == 1


def test_hours_are_those_of_devices_on_which_the_model_has_run(tmp_path: Path, own_server: EmbeddedServer) -> None:
    write_shards(tmp_path / "in", 6, 20)
    asked = (tmp_path / "in", "-o", tmp_path / "out", "-m", "stub:8")
    assert said(*asked, broker=own_server.url)["devices"] == []
    assert "has not run on this broker yet" in ask(*asked, broker=own_server.url).stdout
    with redis.Redis.from_url(own_server.url) as client:
        scripts = load_scripts(client)
        for device, speed in (("Great GPU", 0.5), ("Small GPU", 0.1)):
            report_rate(client, MODEL, Rate(device=device, rows_per_s=speed, dims=8), scripts=scripts)
        for name in ("one", "two"):
            WORKER_REPORTS.report(client, {"name": name, "device_name": "Small GPU"}, life_s=60, scripts=scripts)
    answer = said(*asked, broker=own_server.url)
    great, small = answer["devices"]  # type: ignore[misc]
    assert great == {
        "device": "Great GPU",
        "rows_per_s": 0.5,
        "device_hours": 0.0667,
        "workers": 0,
        "measured_by": None,
    }
    assert (small["device_hours"], small["workers"]) == (0.3333, 2)
    assert answer["total_hours"] == 0.1667
    shown = ask(*asked, broker=own_server.url).stdout
    assert "0.333 on Small GPU at 0.1 rows/s measured; 2 connected now" in shown
    assert "0.167 hours with what is connected now" in shown


def test_what_would_be_refused_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbqError, match="not found"):
        ask(tmp_path / "nothing.tar", "-o", tmp_path / "out", "-m", "stub:8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    write_texts(tmp_path / "a.jsonl", 2)
    with pytest.raises(EmbqError, match="holds no embq run"):
        ask(tmp_path / "a.jsonl", "-o", tmp_path / "out", "-m", "stub:8")


def test_speeds_are_kept_by_model_and_device_and_bounded(client: redis.Redis) -> None:
    scripts = load_scripts(client)
    other = ModelConfig(spec="stub:9", modalities=("text",), precision="fp32")
    try:
        for speed in (1.0, 2.0):
            report_rate(client, MODEL, Rate(device="A", rows_per_s=speed, dims=8), scripts=scripts)
        assert measured_rates(client, MODEL) == [Rate(device="A", rows_per_s=2.0, dims=8)]
        for number in range(300):
            report_rate(client, other, Rate(device=f"D{number}", rows_per_s=1.0, dims=9), scripts=scripts)
        assert client.hlen(RATES) == 256
        assert measured_rates(client, other)[-1].dims == 9
    finally:
        client.delete(RATES)


@pytest.mark.parametrize(
    ("spec", "dims"), [("stub:12", 24), ("minilm", 768), ("open_clip:ViT-B-32/openai", 1024), ("hf:/nowhere", None)]
)
def test_the_length_of_vectors_is_known_without_loading_a_model(spec: str, dims: int | None) -> None:
    if spec.startswith("open_clip"):
        assert find_spec("open_clip") is not None
    config = ModelConfig(spec=spec, modalities=("image", "text"), precision="fp32")
    assert known_dims(config, RowSpec()) == dims
    assert known_dims(config, RowSpec(truncate_dim=10)) == (None if dims is None else 20)


@pytest.mark.parametrize(
    ("modules", "pooling", "dim"),
    [
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_mean_tokens": True}, 12),
        (["Transformer", "Pooling"], {"pooling_mode": "mean", "truncate_dim": 9}, 12),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, None),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
        (["Transformer", "Pooling"], {"pooling_mode": ["mean", "max"]}, None),
    ],
)
def test_the_length_of_a_folders_vectors_is_known_where_nothing_changes_it(
    tmp_path: Path, modules: list[str], pooling: dict[str, object], dim: int | None
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 12, **pooling}))
    assert vector_dim(ModelSpec.parse(f"st:{tmp_path}")) is None
    named = [{"type": f"sentence_transformers.models.{name}"} for name in modules]
    (tmp_path / "modules.json").write_text(json.dumps(named))
    assert vector_dim(ModelSpec.parse(f"st:{tmp_path}")) == dim
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 5}))
    assert vector_dim(ModelSpec.parse(f"st:{tmp_path}")) == (5 if dim else None)


def test_a_speed_is_measured_only_while_units_are_in_hand(client: redis.Redis) -> None:
    rates: list[float] = []
    stats = Meter()
    heartbeat = Heartbeat(
        client,
        Leases(),
        stats,
        Settings(lease_s=20.0, beat_s=5.0, stall_s=45.0),
        name="w",
        describe=dict,
        measured=lambda _, rate: rates.append(rate),
    )
    at = 0.0

    def pass_time(seconds: float, rows: int, *, busy: bool) -> None:
        nonlocal at
        at += seconds
        stats.batch_done(rows, {"run": rows}, processed=rows, took_s=0.1)
        heartbeat._measure(at, busy=busy)

    pass_time(5, 0, busy=False)
    pass_time(60, 0, busy=True)  # the first unit comes after a minute without work
    pass_time(5, 500, busy=True)
    assert rates == []
    pass_time(5, 500, busy=True)
    assert rates == [100.0]
    pass_time(4, 800, busy=False)
    assert rates == [100.0, 200.0]
    pass_time(60, 0, busy=True)
    pass_time(1, 900, busy=False)  # too short to say anything
    pass_time(60, 0, busy=True)
    pass_time(30, 0, busy=False)  # nothing came of it
    assert rates == [100.0, 200.0]


def test_a_device_has_a_name() -> None:
    assert device_name("cpu").endswith(" cores")
