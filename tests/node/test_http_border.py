"""What the border of the HTTP server decides without a connection."""

from __future__ import annotations

from baton.node.http_border import is_probe


def test_a_probe_is_a_look_at_health_by_either_method() -> None:
    for path in (b"/health", b"/ready", b"/ping", b"/ping?from=balancer"):
        assert is_probe(b"GET", path)
        assert is_probe(b"HEAD", path)
        assert not is_probe(b"POST", path)
    assert not is_probe(b"GET", b"/")
