"""The command line: `narrowgauge compare`, `train`, `fit`, `tokens`, `plan`, `report`, `watch`, `formats` and
`bench`.

Bad input ends in one line on stderr and exit status 2; Ctrl-C in status 130.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; the process's own if None.

    Returns:
        The exit status.
    """
    try:
        from narrowgauge.cli._app import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("narrowgauge"):
            raise
        print(
            f"narrowgauge: the command line needs {error.name}; install it with: pip install 'narrowgauge[train]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return run(sys.argv[1:] if arguments is None else arguments)
