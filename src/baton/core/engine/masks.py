"""Tests of boolean columns.

A step has a few rows more often than a thousand. numpy takes longer to find its way to a reduction than to compute one for
so few: as bytes, a column of any length is tested in a fraction of the time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def any_true(mask: npt.NDArray[np.bool_]) -> bool:
    return 1 in mask.tobytes()


def all_true(mask: npt.NDArray[np.bool_]) -> bool:
    return 0 not in mask.tobytes()
