"""`python -m baton` is the `baton` command."""

from baton.cli.main import run

run()
