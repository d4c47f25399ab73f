"""Reader options: each is declared here once, for the command line, the record of a run, and the units that carry it.

A new option is a field of `ReadOptions`, and is used by the format that reads it from `Unit.options`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from embq.core.errors import UsageError

ALL = "*"
"""Stands for all metadata columns: those that are not taken otherwise, and can become JSON."""

CUT_UNIT_BYTES = 4_000_000
"""Size of a unit of lines whose texts are cut: about a million tokens, so that a unit's chunks fit into memory however
long the texts are."""

ROWS = ("parquet", "arrow", "csv", "jsonl")
"""Kinds whose samples are rows with named columns."""
_IMAGE_FILES = ("tar", "files")
_SHARDS = ("tar",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOption:
    """Declaration of one option.

    Attributes:
        flag: on the command line.
        help: for `--help`.
        kinds: kinds of input that use it; () for all.
        metavar: for `--help`.
        separator: between the values of a list in records and units; "" for a single value.
        always_recorded: whether a run records it also if it is empty.
        choices: its values, the default first, which is recorded as ""; () for free text.
        is_flag: whether it has no value on the command line; it is recorded as "yes".
        name: the field of `ReadOptions`.
    """

    flag: str
    help: str
    kinds: tuple[str, ...]
    metavar: str = "NAME"
    separator: str = ""
    always_recorded: bool = False
    choices: tuple[str, ...] = ()
    is_flag: bool = False
    name: str = ""

    @property
    def parameter(self) -> str:
        """Name of the command line's parameter."""
        return self.flag.lstrip("-").replace("-", "_")

    def parse(self, text: Any) -> str | tuple[str, ...]:
        """The value of an argument on the command line."""
        if self.is_flag:
            return "yes" if text else ""
        if not self.separator:
            return "" if self.choices and text == self.choices[0] else text
        return comma_list(text) if self.separator == "," else extension_list(text)

    def format(self, value: str | Sequence[str]) -> str:
        """A value as records and units hold it."""
        return value if isinstance(value, str) else self.separator.join(value)

    def restore(self, text: str) -> str | tuple[str, ...]:
        """The inverse of `format`."""
        if not self.separator:
            return text
        return tuple(text.split(self.separator)) if text else ()


def _option(default: object, flag: str, help: str, kinds: tuple[str, ...], **options: Any) -> Any:
    declared = ReaderOption(flag=flag, help=help, kinds=kinds, **options)
    return field(default=default, metadata={"option": declared})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """User options that decide how inputs split into units and samples.

    Attributes:
        unit_samples: most samples of one unit, where the input is not sharded by itself.
        unit_bytes: bytes at which a unit of lines ends with the line, however few it has; 0 sets no bound.
        kind: kind of all inputs; "" tells it by their names.
        image_keys: extensions of images in a shard or folder, in order of preference; () takes all known.
        caption_keys: extensions of captions there, likewise; () takes txt.
        text_column: column or JSON field that holds the text; "" finds it.
        id_column: column or JSON field that holds the key; "" finds it or counts rows.
        image_column: column that holds the image, or its path or URL; "" finds it.
        metadata_columns: columns or JSON fields that become metadata; `ALL` among them takes all others; () does so
            where rows are lines (.jsonl, .csv), and takes none elsewhere.
        delimiter: character between the fields of a .csv; "" takes the one that its header has.
        no_header: "yes" takes the first line of a .csv for a row; its columns are called column1, column2, ...
        quotes: "none" takes a quote in a .csv or .tsv for a character like others, "enclose" for what encloses a field;
            "" does so, but for a .tsv of which the rows fit better with "none".
        damaged: "keep" takes the samples of a damaged shard that are whole; "" fails all of it.
        map: name, package and version of the function that samples go through, see `embq.sources.maps`; "" for none.
    """

    unit_samples: int = 1000
    unit_bytes: int = 0
    kind: str = ""
    image_keys: tuple[str, ...] = _option(
        (),
        "--image-key",
        "Image extensions in shards and folders, in order of preference: 'jpg;png'.  [all known]",
        _IMAGE_FILES,
        metavar="LIST",
        separator=";",
    )
    caption_keys: tuple[str, ...] = _option(
        (),
        "--caption-key",
        "Caption extensions in shards and folders.  [txt]",
        _IMAGE_FILES,
        metavar="LIST",
        separator=";",
    )
    text_column: str = _option("", "--text-column", "Column or field of texts.", ROWS, always_recorded=True)
    id_column: str = _option("", "--id-column", "Column or field of keys.", ROWS, always_recorded=True)
    image_column: str = _option(
        "", "--image-column", "Column of images, or of their paths in the folder.", ("parquet", "arrow", "csv")
    )
    metadata_columns: tuple[str, ...] = _option(
        (),
        "--metadata-columns",
        "Columns to keep as metadata: a,b, or * for all others.  [.jsonl and .csv: *]",
        ROWS,
        metavar="LIST",
        separator=",",
    )
    delimiter: str = _option(
        "",
        "--delimiter",
        "Character between the fields of .csv files, or 'tab'.  [found in the header]",
        ("csv",),
        metavar="CHAR",
    )
    no_header: str = _option(
        "",
        "--no-header",
        "The first line of .csv files is a row; columns are column1, column2, ...",
        ("csv",),
        is_flag=True,
    )
    quotes: str = _option(
        "",
        "--quotes",
        "Quotes in .csv and .tsv files enclose fields, or are characters; auto: as the rows of a .tsv tell.",
        ("csv",),
        choices=("auto", "enclose", "none"),
    )
    damaged: str = _option(
        "",
        "--damaged",
        "Damaged shards: fail whole, or keep the samples before the damage, with one failure for the rest.",
        _SHARDS,
        choices=("fail", "keep"),
    )
    map: str = _option(
        "", "--map", "Function of a plug-in that each sample goes through before it is embedded.", (), metavar="NAME"
    )

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **extra: Any) -> ReadOptions:
        """From arguments of the command line by parameter name, with the map as `embq.sources.maps.identity_of` returns
        it; `extra` are fields that no option declares."""
        declared: dict[str, Any] = {option.name: option.parse(arguments[option.parameter]) for option in DECLARED}
        return cls(**extra, **declared)

    @classmethod
    def from_record(cls, pairs: Sequence[tuple[str, str]]) -> ReadOptions:
        """The inverse of `record`, without `unit_bytes`, which follows from the run's model."""
        recorded = dict(pairs)
        declared: dict[str, Any] = {option.name: option.restore(recorded.get(option.name, "")) for option in DECLARED}
        return cls(unit_samples=int(recorded["unit_samples"]), kind=recorded.get("input_format", ""), **declared)

    def record(self) -> dict[str, str]:
        """The options as a run records them; optional ones that are empty are left out."""
        record = {"unit_samples": str(self.unit_samples)} | ({"input_format": self.kind} if self.kind else {})
        for option in DECLARED:
            if (text := option.format(getattr(self, option.name))) or option.always_recorded:
                record[option.name] = text
        return record

    def for_chunks(self) -> ReadOptions:
        """The options for a run that cuts texts into chunks."""
        return replace(self, unit_bytes=CUT_UNIT_BYTES)

    def required_for(self, modalities: Sequence[str]) -> ReadOptions:
        """The options without extensions of files that nothing is embedded of; `modalities` () are not chosen yet."""
        images, captions = (not modalities or modality in modalities for modality in ("image", "text"))
        return replace(
            self, image_keys=self.image_keys if images else (), caption_keys=self.caption_keys if captions else ()
        )

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The named columns, as a unit of rows carries them; () if none is named."""
        return self._carried(COLUMNS)

    @property
    def extensions(self) -> tuple[tuple[str, str], ...]:
        """The named extensions, as a unit of image files carries them; () if none is named."""
        return self._carried(EXTENSIONS)

    @property
    def of_shards(self) -> tuple[tuple[str, str], ...]:
        """`extensions`, and how a damaged shard is read, as a unit of a shard carries them."""
        return tuple(sorted((*self.extensions, *self._carried(SHARDS))))

    def _carried(self, options: Sequence[ReaderOption]) -> tuple[tuple[str, str], ...]:
        pairs = sorted((option.name, option.format(getattr(self, option.name))) for option in options)
        return tuple((name, text) for name, text in pairs if text)

    def refuse_useless(self, kinds: Collection[str]) -> None:
        """UsageError for an option that no input of these kinds uses."""
        if set(kinds) - KINDS:  # a plug-in's, which may use any
            return
        for option in DECLARED:
            value = getattr(self, option.name)
            if option.kinds and kinds and value and value != (ALL,) and not set(kinds) & set(option.kinds):
                raise UsageError(
                    f"{option.flag} is for inputs of kind {', '.join(option.kinds)}; "
                    f"these are of kind {', '.join(sorted(kinds))}",
                    next_step=f"leave {option.flag} out",
                )


def _declared() -> Iterator[ReaderOption]:
    for entry in fields(ReadOptions):
        if "option" in entry.metadata:
            yield replace(entry.metadata["option"], name=entry.name)


DECLARED = tuple(_declared())
"""All options, in the order of `--help`."""
EXTENSIONS = tuple(option for option in DECLARED if option.kinds == _IMAGE_FILES)
SHARDS = tuple(option for option in DECLARED if option.kinds == _SHARDS)
COLUMNS = tuple(option for option in DECLARED if option.kinds and option not in (*EXTENSIONS, *SHARDS))
KINDS = {"lines", *(kind for option in DECLARED for kind in option.kinds)}
"""embq's own kinds of input."""


def format_of(kind: str) -> str:
    """A kind as --input-format names it: with clip-retrieval's words if it has one."""
    return {"tar": "webdataset", "lines": "text"}.get(kind, kind)


def comma_list(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def extension_list(text: str) -> tuple[str, ...]:
    """The extensions in a list with commas or semicolons, as webdataset has it, in lower case and without dots."""
    return tuple(part.lower().lstrip(".") for part in comma_list(text.replace(";", ",")))
