#!/usr/bin/env python
"""Everything an operator does from a shell: `manage.py help` lists it."""

import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as no:  # most often a variable of llmgw/settings.py, which the sentence names
        if "--traceback" in sys.argv:
            raise
        sys.exit(str(no))


if __name__ == "__main__":
    main()
