"""The header that proves that a request comes from a holder of the cluster key."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.wire import request_proof
from baton.wire.keyfile import key_of_text
from baton.wire.request_proof import NONCE_BYTES, WINDOW_S, ProofChecker, proof_of

KEY = key_of_text("a key of sixteen characters or more")
PATH = "/v1/chat/completions"
BODY = b'{"generated_token_ids": [1, 2]}'


class Clock:
    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def nonce(number: int) -> bytes:
    return number.to_bytes(NONCE_BYTES, "big")


def proof(time_s: float, number: int = 0, key: bytes = KEY) -> str:
    return proof_of(key, "POST", PATH, BODY, time_s, nonce(number))


def started_long_ago() -> tuple[Clock, ProofChecker]:
    clock = Clock()
    checker = ProofChecker(KEY, clock)
    clock.now_s += 10 * WINDOW_S
    return clock, checker


def check(checker: ProofChecker, header: str, path: str = PATH, body: bytes = BODY, method: str = "POST") -> str | None:
    return checker.why_not(method, path, body, header)


def test_the_header_is_what_its_docstring_says() -> None:
    text = "\n".join(
        ["baton-request-proof-v1", "POST", PATH, "12", nonce(7).hex(), hashlib.sha256(BODY).hexdigest()]
    )  # fmt: skip
    mac = hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()
    assert proof(12.9, 7) == f"v1 12 {nonce(7).hex()} {hashlib.sha256(BODY).hexdigest()} {mac}"
    assert KEY.hex() not in proof(12.9, 7)


def test_a_proof_holds_once() -> None:
    clock, checker = started_long_ago()
    header = proof(clock())
    assert check(checker, header) is None
    assert "used before" in (check(checker, header) or "")
    assert check(checker, proof(clock(), 1)) is None


def test_a_proof_holds_for_its_method_path_body_and_key_alone() -> None:
    clock, checker = started_long_ago()
    header = proof(clock())
    assert "this cluster's key for PUT" in (check(checker, header, method="PUT") or "")
    assert "this cluster's key for POST /v1/completions" in (check(checker, header, path="/v1/completions") or "")
    assert "the body is not the one" in (check(checker, header, body=BODY + b" ") or "")
    assert "this cluster's key" in (check(checker, proof(clock(), key=key_of_text("another key of that length"))) or "")
    assert check(checker, header) is None, "what was refused did not use it up"


@pytest.mark.parametrize("off_s", [-WINDOW_S - 1, WINDOW_S + 1, -86_400, 86_400])
def test_a_time_that_is_far_off_is_refused(off_s: int) -> None:
    clock, checker = started_long_ago()
    assert f"{abs(off_s)} s off" in (check(checker, proof(clock() + off_s)) or "")


@pytest.mark.parametrize("off_s", [-WINDOW_S, 0, WINDOW_S])
def test_a_clock_may_be_a_little_off(off_s: int) -> None:
    clock, checker = started_long_ago()
    assert check(checker, proof(clock() + off_s)) is None


@given(sent_s=st.integers(-WINDOW_S, WINDOW_S), later_s=st.lists(st.integers(0, 2 * WINDOW_S), max_size=6))
def test_no_waiting_makes_a_used_proof_good_again(sent_s: int, later_s: list[int]) -> None:
    clock, checker = started_long_ago()
    header = proof(clock() + sent_s)
    assert check(checker, header) is None
    for number, step_s in enumerate(later_s, 1):
        clock.now_s += step_s
        check(checker, proof(clock(), number))  # which forgets what is old
        assert check(checker, header) is not None


def test_a_restart_forgets_nonces_and_refuses_what_may_have_used_them() -> None:
    clock, checker = started_long_ago()
    header = proof(clock())
    assert check(checker, header) is None
    clock.now_s += 2
    restarted = ProofChecker(KEY, clock)
    assert "before this instance started" in (check(restarted, header) or "")
    assert check(restarted, proof(clock(), 1)) is None


def test_the_memory_of_nonces_is_bounded_and_refuses_rather_than_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_proof, "NONCES_MAX", 4)
    clock, checker = started_long_ago()
    assert [check(checker, proof(clock(), number)) for number in range(4)] == [None] * 4
    assert "try again later" in (check(checker, proof(clock(), 4)) or "")
    assert "used before" in (check(checker, proof(clock(), 0)) or "")
    clock.now_s += 2 * WINDOW_S + 1
    assert check(checker, proof(clock(), 4)) is None


@given(st.text(max_size=300))
def test_any_other_header_is_refused(header: str) -> None:
    _, checker = started_long_ago()
    assert "'v1 TIME NONCE DIGEST MAC'" in (check(checker, header) or "")


def test_a_wrong_mac_tells_nothing_about_nonces_and_times() -> None:
    clock, checker = started_long_ago()
    assert check(checker, proof(clock())) is None
    used, stale = (proof(at, key=b"x" * 32) for at in (clock(), clock() - 1000))
    assert check(checker, used) == check(checker, stale)
