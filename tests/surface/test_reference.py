"""The reference of options and metrics is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli import reference

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text() == reference.PAGES[name](), "write it anew with: python -m baton.cli.reference"


def test_every_option_and_metric_is_listed() -> None:
    options, metrics = reference.options_page(), reference.metrics_page()
    for flag in ("--max-num-seqs", "--prefill-timeout", "--suspect-after", "--restart-delay-max", "--link-gbytes"):
        assert f"| `{flag}`" in options
    for name in ("baton_kv_blocks", "baton_request_success_total", "baton_role_info", "baton_retries_total"):
        assert f"| `{name}` |" in metrics
