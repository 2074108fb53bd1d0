"""The table of formats, measured with a tiny model of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.bench.tiny_model import make_tiny
from benchmarks.formats import FormatMeter


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_format_has_a_speed_an_opinion_and_a_size(tmp_path: Path, quantization: str) -> None:
    make_tiny(tmp_path, 1024)
    meter = FormatMeter(tmp_path, quantization, slots=2)
    try:
        opinion = meter.opinion()
        assert opinion.perplexity > 1.0
        assert len(opinion.best) == 510  # of a text cut at the context, all tokens but the first
        assert meter.tokens_per_s(2, 3) > 0
        assert meter.executor.weight_bytes > 10_000
    finally:
        meter.executor.close()
