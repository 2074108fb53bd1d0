"""The names of the laws that are checked in simulated worlds, and the exception for a broken one."""

from __future__ import annotations

from baton.core.errors import BatonError

ENDS_ONCE = "every request ends exactly once"
SAME_TOKENS = "a client's tokens are those of an undisturbed run"
TRUE_LOGPROBS = "log-probabilities are those that the executor gave for these tokens"
TRUE_END = "the end says what was delivered, and why"
TRUE_BILL = "the bill adds up"
OWN_PREFIXES = "a cached prefix was asked for before, by the same tenant"
TRUE_DRAIN = "who drains accepts nothing"
DESERVED_REFUSAL = "only what cannot be served now is refused"
DESERVED_LOSS = "nobody loses an instance that was never gone"
DESERVED_ERROR = "nobody pays for a disagreement that never was"
WHOLE_KEY = "no life begins with a damaged key"
QUEUE_BOUND = "the queue holds no more than it may"
LINE_BOUND = "a line holds no more than it may"
LEDGER_SUMS = "the ledger sums to the pool"
ENDS_AT_ONCE = "what nobody waits for ends at once"
DEADLOCK = "while a request is open, something happens"
LIVENESS = "after healing, every open request ends in time"
RECOVERY = "after healing, every instance serves again"
SAME_LAYOUT = "peers know each other, and agree what a block is"
ALIEN_BYTES = "a block that KV lands in is leased for that, and for nothing else"
WHOLE_KV = "a request decodes where all of its KV is, as it was computed"
ANSWERED_AT_ONCE = "every offer is answered at once"
LEASES_END = "every lease ends in time"
HANDOVERS_END = "nothing is held for a peer three seconds after it died"
TRUE_FAULT = "an attempt fails only for a cause, and says which"
UNTOUCHED = "what a copy reads and where it writes is left alone until it has ended"
TRUE_NAME = "what is kept under a name is what was computed for it"
TRANSFERS_END = "every copy and every question to the store ends in time"
TRANSFERS_BOUND = "no more is ordered at once than may be"
LEFT_ALONE = "a store that fails is left alone for a while"
DEPARTS_IN_TIME = "who goes elsewhere waits for the store no longer than it may"
NOTHING_HELD = "nothing stays held when nobody is left"
FENCED = "of two lives of an instance only the later one serves"
RIGHT_PLACE = "a leg goes to an instance that serves, and avoids one that had no room for it"
GOES_ON = "a leg goes on after exactly what was delivered, and asks for the same"
ONE_PLACE = "a choice is open in one place at a time"
BACK_OFF = "a leg that found no room is not tried again at once"
DESERVED_END = "nobody is given up before all tries have failed"
DESERVED_SUSPICION = "nobody is suspected who was never out of reach"
SUSPECTED_IN_TIME = "who gives no sign of life is taken out in time"
DRAINS_IN_TIME = "what is open at an instance that drains goes on elsewhere in time"
WAITS_IN_TIME = "nobody waits longer than was promised"
FORGOTTEN = "an instance keeps nothing for a body that is over"
OPEN_COUNTS = "the router knows what is open where"
TRUE_NAMES = "the router knows what an instance has cached, and of nobody else's cache"
CAN_RESUME = "what an instance has kept can be resumed"
STRANGERS = "a stranger changes nothing"
SILENCE_NOTICED = "a connection on which nothing comes is given up in time"
WHOLE_FRAMES = "a connection delivers what was sent in it: whole, once and in order"
OWN_CHECKS = "our own code found no fault"


class LawBroken(BatonError):
    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
        self.what = what
