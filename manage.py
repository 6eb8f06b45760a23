#!/usr/bin/env python
"""Everything an operator does from a shell: `manage.py help` lists it."""

import errno
import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    _prepare_streams()
    try:
        execute_from_command_line(sys.argv)
        sys.stdout.flush()
    except ImproperlyConfigured as no:  # most often a variable of llmgw/settings.py, which the sentence names
        if "--traceback" in sys.argv:
            raise
        sys.exit(str(no))
    except OSError as problem:
        if "--traceback" in sys.argv or problem.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        _leave_stdout()
        if problem.errno == errno.EPIPE:  # whoever reads, as `head` does, has enough
            sys.exit(1)
        sys.exit(f"Not all could be written: {problem.strerror}. Look what was done before you repeat it.")


def _prepare_streams() -> None:
    """All three are there: otherwise the next file that is opened, the database perhaps, takes the number of
    one that is closed. A file or a pipe gets UTF-8, whatever the locale; a terminal gets what it can show."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - stays open
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="backslashreplace")


def _leave_stdout() -> None:
    """What is still to be written there goes nowhere, and raises nothing at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
