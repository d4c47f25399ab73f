"""`python -m embq.training.openclip FLAGS`: open_clip's training with its own flags, patched by `open_clip_patches`."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Train as open_clip does; returns its exit status, which is not 0 if it did not train.

    Args:
        arguments: flags of `python -m open_clip_train.main`, and those of `split_flags`.

    Raises OutputError if the folder of the training holds another one, ModelError if its model could run code.
    """
    from open_clip_train.params import parse_args

    from embq.core.process.current_folder import set_up_wandb
    from embq.training.openclip.log import shown_progress
    from embq.training.openclip.models import pinned
    from embq.training.openclip.open_clip_patches import noted_failures, patched, recorded_keys
    from embq.training.openclip.training_plan import split_flags
    from embq.worker.embedders.loading import no_own_code

    own, flags = split_flags(arguments)
    given = parse_args(flags)
    if given.report_to and any(name in given.report_to for name in ("wandb", "all")):  # as open_clip looks for them
        set_up_wandb()
    flags += ["--model", pinned(given.model, given.cache_dir)]
    with (
        no_own_code(),
        patched(),
        recorded_keys(own.keys),
        noted_failures(own.unreadable),
        shown_progress(own.progress),
    ):
        from open_clip_train.main import main as train

        status = train(flags)
    # What open_clip returns if it stops early is -1; Python's own launcher of modules drops it.
    return 0 if status is None else int(status) % 256


if __name__ == "__main__":
    from embq.training.launch.member import run_module

    run_module("embq.training.openclip")
