#!/usr/bin/env python
"""Everything an operator does from a shell: `manage.py help` lists it."""

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
