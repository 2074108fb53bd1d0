"""Settings on their way to an engine process, and into the configuration of its worker."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest

from baton.core.config import BringBack, HandoverSettings, OnPreempt, SchedulerSettings, TierSettings, VictimPolicy
from baton.core.setting import BadConfig
from baton.executor.contract import ExecutorShape
from baton.node.engine_setup import constrained_burst, worker_config
from baton.node.settings import EngineSettings, ForcedDrafts, RoleName, decode_settings

CHANGED = EngineSettings(
    "ipc://somewhere", None, b"\x00\xffsecret", cluster_key=b"key", waiting_max=7, slots=3, step_tokens=99, block_size=4,
    prefix_cache=True, depth=1, ratio_initial=0.5, ratio_decay=0.25, ratio_floor=0.125, ratio_clip_tokens=11, fixed_blocks=2,
    fixed_blocks_decay=0.5, victims=VictimPolicy.CHEAPEST, max_preemptions=1, on_preempt=OnPreempt.RESCHEDULE,
    deadline_us=5_000_000, lease_us=400_000, save_preempted=False, save_finished=False, cache_outputs=False,
    bring_back=BringBack.ALWAYS, host_memory_bytes=1 << 20, role=RoleName.DECODE, peers=("127.0.0.1:1",),
)  # fmt: skip
SHAPE = ExecutorShape(slots=3, blocks=50, block_size=4, context_tokens=128, burst=1)


def test_settings_arrive_as_they_were_sent() -> None:
    for sent in (CHANGED, EngineSettings("", None, b"")):
        assert decode_settings(msgspec.json.encode(sent)) == sent


def test_a_setting_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadConfig, match="colour"):
        decode_settings(b'{"endpoint": "", "model_folder": null, "prefix_secret": "", "colour": 1}')


def test_a_setting_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="slots"):
        decode_settings(b'{"endpoint": "", "model_folder": null, "prefix_secret": "", "slots": "many"}')


def test_what_core_decides_with_is_what_was_set() -> None:
    config = worker_config(CHANGED, SHAPE, block_bytes=1024)
    parts = ((SchedulerSettings, config), (HandoverSettings, config.handover), (TierSettings, config.tiers))
    for declared, made in parts:
        for field in fields(declared):
            assert getattr(made, field.name) == getattr(CHANGED, field.name), field.name
    assert (config.role.name, config.tiers.host_rows, config.handover.renew_us) == ("decode", 1024, 100_000)


def test_sizes_that_the_executor_chose_go_before_those_asked_for() -> None:
    config = worker_config(replace(CHANGED, slots=64, block_size=16), SHAPE)
    assert (config.slots, config.block_size) == (3, 4)


@pytest.mark.parametrize(("asked", "cpu", "cuda"), [("auto", 8, 0), ("on", 8, 8), ("off", 0, 0)])
def test_forced_tokens_are_drafts_where_the_device_or_the_operator_says(asked: str, cpu: int, cuda: int) -> None:
    settings = EngineSettings("", None, b"", forced_drafts=ForcedDrafts(asked))
    assert constrained_burst(settings) == cpu
    assert constrained_burst(settings, drafts_forced=False) == cuda
