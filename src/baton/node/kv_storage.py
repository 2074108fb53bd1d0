"""KV beyond the pool: host memory, the threads that copy to and from it, and the store behind it.

The engine loop gives this one object every order that concerns them, and gets the results through the inbox. Also here: the
checks of a store's settings that need nothing slow, and the bounded wait for a store's first opening.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from functools import partial

from baton.api.home_folders import expanded
from baton.core.config import BadConfig
from baton.core.engine.gauges import StoreTraffic
from baton.core.errors import InvariantViolated
from baton.core.tiers.transfers import CopyIn, CopyOut, FenceTransfer, StorageEffect, TransferFenced, TransferId
from baton.executor.private_files import UnsafeFile, check_folder
from baton.kv.block_access import BlockAccess
from baton.kv.host_memory import HostCopier, HostMemory, Report
from baton.kv.lazy_store import LazyStore
from baton.kv.store import BadStore, Store, StoreFailed, open_store, parse_url
from baton.kv.store_guard import StoreGuard
from baton.kv.store_transfers import StoreTally, StoreTransfers
from baton.kv.transfer_contract import KvLayout
from baton.node.settings import EngineSettings
from baton.wire.envelope import EnvelopeFlaw

log = logging.getLogger("baton.store")

OPENING_S = 5.0
"""Seconds that the start waits for the store. A slower opening continues while we serve."""
PROBE = f"{'0' * 16}/{'0' * 32}"
"""A name that no object has: reading it tests whether the store answers."""


def check_storage(settings: EngineSettings) -> None:
    """Raise BadConfig or BadStore for settings that cannot work."""
    if settings.kv_store is not None:
        parse_url(settings.kv_store)
    elif settings.kv_store_limit_bytes is not None:
        raise BadConfig("--kv-store-limit is only for --kv-store")
    if settings.kv_store is not None and not settings.host_bytes:
        raise BadConfig("--kv-store needs --host-memory: everything passes through it on its way there and back")
    if settings.host_bytes and not settings.prefix_cache:
        option = "--host-memory" if settings.kv_store is None else "--kv-store"
        raise BadConfig(f"{option} needs the prefix cache, by whose names KV is found; leave --no-prefix-cache out")


class KvStorage:
    def __init__(self, blocks: BlockAccess, layout: KvLayout, rows: int, store: Store | None, report: Report) -> None:
        """`rows` of host memory, allocated by `blocks`. Closing this closes the store."""
        host = HostMemory(rows, layout.block_bytes, blocks.allocate)
        self._report = report
        self._copier = HostCopier(blocks, host, report)
        self._store_transfers = None if store is None else StoreTransfers(store, host, layout.digest, report)

    def carry_out(self, effect: StorageEffect) -> None:
        match effect:
            case CopyOut() | CopyIn():
                self._copier.copy(effect)
            case FenceTransfer(transfer):
                self._fence(transfer)
            case _:
                if self._store_transfers is None:
                    raise InvariantViolated(f"haul {effect.transfer} is for a store, and there is none")
                self._store_transfers.start(effect)

    def _fence(self, transfer: TransferId) -> None:
        known = self._copier.fence(transfer) or (self._store_transfers is not None and self._store_transfers.fence(transfer))
        if not known:  # the order is over and was answered
            self._report(TransferFenced(transfer))

    def traffic(self) -> StoreTraffic:
        tally = StoreTally() if self._store_transfers is None else self._store_transfers.tally()
        return StoreTraffic(
            saved_bytes=self._copier.out_bytes,
            loaded_bytes=self._copier.in_bytes,
            stored_bytes=tally.stored_bytes,
            fetched_bytes=tally.fetched_bytes,
            missing_blocks=tally.missing_blocks,
            errors=tally.errors,
            # All flaws from the start: a rate over a series that does not exist yet misses its first event.
            bad_blocks={} if self._store_transfers is None else dict.fromkeys(EnvelopeFlaw, 0) | dict(tally.bad),
        )

    def close(self) -> None:
        self._copier.close()
        if self._store_transfers is not None:
            self._store_transfers.close()


@dataclass
class _Opening:
    """The result of the first opening."""

    store: LazyStore
    trouble: BadStore | StoreFailed | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            with StoreGuard().guarded():
                self.store.open()
                self.store.look([PROBE])
        except (BadStore, StoreFailed) as trouble:
            self.trouble = trouble
        self.over.set()


def open_kv_store(settings: EngineSettings, wait_s: float = OPENING_S) -> Store | None:
    """Open the store, if one is configured. Raises BadStore where it is unusable; one that is only down may come up
    later."""
    if settings.kv_store is None:
        return None
    url = parse_url(settings.kv_store)
    opening = _Opening(LazyStore(url.kind, partial(_open_trusted, settings.kv_store, settings.kv_store_limit_bytes)))
    threading.Thread(target=opening.run, name="baton-store-open", daemon=True).start()
    if not opening.over.wait(wait_s):
        log.warning("the store %s has not answered in %g s; serving begins without it", url, wait_s)
    elif isinstance(opening.trouble, BadStore):
        raise opening.trouble
    elif opening.trouble is not None:
        log.warning("the store %s fails; serving begins without it: %s", url, opening.trouble)
    return opening.store


def _open_trusted(address: str, limit_bytes: int | None) -> Store:
    """Refuse a folder that others may write: they could forge KV."""
    url = parse_url(address)
    if url.kind == "file" and os.path.lexists(folder := expanded(url.path, BadStore)):
        try:
            check_folder(folder)
        except UnsafeFile as danger:
            raise BadStore(str(danger)) from None
        except OSError:
            pass  # opening it says why
    return open_store(address, limit_bytes=limit_bytes)


def describe(settings: EngineSettings, rows: int) -> str:
    """A description for the operator."""
    where = "" if settings.kv_store is None else f", KV store {parse_url(settings.kv_store)}"
    return f"{rows} blocks in host memory{where}"
