"""`python -m baton` is the `baton` command."""

import sys

if not sys.flags.safe_path:
    # The current folder, which `-m` puts first: a module that lies there must not pass for a library.
    del sys.path[0]

from baton.cli.main import run

run()
