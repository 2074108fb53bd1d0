"""Matrix products of Triton's interpreter that do not depend on where a row stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def products_row_by_row() -> Iterator[None]:
    """Products that sum every row in the same order, as a GPU does.

    The interpreter's own come from numpy, whose library sums a row in another order at another place of the matrix, on some
    processors.
    """

    def dot(_self: object, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
        left, right, total = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data.copy()
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k, :]
        return TensorHandle(total, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        yield
