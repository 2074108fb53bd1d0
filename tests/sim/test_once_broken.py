"""Seeds of worlds that once broke a law: none may break any.

What was mended is tested where it is decided; a change in how worlds are drawn makes other worlds of these seeds.
"""

from __future__ import annotations

import pytest

from baton.sim.fuzzed_run import FuzzedRun
from baton.sim.scenario import draw_scenario
from tests.support.quick_sample import one_in

ONCE_BROKEN = {
    "accepted by an instance that is not asked any more": 616,
    "a request refused by a draining instance waited for absent-timeout anew": 50746684,
    "the time to drain was counted from a Join whose held requests came later": 94814429,
    "a paused instance learned of its lost session when its grace was over": 406954596,
    "an instance was suspected while its messages came, all about choices that were called back": 710000194,
    "a router that stood still for less than two beats counted that as silence of an instance": 1791479938,
    "steps launched on a slow device lasted longer than its slowness, and excused nothing": 1791480154,
    "an instance whose welcome was lost waited for ever for a router that had died": 930000016,
    "the end of an attempt was billed again at every join of its instance": 930000054,
    "a choice found where it was had to wait because another instance had refused it before": 931000132,
    "a request whose message was taken out on the way waited for as long as nothing else was sent": 922000019,
    "a device that was to hang did so at the first step after healing": 922000056,
    "the limit of a hung step ran on while its engine was stopped for good": 933000076,
    "two attempts at one instance that began alike were taken for one, and billed once": 924000044,
    "an engine that was stopped for good counted as serving while its front end joined again": 925000267,
    "retries of choices that were found where they were stayed booked, and others waited for them": 1269,
    "an instance that was idle when it was told to restart waited for something to happen": 936000245,
    "a device went on with the steps behind one that hung, and told their layers before they were computed": 767,
    "a connection of a crashed instance, opened after that of its next life, was taken for its connection": 716485647,
    "a connection of a crashed front end, opened after that of the next one, was taken for its connection": 716505877,
    "the end of one choice counted as the beginning of the wait of another choice of its request": 716501659,
    "a stranger of another model came first to a restarted router, which did not know its own, and joined": 716489807,
    "a request that such a stranger claimed to hold was taken for one that a client had asked for": 716495427,
    "our own code found no fault: what such a stranger claimed to hold was no key that the router knew": 716496216,
    "such a stranger was a member of which the laws knew nothing": 716487279,
    "a stranger changes nothing: such a stranger was a member where nobody was": 716497316,
    "a stranger changes nothing: such a stranger was a member where nobody was, in another world": 716501036,
    "a lease ran out before its renewal, which is sent between two steps of the device, could arrive": 59727613,
    "a request that was preempted elsewhere went on at an instance that did not know it, and was preempted again": 940026844,
    "a request that waited at a peer behind more important ones was taken for one that was held for a dead peer": 940035235,
    "a refusal counted although its request had been found elsewhere before it came": 608775349,
    "a step became longer, and so the time that an attempt may wait for its answer, after one was lost": 985038327,
    "two instances, one of them out of reach, preempted a request that both were running": 985044506,
    "each of 16 moves asked a peer again for a prefill that takes longer than a hand-over may": 340374106,
    "an attempt that ended with the fence of its copy made room, and nobody told the attempts that waited for it": 769977521,
    "the Join of a former life came after that of the present one, whose clock had been set back": 726162582,
    "what an attempt had waited before a pause of the router did not count as its wait": 886903343,
    "a burst larger than what may be unread ended its connection before the other end could read": 873131834,
    "a request that a peer began after a long wait was taken for one that was held for a dead peer": 329475057,
    "an attempt was lost while the longest step was under way, and its client's wait looked like a deadlock": 280183074,
    "a connection that had ended because nobody read was judged once more by what was unread": 257495646,
    "a line holds no more than it may: that of a front end had ended": 257496393,
    "a line holds no more than it may: that of a router had ended": 257503079,
    "a router was down for nearly the grace period, and its instances joined again after it": 390349234,
    "an answer ended at once when only instances of other versions were left, and one of its own could come": 145032483,
}


@pytest.mark.parametrize("seed", one_in(5, ONCE_BROKEN.values()), ids=ONCE_BROKEN.keys())
def test_a_world_that_once_broke_a_law_breaks_none(seed: int) -> None:
    broken = FuzzedRun(draw_scenario(seed), always_audit=True).verdict().broken
    assert broken is None, str(broken)
