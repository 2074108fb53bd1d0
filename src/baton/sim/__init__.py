"""A whole cluster in virtual time. Runs where only Python, numpy and msgspec are installed."""

from importlib.util import find_spec

from baton.sim import checksum_stand_in

if find_spec("xxhash") is None:
    checksum_stand_in.install()
