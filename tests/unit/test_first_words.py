"""What people type first: words of other tools, names without a family, folders that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

import embq
from embq.app.cli.entry_point import cli, run
from embq.app.cli.sections import FOREIGN_OPTIONS
from embq.app.cli.verb_table import VERBS
from embq.core.errors import Exit, ModelError
from embq.core.model_names import suggestions
from embq.core.models import FAMILIES, ModelSpec
from embq.producer.model_args import asked_models
from embq.retrieval.searching.query import Answer, Query
from embq.worker.embedders.lookup import check_open_clip, open_clip_architectures, open_clip_weights


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("help", "Usage: embq [OPTIONS] COMMAND"),
        ("help run", "Usage: embq run "),
        ("help index add", "Usage: embq index add "),
        ("version", "embq, version "),
        ("-V", "embq, version "),
    ],
)
def test_help_and_version_are_words_too(words: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == Exit.DONE
    assert capsys.readouterr().out.startswith(begins)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", ["minilm", "st:sentence-transformers/all-MiniLM-L6-v2"]),
        ("all-MiniLM-L6-v2", ["minilm", "st:sentence-transformers/all-MiniLM-L6-v2"]),
        ("BAAI/bge-small-en", ["st:BAAI/bge-small-en", "hf:BAAI/bge-small-en"]),
        ("ViT-B-32", ["open_clip:ViT-B-32/TAG"]),
        ("ViT-B-32/openai", ["open_clip:ViT-B-32/openai"]),
        ("mt5-base-ViT-B-32", ["open_clip:mt5-base-ViT-B-32/TAG"]),
        ("minlm", ["minilm"]),
        ("openclip:ViT-B-32", ["open_clip:ViT-B-32"]),
        ("openclip:ViT-B-32/openai", ["open_clip:ViT-B-32/openai"]),
        ("OpenCLIP:ViT-B-32/openai", ["open_clip:ViT-B-32/openai"]),
        ("open-clip:ViT-B-32/openai", ["open_clip:ViT-B-32/openai"]),
        ("sentence-transformers:a/b", ["st:a/b"]),
        ("sts:./folder", ["st:./folder"]),
        ("HF:a/b", ["hf:a/b"]),
        ("huggingface:a/b", ["hf:a/b"]),
        ("stubb:8", ["stub:8"]),
        ("minlm:x", ["minilm"]),
        ("word", []),
        ("x" * 100_000, []),
        ("a\0b", []),
    ],
)
def test_a_name_without_a_family_gets_the_specs_that_it_may_stand_for(name: str, meant: list[str]) -> None:
    assert suggestions(name, FAMILIES) == meant
    with pytest.raises(ModelError) as refused:
        ModelSpec.parse(name)
    assert all(spec in (refused.value.next_step or "") for spec in meant)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_misspelt_family_keeps_the_rest_of_its_spec(family: str) -> None:
    with pytest.raises(ModelError) as refused:
        ModelSpec.parse(f"{family}x:8?a=b&c=d")
    expected = "minilm?a=b&c=d" if family == "minilm" else f"{family}:8?a=b&c=d"
    assert refused.value.next_step == f"did you mean {expected}?"


@pytest.mark.parametrize("spec", ["minilm", "stub:8", "st:a/b", "hf:a/b", "open_clip:ViT-B-32/openai"])
@pytest.mark.parametrize("name", ["batch_size", "prompt"])
def test_a_parameter_of_a_model_is_given_once(spec: str, name: str) -> None:
    for second in ("4", "8"):
        with pytest.raises(ModelError, match=f"has {name}= twice"):
            ModelSpec.parse(f"{spec}?{name}=4&x=1&{name}={second}")


@pytest.mark.parametrize(
    ("arch", "first"), [("ViT-B-32", "openai"), ("ViT-H-14", "laion2b_s32b_b79k"), ("ViT-B-16-SigLIP", "webli")]
)
def test_weights_that_are_not_named_are_shown_in_a_whole_spec(arch: str, first: str) -> None:
    tags = open_clip_weights()[arch]
    with pytest.raises(ModelError, match="needs the tag") as refused:
        check_open_clip(ModelSpec.parse(f"open_clip:{arch}"), open_clip_architectures(), tags)
    assert refused.value.next_step.partition(";")[0] == f"write open_clip:{arch}/{first}"
    with pytest.raises(ModelError, match="has no weights") as refused:
        check_open_clip(ModelSpec.parse(f"open_clip:{arch}/{first}x?a=b"), open_clip_architectures(), tags)
    assert refused.value.next_step.partition(";")[0] == f"write open_clip:{arch}/{first}?a=b"


@pytest.mark.parametrize("mark", ["modules.json", "open_clip_config.json", "config.json"])
def test_a_folder_of_a_model_is_named_with_its_family(mark: str, tmp_path: Path) -> None:
    (tmp_path / mark).write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    family = {"modules.json": "st", "open_clip_config.json": "open_clip", "config.json": "hf"}[mark]
    expected = f"{family}:{'local-dir:' if family == 'open_clip' else ''}{tmp_path}"
    assert suggestions(str(tmp_path), FAMILIES) == [expected]
    assert str(ModelSpec.given(str(tmp_path))) == expected
    assert [str(model.spec) for model in asked_models([f"{tmp_path}?normalize=false"])] == [
        f"{expected}?normalize=false"
    ]


@pytest.mark.parametrize("mark", ["modules.json", "open_clip_config.json", "config.json", "README.md"])
def test_a_model_of_the_cache_needs_no_family(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model, revision = tmp_path / "models--org--name", "a" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    with pytest.raises(ModelError, match="unknown model"):
        ModelSpec.given("org/name")
    (model / "snapshots" / revision).mkdir(parents=True)
    (model / "snapshots" / revision / mark).write_text("{}")
    spec = {
        "modules.json": "st:org/name",
        "open_clip_config.json": "open_clip:hf-hub:org/name",
        "config.json": "hf:org/name",
    }
    if mark not in spec:
        with pytest.raises(ModelError, match="did you mean st:org/name or hf:org/name"):
            ModelSpec.given("org/name")
        return
    assert str(ModelSpec.given("org/name")) == spec[mark]
    assert str(embq.Model("org/name").spec) == spec[mark]
    with pytest.raises(ModelError, match="unknown model"):
        ModelSpec.parse("org/name")  # as it may stand in a run, which another machine serves
    for other in ("../../x", "a" * 40, "1/2"):
        (model / "refs" / "main").write_text(other)
        with pytest.raises(ModelError, match="unknown model"):
            ModelSpec.given("org/name")
        (model / "snapshots" / revision / mark).unlink(missing_ok=True)


@pytest.mark.parametrize("verb", ["search", "serve", "ui", "atlas", "pause", "cancel", "logs", "export", "verify"])
def test_a_folder_that_is_not_there_is_told_as_such(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMBQ_BROKER_URL", raising=False)
    asked = {"search": ["words"], "export": [str(tmp_path / "to"), "--output-format", "npy"]}.get(verb, [])
    assert run([verb, str(tmp_path / "nope"), *asked]) == Exit.BAD_INPUT
    said = capsys.readouterr().err
    assert "does not exist" in said or "there is no folder" in said, said
    assert "next:" in said


@pytest.mark.parametrize("option", FOREIGN_OPTIONS)
def test_an_option_of_another_tool_is_answered_with_ours(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    ours = FOREIGN_OPTIONS[option].split("|")
    of_verb = {"run": ["x.jsonl"], "search": ["out", "words"], "export": ["out", "to"]}
    names = {verb: {name for param in cli.get_command(None, verb).params for name in param.opts} for verb in of_verb}
    fitting = {verb: [name for name in ours if name in names[verb]] for verb in of_verb if option not in names[verb]}
    assert any(fitting.values())
    for verb in (verb for verb in fitting if fitting[verb]):
        assert run([verb, *of_verb[verb], option, "1"]) == Exit.USAGE
        assert f"Did you mean '{fitting[verb][0]}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--json status good", "put --json behind the verb: embq status … --json"),
        ("-q run x", "put -q behind the verb: embq run … -q"),
        ("--json nothing", "No such option '--json'."),
        ("--verison", "Did you mean '--version'?"),
        ("export good to --where x", "No such option '--where'."),
        ("index delete good --where x", "No such option '--where'."),
        ("run x --modle y", "Did you mean '--model'?"),
        ("search good x --limit 3", "Did you mean '-k'?"),
        ("search good x --format json", "Did you mean '--json'?"),
        ("clip-retrieval inference --clip_mdel x", "Did you mean '--clip_model'?"),
        ("clip-retrieval inference --input_dataste x", "Did you mean '--input_dataset'?"),
    ],
)
def test_an_unknown_option_gets_a_near_name_or_none(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == Exit.USAGE
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_before_its_verb_is_sent_behind_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = {"--help", "-h", "--version", "-V", "--no-color", "--help-all"}
    command = cli.get_command(None, verb)
    options = [name for param in command.params for name in param.opts if name.startswith("--") and name not in root]
    for option in options[:3]:
        assert run([option, verb]) == Exit.USAGE
        assert f"put {option} behind the verb: embq {verb} … {option}" in capsys.readouterr().err


def test_words_of_a_search_are_one_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str | None] = []

    def note(_index: str, query: Query, *_: object) -> Answer:
        asked.append(query.text)
        return Answer(results=[], timing={})

    monkeypatch.setattr("embq.retrieval.verbs.search._search", note)
    for words in (["a b c"], ["a", "b", "c"], ["a", "-k", "3", "b", "c"], ["--", "a", "b", "c"], []):
        run(["search", "out", *words])
    capsys.readouterr()
    assert asked == ["a b c"] * 4


def test_the_words_are_no_verbs() -> None:
    assert not {"help", "version"} & set(VERBS)


def test_a_limit_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "x.jsonl", "-m", "stub:8", "-o", "out", "--limit", "0"]) == Exit.USAGE
    assert "0 is not in the range x>=1" in capsys.readouterr().err
