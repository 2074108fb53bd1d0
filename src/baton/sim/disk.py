"""A simulated disk that survives crashes of its host, with slow, failed, torn, lost and corrupt operations at given rates.

Owns named files. A write is atomic, as by a temporary file and a rename; a recent write can still be lost in a crash.
Results arrive later, as events of the host: a host that has crashed meanwhile gets none.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.sim.faults import DiskRates, Fault
from baton.sim.world import Host

READ_US = 200
WRITE_US = 500
SLOW_US = 200_000
SAFE_AFTER_US = 300_000
"""Writes made less than this before a crash may be lost."""
FILES_MAX = 10_000


class SimulatedDisk:
    def __init__(self, host: Host, rates: DiskRates) -> None:
        self._host = host
        self.rates = rates
        self._stream = host.world.stream(f"disk {host.name}")
        self._files: dict[str, bytes] = {}
        self._unsafe: dict[str, tuple[int, bytes | None]] = {}
        """Files written since the last crash: the time, and the former contents."""

    def read(self, name: str, answer: Callable[[bytes | None], None]) -> None:
        """The bytes, or None where there is no such file."""
        data = self._files.get(name)
        if data and self._draws(self.rates.corrupt, Fault.DISK_CORRUPT):
            at = self._stream.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << self._stream.randrange(8))]) + data[at + 1 :]
        self._host.after(self._delay_us(READ_US), answer, data)

    def write(self, name: str, data: bytes, answer: Callable[[bool], None]) -> None:
        """True when the file is in place; False where the disk has no room."""
        if self._draws(self.rates.full, Fault.DISK_FULL) or len(self._files) >= FILES_MAX:
            self._host.after(self._delay_us(WRITE_US), answer, False)
            return
        if self._draws(self.rates.torn, Fault.DISK_TORN):
            data = data[: self._stream.randrange(len(data) + 1)]
        self._host.after(self._delay_us(WRITE_US), self._placed, name, data, answer)

    def crash(self) -> None:
        """Lose recent writes at the drawn rate."""
        now_us = self._host.world.now_us
        for name, (written_us, before) in self._unsafe.items():
            if now_us - written_us < SAFE_AFTER_US and self._draws(self.rates.lost, Fault.DISK_LOST):
                self._restore(name, before)
        self._unsafe.clear()

    def heal(self) -> None:
        self.rates = DiskRates()

    def _placed(self, name: str, data: bytes, answer: Callable[[bool], None]) -> None:
        self._unsafe[name] = (self._host.world.now_us, self._files.get(name))
        self._files[name] = data
        answer(True)

    def _restore(self, name: str, before: bytes | None) -> None:
        if before is None:
            del self._files[name]
        else:
            self._files[name] = before

    def _draws(self, rate: float, fault: Fault) -> bool:
        if not rate or self._stream.random() >= rate:
            return False
        self._host.world.fire(fault, f"disk of {self._host.name}")
        return True

    def _delay_us(self, usual_us: int) -> int:
        slow = self._draws(self.rates.slow, Fault.DISK_SLOW)
        return usual_us + (self._stream.randrange(SLOW_US) if slow else 0)
