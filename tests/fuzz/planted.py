"""Borders with a bug, which the fuzzer must catch: `python -m tests.fuzz.planted KIND INPUTS`, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from tests.fuzz import run
from tests.fuzz.border import Border
from tests.fuzz.inputs import from_bytes


def planted(kind: str) -> Border:
    kept: list[bytes] = []

    def decode(data: bytes) -> object:
        match kind:
            case "raises":
                raise KeyError(data)
            case "hangs":
                while True:
                    pass
            case "grows":
                kept.append(bytes(20_000))
            case "takes too much":
                return bytearray(2 * run.MORE_BYTES_MAX)
        raise ValueError("refused")

    return Border(decode, (ValueError,), from_bytes([b"a valid message"]))


def run_planted(kind: str, inputs: int) -> run.Outcome:
    command = [sys.executable, "-m", "tests.fuzz.planted", kind, str(inputs)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return msgspec.json.decode(done.stdout, type=run.Outcome)


if __name__ == "__main__":
    outcome = run.run_border(sys.argv[1], planted(sys.argv[1]), int(sys.argv[2]), seed=1)
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
