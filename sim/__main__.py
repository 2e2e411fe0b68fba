"""`python -m batchsim` is the command `batchsim`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command. Ctrl-C ends it in one line with exit code 130, while it is still being imported too."""
    os.environ.setdefault(
        "PYDANTIC_DISABLE_PLUGINS", "__all__"
    )  # batchsim has none; the search reads all packages' files
    try:
        from batchsim.cli import app

        app(prog_name="batchsim")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
