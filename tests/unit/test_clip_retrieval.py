"""Commands that were written for clip-retrieval, in embq's words."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from embq.app.cli.entry_point import cli, run
from embq.compat.clip_retrieval import (
    IGNORED,
    MODELS,
    OPTIONS,
    REFUSED,
    RENAMED,
    WITHOUT_VALUE,
    index,
    inference,
    location,
    model_spec,
    translated,
)
from embq.core.errors import Exit, SourceError, UsageError
from embq.core.models import ModelSpec
from embq.producer.plan import plan
from embq.sources.reader_options import ReadOptions

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "run" / "from-clip-retrieval.md").read_text(encoding="utf-8")


def options_of(verb: str) -> list[click.Option]:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


ROOT = cli.make_context("embq", ["run"])


def ours(*arguments: str) -> list[str]:
    """Arguments of `embq run` or `embq enqueue` for those of `clip-retrieval inference`."""
    theirs = inference.make_context("inference", list(arguments), parent=ROOT).params
    further, enqueue = theirs.pop("further"), theirs.pop("enqueue")
    return [*translated(theirs, enqueue=enqueue), *map(location, further)]


def parsed(*arguments: str, verb: str = "run") -> dict[str, object]:
    """The parameters of a verb for arguments of `clip-retrieval inference`."""
    command = cli.get_command(ROOT, verb)
    assert command is not None
    return command.make_context(
        verb, ours(*arguments, *(["--enqueue"] if verb == "enqueue" else [])), parent=ROOT
    ).params


PASTED = ["--input_dataset", "photos", "--output_folder", "out", "--clip_model", "ViT-B/32"]


def test_either_spelling_of_every_option_is_understood() -> None:
    found = parsed(*PASTED, "--unit_size=7", "--drain_timeout", "2", "--image_key", "png", "--write-batch-size", "9")
    assert [found[name] for name in ("unit_size", "drain_timeout", "image_key", "write_batch_size")] == [
        7,
        2,
        "png",
        9,
    ]


@pytest.mark.parametrize("verb", ["run", "enqueue", "index", "search"])
def test_every_option_of_embq_may_be_typed_with_underscores(verb: str) -> None:
    command = cli.get_command(ROOT, verb)
    assert command is not None
    parser = command.make_parser(click.Context(command, parent=ROOT))
    for option in options_of(verb):
        for name in [name for name in option.opts if name.startswith("--")]:
            typed = f"--{name[2:].replace('-', '_')}"
            values, _, _ = parser.parse_args([typed] if option.is_flag else [f"{typed}=1"])
            assert option.name in values


def test_the_keys_of_shards_change_nothing_for_folders(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--wds_image_key", "jpg", "--wds_caption_key=cap")
    found = parsed(*PASTED, "--input_format", "files", *keys)
    assert (found["image_key"], found["caption_key"]) == ("", "")
    assert "note: --wds_image_key is of shards" in capsys.readouterr().err
    found = parsed(*PASTED, "--input_format", "webdataset", *keys)
    assert (found["image_key"], found["caption_key"]) == ("jpg", "cap")
    assert parsed(*PASTED, "--input_format", "files", "--image_key", "jpg")["image_key"] == "jpg"


def test_a_value_is_never_taken_for_an_option() -> None:
    assert parsed(*PASTED, "--image-column=--use_jit")["image_column"] == "--use_jit"
    assert parsed(*PASTED, "--inline", "more", verb="enqueue")["inputs"] == ("photos", "more")


def test_options_of_embq_stand_beside_those_of_clip_retrieval_and_count() -> None:
    found = parsed(
        "photos", "-o", "out", "-m", "stub:8", "--limit", "7", "--modality=image", "--output_format", "parquet"
    )
    assert [found[name] for name in ("inputs", "output", "model", "limit", "modality", "output_format")] == [
        *(("photos",), "out", ("stub:8",), 7, "image", "parquet")
    ]


@pytest.mark.parametrize(
    ("typed", "modality"),
    [
        ("--enable_text False", "image"),
        ("--enable_text=False", "image"),
        ("--noenable_text", "image"),
        ("--noenable-text", "image"),
        ("--enable_image=false --enable_text", "text"),
        ("--enable_image", "all"),
        ("", "all"),
        ("--enable_text True --enable_image True", "image,text"),
    ],
)
def test_what_is_enabled_becomes_the_modality(typed: str, modality: str) -> None:
    assert parsed(*PASTED, *typed.split())["modality"] == modality


def test_the_user_sees_the_command_that_is_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    command = ["inference", "--input_dataset", f"{tmp_path}/photos", "--output_folder", f"{tmp_path}/out"]
    assert run([*command, "--clip_model=stub:8", "--wds_image_key", "a b"]) == Exit.BAD_INPUT
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("note")]
    assert shlex.split(line.partition("this is: ")[2]) == [
        *("embq", "run", f"{tmp_path}/photos", "--model=stub:8", f"--output={tmp_path}/out", "--image-key=a b"),
        *("--modality=all", "--output-format=npy"),
    ]


def test_nothing_to_embed_is_refused() -> None:
    with pytest.raises(UsageError, match="neither"):
        parsed(*PASTED, "--noenable_text", "--noenable_image")
    with pytest.raises(click.BadParameter, match="not a valid boolean"):
        parsed(*PASTED, "--enable_text=maybe")


def test_metadata_is_kept_where_it_is_enabled() -> None:
    found = parsed(*PASTED, "--enable_metadata", "--enable_text=False")
    assert (found["modality"], found["metadata_columns"]) == ("image", "*")
    assert parsed(*PASTED, "--enable_metadata", "True", "--metadata-columns", "a")["metadata_columns"] == "a"


@pytest.mark.parametrize("name", REFUSED)
def test_what_embq_does_otherwise_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(*PASTED, f"--{name}={'true' if name in WITHOUT_VALUE else 'something'}")
    assert name in refused.value.message
    assert refused.value.next_step


@pytest.mark.parametrize("name", IGNORED)
def test_what_has_no_effect_is_told_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parsed(
        "photos",
        "-o",
        "out",
        "-m",
        "stub:8",
        f"--{name}={'true' if name in WITHOUT_VALUE else '5'}",
        "--modality=image",
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line


def test_what_asks_for_nothing_is_no_matter(capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--use_jit False --use_mclip=False --distribution_strategy sequential --noenable_wandb --cache_path None"
    parsed("photos", "-o", "out", "-m", "stub:8", "--modality=image", *typed.split(), verb="enqueue")
    assert not capsys.readouterr().err


def test_figures_go_to_wandb_from_a_run_and_of_an_enqueued_one_by_its_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parsed(*PASTED, "--enable_wandb", "--wandb_project", "p")["log"] == ("wandb:p",)
    parsed(*PASTED, "--enable_wandb=True", verb="enqueue")
    assert "--watch --log wandb:clip_retrieval" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "enqueue"])
def test_options_of_workers_are_taken(verb: str) -> None:
    found = parsed(*PASTED, "--batch_size=64", "--num_prepro_workers", "8", verb=verb)
    assert (found["batch_size"], found["threads"]) == (64, 8)
    with pytest.raises(click.BadParameter, match="1048576"):  # more could not be read back from run.json
        parsed("--input_dataset", "photos", "-o", "out", "--batch_size", "2000000", verb=verb)


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("aws s3 cp --quiet s3://b/{000..999}.tar -", "s3://b/{000..999}.tar"),
        ("aws s3 cp 's3://b/a.tar' - --only-show-errors", "s3://b/a.tar"),
        ("gsutil -q cat gs://b/a.tar", "gs://b/a.tar"),
        ("curl -s -L --fail https://host/{0..9}.tar", "https://host/{0..9}.tar"),
        ("curl 'https://host/a.tar?a=1&b=2'", "https://host/a.tar?a=1&b=2"),
        ("wget -qO- https://host/a.tar", "https://host/a.tar"),
        ("hdfs dfs -cat hdfs://node:8020/a.tar", "hdfs://node:8020/a.tar"),
    ],
)
def test_a_command_that_prints_one_object_is_read_as_its_url(command: str, url: str) -> None:
    assert parsed("--input_dataset", f"pipe:{command}", "-o", "out")["inputs"] == (url,)
    assert parsed(f"pipe:{command}", "file:///data/a.tar", *PASTED)["inputs"] == ("photos", url, "/data/a.tar")


@pytest.mark.parametrize(
    "command",
    [
        "cat a.tar",
        "aws s3 cp s3://b/a.tar - | head -c 10",
        "curl https://host/a.tar.gz|gunzip",
        "curl https://host/$DAY.tar",
        "aws s3 cp s3://b/a.tar a.tar",
        "aws s3 cp s3://b/a.tar s3://b/b.tar -",
        "aws s3 cp --endpoint-url http://host s3://b/a.tar -",
        "curl -s -u user:word https://host/a.tar",
        "curl 'https://host/a b.tar'",
        "hdfs dfs -cat /a.tar",
        "sh -c 'touch x'",
        "aws s3 cp 's3://b/a.tar -",
    ],
)
def test_other_commands_are_left_to_be_refused(command: str) -> None:
    assert location(f"pipe:{command}") == f"pipe:{command}"
    with pytest.raises(SourceError, match="commands are not run") as refused:
        plan([location(f"pipe:{command}")], ReadOptions())
    assert "s3://BUCKET/KEY" in refused.value.next_step


def test_pyspark_becomes_the_workers_and_slurm_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parsed(*PASTED, "--distribution_strategy=pyspark", verb="enqueue")
    assert "`embq worker` on each" in capsys.readouterr().err
    with pytest.raises(UsageError, match="embq has no such option"):
        parsed(*PASTED, "--distribution_strategy=slurm")


def test_the_names_of_models_are_those_of_open_clip() -> None:
    open_clip = pytest.importorskip("open_clip")
    known = set(open_clip.list_pretrained())
    for name, spec in MODELS.items():
        architecture, _, tag = ModelSpec.parse(spec).name.partition("/")
        assert (architecture, tag) in known, name


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("ViT-L/14@336px", "open_clip:ViT-L-14-336-quickgelu/openai"),
        ("hf_clip:openai/clip-vit-base-patch32", "open_clip:ViT-B-32-quickgelu/openai"),
        ("openai_clip:ViT-B/16", "open_clip:ViT-B-16-quickgelu/openai"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", "open_clip:ViT-B-32/laion2b_s34b_b79k"),
        ("open_clip:ViT-B-32?init=random&seed=0", "open_clip:ViT-B-32?init=random&seed=0"),
        ("stub:8", "stub:8"),
    ],
)
def test_the_model_may_be_named_as_there(model: str, spec: str) -> None:
    for typed in (["--clip_model", model], [f"--model={model}"], ["-m", model], ["--model", model]):
        assert parsed("photos", "-o", "out", *typed)["model"] == (spec,), typed
        assert parsed("photos", "-o", "out", "--clip_model", "ViT-B/32", *typed)["model"] == (spec,), typed
        assert parsed("photos", "-o", "out", *typed, "--clip_model", model)["model"] == (spec,), typed
    both = parsed("photos", "-o", "out", "-m", "stub:4", "-m", model, "--clip_model", "ViT-B/32")
    assert both["model"] == ("stub:4", spec)


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("hf_clip:someone/else", "open_clip:ARCH/TAG"),
        ("nm:neuralmagic/x", "open_clip"),
        ("ja_clip:rinna/x", "open_clip"),
        ("ViT-B/14", "ViT-B/16"),
    ],
)
def test_a_model_that_is_not_read_comes_with_another(model: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        model_spec(model)
    assert hint in refused.value.next_step


def _rows(section: str) -> dict[str, str]:
    """Option -> what its row says of it."""
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    return {name: row[1] for row in rows for name in re.findall(r"`--(\w+)`", row[0])}


def test_every_option_there_has_its_row_on_the_page() -> None:
    inference_rows, _, index_rows = PAGE.partition("Its `index` is")
    assert _rows(index_rows).keys() == {param.name for param in index.params} - {"as_json", "quiet"}
    told = _rows(inference_rows)
    assert told.keys() == {param.name for param in OPTIONS} - {"model"}  # which is of embq
    for name, cell in told.items():
        assert RENAMED.get(name, "") in cell, name
        assert cell.strip().startswith("refused") == (name in REFUSED), name
        assert cell.strip().startswith("of no effect") == (name in IGNORED), name
