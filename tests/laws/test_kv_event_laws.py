"""Whoever reads the KV events from the first on knows, after every event, exactly the blocks in the prefix cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.config import WorkerConfig
from baton.core.engine.worker import Effect, Event
from baton.wire.kv_events import batch_of, block_hash, tenant_mark
from tests.laws import test_preemption_laws, test_tier_laws
from tests.laws.test_preemption_laws import CROWDED, Machine, shapes
from tests.laws.test_tier_laws import tiered
from tests.laws.test_worker_laws import Ask, asks
from tests.support.driver import Driver, submission
from tests.support.kv_reader import KvReader
from tests.support.tiers import TieredDriver

SALTS = (b"", b"tenant")
SEEN: Counter[str] = Counter()


class _Read(Driver):
    """Compares what a reader knows with the index after each event."""

    def __init__(self, config: WorkerConfig, *rest: Any) -> None:
        super().__init__(config, *rest)
        self.readers = (KvReader(), KvReader(by_name=True))

    def send(self, event: Event) -> list[Effect]:
        effects = super().send(event)
        prefix = self.worker.scheduler.pool.prefix
        while self.worker.has_block_events:
            changes = self.worker.block_events()
            for block in changes.stored:
                above = [block.parent] if block.parent is not None else [prefix.root(salt) for salt in SALTS]
                assert block.key in [prefix.hashes.block(parent, block.tokens) for parent in above]
            for by_name, reader in enumerate(self.readers):
                reader.read(batch_of(changes, self.config.block_size, 0.0, bool(by_name)))
        names = {block_hash(key) for key in prefix.names().values()}
        for reader in self.readers:
            assert reader.blocks.keys() == names
            assert {"".join(mark) for mark in reader.marks.values()} <= {tenant_mark(prefix.root(b"tenant"))}
            assert names.isdisjoint(reader.blocks[block][0] for block in reader.orphans), "told before its parent"
            reader.orphans.clear()
        return effects

    def run(self, *limits: int) -> None:
        super().run(*limits)
        gauges = self.worker.gauges()
        SEEN.update(self.readers[0].seen)
        SEEN["preempted"] += gauges.preemptions_for_others + gauges.preemptions_of_self
        SEEN["loaded"] += gauges.storage.loaded


class _ReadTiered(_Read, TieredDriver):
    """The same with host memory and a store."""


def _told(config: WorkerConfig) -> WorkerConfig:
    return replace(config, prefix_cache=True, kv_events=True)


@pytest.mark.parametrize("loads", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_reader_knows_exactly_the_cached_blocks_under_preemption(loads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_preemption_laws, "Driver", _Read)
    SEEN.clear()

    @settings(max_examples=loads, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(config=shapes(), seed=st.integers(0, 2**32))
    def machine(config: WorkerConfig, seed: int) -> None:
        Machine(_told(config), seed, Counter()).run()

    machine()
    Machine(_told(CROWDED), 1, Counter()).run()
    assert min(SEEN[what] for what in ("stored", "removed", "cleared", "preempted")) > 0, SEEN


@pytest.mark.parametrize("mixes", [25, pytest.param(150, marks=pytest.mark.slow)])
def test_a_reader_knows_exactly_the_cached_blocks_with_tiers(mixes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_tier_laws, "TieredDriver", _ReadTiered)
    SEEN.clear()

    @settings(max_examples=mixes, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(config=tiered(), todo=st.lists(asks(), min_size=1, max_size=12), data=st.data())
    def mix(config: WorkerConfig, todo: list[Ask], data: st.DataObject) -> None:
        test_tier_laws._run_to_the_end(_told(config), todo, data)

    mix()
    assert min(SEEN[what] for what in ("stored", "removed", "loaded")) > 0, SEEN


def test_salted_sequences_are_told_apart_from_others_with_the_same_tokens() -> None:
    driver = _Read(WorkerConfig(slots=2, blocks=32, block_size=4, context_tokens=64, step_tokens=32, kv_events=True))
    for number, salt in enumerate(SALTS):
        driver.submit(submission(range(12), 4, name=str(number), salt=salt))
        driver.run()
    reader = driver.readers[0]
    first = [block for block, (parent, tokens) in reader.blocks.items() if parent is None and tokens == (0, 1, 2, 3)]
    assert len(first) == 2
    assert len([block for block in first if block in reader.marks]) == 1
    assert len(reader.marks) == 1, "the mark is on the first block only"
