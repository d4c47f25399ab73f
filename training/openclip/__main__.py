"""`python -m training.openclip FLAGS`: open_clip's own training with its own flags, and the cures of `cures`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from core.errors import EmbqError


def main(arguments: Sequence[str]) -> int:
    """Train as open_clip does; its exit status, which is not 0 where it did not train.

    Args:
        arguments: flags of `python -m open_clip_train.main`, and `--keys DIR`: a folder for which samples each rank
            was trained on in each epoch, see `keys`.
    """
    from training.openclip.cures import cured
    from training.openclip.keys import keys_flag, recorded_keys

    folder, flags = keys_flag(arguments)
    try:
        with cured(), recorded_keys(folder):
            from open_clip_train.main import main as train

            status = train(flags)
    except EmbqError as error:
        print(f"error[{error.code}]: {error.message}\n  next:  {error.next_step}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    # What open_clip returns where it stops early is -1; Python's own launcher of modules drops it.
    return 0 if status is None else int(status) % 256


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
