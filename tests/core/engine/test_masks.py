"""Tests of boolean columns agree with numpy's, whatever their length and strides."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.core.engine.masks import all_true, any_true


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 3))
def test_a_mask_is_tested_as_numpy_does(values: list[bool], every: int) -> None:
    mask = np.array(values, dtype=np.bool_)[::every]
    assert any_true(mask) == bool(mask.any())
    assert all_true(mask) == bool(mask.all())
    assert any_true(mask[:, None]) == bool(mask.any())
