"""Errors of the user's input, apart from errors of the program.

A `UsageError` is one line and exit status 2. Any other exception is a defect and shows its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UsageError(ValueError):
    """The input cannot work. The message is one line that names the option or the file."""


@contextlib.contextmanager
def user_input() -> Iterator[None]:
    """Turn the errors of a block into usage errors.

    The library raises ValueError for wrong arguments and unreadable files. Put around calls that check or read what
    the user gave, and around nothing else: a ValueError from a computation is a defect.

    Raises:
        UsageError: in place of ValueError and OverflowError.
    """
    try:
        yield
    except UsageError:
        raise
    except (ValueError, OverflowError) as error:
        raise UsageError(str(error)) from error
