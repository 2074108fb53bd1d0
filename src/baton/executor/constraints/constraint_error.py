"""The error of all backends, in a module that imports no array library: processes that only compile start without one."""

from __future__ import annotations

from baton.core.errors import BatonError


class ConstraintError(BatonError):
    """A constraint that does not compile, or a matcher that gave up, such as at a limit. Its text is for a log."""
