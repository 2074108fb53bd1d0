"""Proof that an HTTP request comes from a holder of the cluster key, without showing the key.

    Baton-Cluster-Proof: v1 TIME NONCE DIGEST MAC

    TIME    Unix time of the sender in seconds, decimal
    NONCE   16 random bytes in hex, never used twice
    DIGEST  SHA-256 of the body, hex
    MAC     HMAC-SHA256(cluster key, "baton-request-proof-v1\\nMETHOD\\nPATH\\nTIME\\nNONCE\\nDIGEST"), hex

Owns the header, its check and the memory of nonces, which is bounded by the time for which a proof is good. The digest is
in the header so that a body that changed on its way is told from a wrong key. A cluster key that is given as a text stands
for the bytes of `wire/keyfile.py` `key_of_text`. The clock is given, and so are the random bytes.

A proof is good once at one instance. Who reads the connection can send it to another instance within those seconds, and
gets the answer that it could read before: requests between machines belong on a private network or inside TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable

HEADER = "Baton-Cluster-Proof"
NONCE_BYTES = 16
WINDOW_S = 30
"""How far the sender's clock may be off, in both directions."""
NONCES_MAX = 1 << 16
"""Proofs accepted in twice that time; more are refused, since a nonce that is forgotten could be used again."""

_VERSION = "v1"
_PROOF = re.compile(rf"{_VERSION} (\d{{1,12}}) ([0-9a-f]{{{2 * NONCE_BYTES}}}) ([0-9a-f]{{64}}) ([0-9a-f]{{64}})", re.ASCII)


def proof_of(key: bytes, method: str, path: str, body: bytes, time_s: float, nonce: bytes) -> str:
    """The value of the header for one request, with a fresh nonce of NONCE_BYTES."""
    time, digest = str(int(time_s)), hashlib.sha256(body).hexdigest()
    return f"{_VERSION} {time} {nonce.hex()} {digest} {_mac(key, method, path, time, nonce.hex(), digest)}"


def _mac(key: bytes, *parts: str) -> str:
    message = "\n".join(("baton-request-proof-v1", *parts))
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


class ProofChecker:
    header = HEADER

    def __init__(self, key: bytes, clock_s: Callable[[], float]) -> None:
        self._key = key
        self._clock_s = clock_s
        self._started_s = int(clock_s())
        self._nonces: dict[str, float] = {}
        """Nonce → when it came, in the order of coming."""

    def why_not(self, method: str, path: str, body: bytes, proof: str) -> str | None:
        """Why the proof does not hold; None when it does, which uses it up.

        Nothing is remembered and nothing about time or nonces is told to a sender whose MAC is wrong.
        """
        found = _PROOF.fullmatch(proof)
        if found is None:
            return f"it is not '{_VERSION} TIME NONCE DIGEST MAC'"
        time, nonce, digest, mac = found.groups()
        if not hmac.compare_digest(mac, _mac(self._key, method, path, time, nonce, digest)):
            return f"it was not made with this cluster's key for {method} {path}"
        if not hmac.compare_digest(digest, hashlib.sha256(body).hexdigest()):
            return "the body is not the one that it was made for"
        return self._why_not_now(int(time)) or self._use_up(nonce)

    def _why_not_now(self, time_s: int) -> str | None:
        now_s = self._clock_s()
        if abs(now_s - time_s) > WINDOW_S:
            return f"its time is {abs(now_s - time_s):.0f} s off this machine's clock; at most {WINDOW_S} s"
        if time_s < self._started_s:  # it may have been used before a restart, which forgets the nonces
            return "it was made before this instance started; make another"
        return None

    def _use_up(self, nonce: str) -> str | None:
        now_s = self._clock_s()
        for old in self._forgettable(now_s):
            del self._nonces[old]
        if nonce in self._nonces:
            return "it was used before; every request needs a fresh nonce"
        if len(self._nonces) >= NONCES_MAX:
            return f"{NONCES_MAX} proofs came in {2 * WINDOW_S} s, more than can be remembered; try again later"
        self._nonces[nonce] = now_s
        return None

    def _forgettable(self, now_s: float) -> list[str]:
        """Nonces of proofs that are too old by now, whatever time they named."""
        old = []
        for nonce, came_s in self._nonces.items():
            if now_s - came_s <= 2 * WINDOW_S:
                break
            old.append(nonce)
        return old
