"""Makes a run, or adds to one: plans its units and writes its manifest durably."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path

from embq.core.errors import InputError, TryLaterError, command_line
from embq.core.formats.folders import refuse_dtype
from embq.core.models import REFERENCE, Chunking, ModelConfig
from embq.core.queue.uploads import AddedUnits
from embq.core.rows.metadata import renamed
from embq.core.rows.spec import RowSpec
from embq.core.run import checkpoint
from embq.core.run.control import PRIORITY, Control, save_control
from embq.core.run.layout import Layout, refuse_foreign_files
from embq.core.run.manifest import Manifest, ManifestSummary, first_segment_writer
from embq.core.run.run_info import RunInfo, WorkerDefaults, load_run, run_id
from embq.core.storage.durable import drop
from embq.core.storage.paths import Place, place
from embq.core.units import Unit
from embq.producer.additions import Additions, Differences, PlanRecord, append_generation, planning_lock, utc_now
from embq.producer.model_args import asked_models, check_rows, config_of
from embq.producer.plan import Plan, first_columns, plan
from embq.producer.selection import SELECTED, Selection
from embq.sources.access.files import absolute
from embq.sources.reader_options import ReadOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A run as the user asks for it; the fields are options of `embq run`.

    Attributes:
        as_held: whether to embed those of `modalities` that the inputs have, and not to refuse inputs without one.
    """

    inputs: tuple[str, ...]
    output: Place
    models: tuple[str, ...]
    modalities: tuple[str, ...]
    precision: str
    part_rows: int
    options: ReadOptions
    version: str
    rows: RowSpec = RowSpec()  # noqa: RUF009 - it is frozen
    format: str = "parquet"
    selection: Selection = field(default_factory=Selection)
    priority: int = PRIORITY
    chunking: Chunking | None = None
    decode: str = REFERENCE
    as_held: bool = False
    workers: WorkerDefaults = WorkerDefaults()  # noqa: RUF009 - it is frozen

    @property
    def record(self) -> PlanRecord:
        """Origin of its plan."""
        options = sorted((*self.options.record().items(), *self.selection.recorded()))
        return PlanRecord(inputs=tuple(map(absolute, self.inputs)), options=tuple(options), version=self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A run in its output folder.

    Attributes:
        info: the run as it is now.
        new: whether it was made now.
        added: units that were added now to a run that was there before.
        samples: number of their samples, or None if only reading tells.
        warnings: about the inputs, one line each.
        listing: as in the plan.
    """

    info: RunInfo
    new: bool
    added: int = 0
    samples: int | None = 0
    warnings: tuple[str, ...] = ()
    listing: str = ""


def prepare(request: Request, *, relocate: Callable[[Unit], Unit] | None = None) -> Planned:
    """Plan a run and write it to its output folder, or add what the run in that folder lacks of the inputs.

    Args:
        relocate: returns each unit as workers will find it, if its files are sent elsewhere.

    Raises InputError for inputs that cannot be used, or have changed since they were planned, and if the folder
    holds another run or foreign files. Then nothing of the run is changed.
    """
    layout, planned, config = plan_of(request)
    if not layout.run_json.exists():
        # Before `relocate`, which names places where the files are not yet.
        columns, units = first_columns(planned.units)
        planned = replace(planned, units=units, warnings=(*planned.warnings, *renamed(columns)))
        request = replace(request, rows=replace(request.rows, columns=columns))
    if relocate is not None:
        planned = replace(planned, units=map(relocate, planned.units))
    if not layout.run_json.exists():
        # An input that cannot be read at all is refused before anything is made.
        first = next(planned.units, None)
        planned = replace(planned, units=chain([] if first is None else [first], planned.units))
        layout.make()
    with planning_lock(layout):
        # Of two plans at the same time, the second finds the first one's run and adds to it.
        if not layout.run_json.exists():
            info = _make(layout, request, config, planned)
            return Planned(info=info, new=True, warnings=planned.warnings, listing=planned.listing)
        existing_run = load_run(layout.root)
        _refuse_other_run(request.output, existing_run, model=config, rows=request.rows, format_=request.format)
        planned = replace(planned, warnings=(*planned.warnings, *_kept_defaults(request.workers, existing_run.workers)))
        return _extend(layout, existing_run, request.record, planned)


def _kept_defaults(requested: WorkerDefaults, recorded: WorkerDefaults) -> Iterator[str]:
    """A warning for each default for workers that is asked for and is not that of the run."""
    for name, option in (("batch_size", "--batch-size"), ("prepare_threads", "--threads")):
        value, own = getattr(requested, name), getattr(recorded, name)
        if value not in (0, own):
            yield (
                f"{option} {value} has no effect: the run keeps {own or 'no value'}, with which it was made; "
                f"give {option} to `embq worker`"
            )


def add_uploaded(root: Path, arrived: Path, ready: Callable[[], None], on_progress: Callable[[], None]) -> AddedUnits:
    """Add to a run the units that it lacks of another one, which was planned elsewhere and uploaded.

    Call it under `planning_lock`.

    Args:
        root: output folder of the run that is there.
        arrived: folder that holds the `run.json` and the manifest of the other one.
        ready: moves the uploaded inputs into place; called when it is certain that units will be added, before they
            are. Idempotent.
        on_progress: called for each unit, as progress.

    Raises InputError if the two are of another model, or inputs have changed. Then nothing is changed.
    """
    existing_run, other = load_run(root), load_run(arrived)
    _refuse_other_run(root, existing_run, model=other.model, rows=other.rows, format_=other.format)
    requested = PlanRecord(inputs=other.inputs, options=other.options, version=other.version)

    def units() -> Iterator[Unit]:
        for unit in Manifest(Layout(arrived)):
            on_progress()
            yield unit

    plan = Plan(units=units(), modalities=other.model.modalities, warnings=())
    # Only the machine that planned can see whether an input is gone.
    added = _extend(Layout(root), existing_run, requested, plan, ready=ready, look_for_vanished=False)
    return AddedUnits(units=added.info.units, samples=added.samples, added=added.added)


def plan_of(request: Request) -> tuple[Layout, Plan, ModelConfig]:
    """Layout, plan and model of a request. Writes nothing; raises as `prepare` does."""
    refuse_dtype(request.format, request.rows.dtype)
    models = asked_models(request.models)
    if request.rows.normalize is False:
        models = tuple(replace(model, spec=model.spec.without_normalizing()) for model in models)
    layout = Layout(place(request.output))
    planned = plan(
        request.inputs,
        request.options if request.chunking is None else request.options.for_chunks(),
        request.modalities,
        as_held=request.as_held,
        selection=request.selection,
        was_planned=_known_sources(layout),
    )
    config = config_of(
        models,
        modalities=planned.modalities,
        precision=request.precision,
        chunking=request.chunking,
        decode=request.decode,
    )
    if config.chunking is not None and "image" in config.modalities:
        raise InputError(
            "the inputs hold images, and only texts are cut into chunks",
            next_step="add --modality text to embed their texts only, or leave out --chunk-tokens",
            code="chunks_of_images",
        )
    check_rows(request.rows, config)
    if layout.run_json.exists():
        existing_run = load_run(layout.root)
        _refuse_other_run(request.output, existing_run, model=config, rows=request.rows, format_=request.format)
    else:
        refuse_foreign_files(layout)
    return layout, planned, config


def additions_to(layout: Layout, request: Request, planned: Plan, existing_run: RunInfo) -> Iterator[Unit]:
    """The units that would be added to a run; InputError, at the end, if inputs have changed."""
    additions = _additions(layout, existing_run, request.record)
    yield from additions.of(planned.units, request.options.unit_samples)
    additions.differences(()).refuse_changed(request.output, existing_run, request.record)


def _make(layout: Layout, request: Request, config: ModelConfig, planned: Plan) -> RunInfo:
    segments = first_segment_writer(layout)
    summary = segments.write(planned.units)
    info = RunInfo(
        run="",
        inputs=request.record.inputs,
        options=request.record.options,
        model=config,
        rows=request.rows,
        format=request.format,
        part_rows=request.part_rows,
        units=summary.units,
        samples=summary.samples,
        manifest_digest=summary.digest,
        version=request.version,
        created=utc_now(),
        segments=tuple(segments.names),
        workers=request.workers,
    )
    info = replace(info, run=run_id(info.identity(), layout.root))
    save_control(layout, Control(priority=request.priority))
    try:
        info.publish(layout)
    except TryLaterError:
        for name in segments.names:
            drop(layout.manifest / name)
        raise
    return info


def _extend(
    layout: Layout,
    run: RunInfo,
    record: PlanRecord,
    planned: Plan,
    *,
    ready: Callable[[], None] = lambda: None,
    look_for_vanished: bool = True,
) -> Planned:
    """Add the units that the run lacks as one more generation."""
    additions = _additions(layout, run, record)
    diffs: list[Differences] = []

    def check(summary: ManifestSummary) -> None:
        diffs.append(additions.differences(_named_again(run, record) if look_for_vanished else (), planned.vanished))
        diffs[0].refuse_changed(layout.root, run, record)
        if summary.units:
            ready()

    units = additions.of(planned.units, int(dict(record.options)["unit_samples"]))
    summary = append_generation(layout, run, record, units, check=check)
    return Planned(
        info=load_run(layout.root),
        new=False,
        added=summary.units,
        samples=summary.samples,
        warnings=(*planned.warnings, *diffs[0].warnings()),
        listing=planned.listing,
    )


def _additions(layout: Layout, run: RunInfo, requested: PlanRecord) -> Additions:
    plans = [run.options, requested.options, *(generation.options for generation in run.added)]
    return Additions(Manifest(layout), limited=any("limit" in dict(options) for options in plans))


def _named_again(run: RunInfo, requested: PlanRecord) -> set[int]:
    """The generations whose inputs are all asked for again, with the same selection."""
    recorded = [(run.inputs, run.options), *((generation.inputs, generation.options) for generation in run.added)]
    selection = {pair for pair in requested.options if pair[0] in SELECTED}
    return {
        number
        for number, (inputs, options) in enumerate(recorded)
        if set(inputs) <= set(requested.inputs) and {pair for pair in options if pair[0] in SELECTED} == selection
    }


def _known_sources(layout: Layout) -> Callable[[str], bool]:
    """A test of paths for sources of the run's manifest, which its first call reads."""

    @cache
    def sources() -> frozenset[str]:
        return frozenset(unit.source for unit in Manifest(layout)) if layout.run_json.exists() else frozenset()

    return lambda path: path in sources()


def _refuse_other_run(output: Place, existing_run: RunInfo, *, model: ModelConfig, rows: RowSpec, format_: str) -> None:
    """InputError if the run in a folder is of another model, or stores something else."""
    model = model if model.modalities else existing_run.model  # all inputs have vanished, so nothing was planned
    old, new = existing_run.identity(), replace(existing_run, model=model, rows=rows, format=format_).identity()
    differences = [
        f"{name}: {old.get(name, 'none')} there, {new.get(name, 'none')} asked for"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if not differences:
        return
    begun = checkpoint.current(Layout(place(output)), existing_run.units).count > 0
    raise InputError(
        f"{output} holds another run: " + "; ".join(differences),
        next_step=f"choose another --output, or go on with the run that is there: {command_line('resume', output)}"
        + ("" if begun else " (or remove the folder: nothing of it is committed)"),
        code="other_run",
    )
