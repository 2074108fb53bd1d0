"""Limits of tenants, and of the retries of the whole fleet.

Buckets here may be overdrawn: the cost of a request is known only when it has ended, so a tenant in debt waits until it is
paid off, instead of being cut off in the middle of an answer. Works with tenants and numbers, not with requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.core.errors import Refusal, RefusalCode
from baton.core.routing.config import RouterConfig

SECOND_US = 1_000_000
TENANTS_MAX = 4096
"""With more tenants than this, those without debt and open choices are forgotten."""


class TokenBucket:
    """Fills at a steady rate up to its size."""

    def __init__(self, size: float, per_second: float, now_us: int) -> None:
        self._size = size
        self._per_second = per_second
        self._level = size
        self._at_us = now_us

    def level(self, now_us: int) -> float:
        passed_us = max(0, now_us - self._at_us)
        self._level = min(self._size, self._level + passed_us * self._per_second / SECOND_US)
        self._at_us += passed_us
        return self._level

    def take(self, amount: float, now_us: int) -> None:
        self._level = self.level(now_us) - amount

    def give_back(self, amount: float) -> None:
        self._level = min(self._size, self._level + amount)

    def is_full(self, now_us: int) -> bool:
        return self.level(now_us) >= self._size

    def debt_us(self, now_us: int) -> int:
        """Time until the debt is paid off."""
        level = self.level(now_us)
        return 0 if level >= 0 else math.ceil(-level / self._per_second * SECOND_US)


class RetryBudget:
    """Limits the retries of all choices together: beyond the burst they wait, so that a loss causes no flood of retries."""

    def __init__(self, config: RouterConfig) -> None:
        self._bucket = TokenBucket(config.retry_burst, config.retry_rate, 0)

    def reserve(self, now_us: int) -> int:
        """Reserve one retry. Returns the time until it may be made."""
        self._bucket.take(1, now_us)
        return self._bucket.debt_us(now_us)

    def give_back(self) -> None:
        """A reserved retry is not made: later ones need not wait for it."""
        self._bucket.give_back(1)


@dataclass(slots=True)
class _Tenant:
    tokens: TokenBucket | None
    open: int = field(default=0)


class RateLimits:
    def __init__(self, config: RouterConfig) -> None:
        self._concurrency = config.key_concurrency
        self._per_minute = config.key_tokens_per_minute
        self._tenants: dict[str, _Tenant] = {}

    def admit(self, tenant: str, choices: int, prompt_tokens: int, now_us: int) -> Refusal | None:
        """Count a request that has arrived, or return the refusal."""
        if self._concurrency is None and self._per_minute is None:
            return None
        account = self._account(tenant, now_us)
        if self._concurrency is not None and choices > self._concurrency:
            text = f"{choices} choices are asked for at once, and this key may have {self._concurrency} open"
            return Refusal(RefusalCode.TOO_MANY_CHOICES, text)
        if self._concurrency is not None and account.open + choices > self._concurrency:
            text = f"{account.open} choices of this key are open, {choices} more asked for; it may have {self._concurrency}"
            return Refusal(RefusalCode.RATE_LIMITED, text, 1)
        if account.tokens is not None:
            wait_us = account.tokens.debt_us(now_us)
            if wait_us or account.tokens.level(now_us) < 1:
                text = f"this key has used its {self._per_minute} tokens a minute"
                return Refusal(RefusalCode.RATE_LIMITED, text, max(1, math.ceil(wait_us / SECOND_US)))
            account.tokens.take(prompt_tokens, now_us)
        account.open += choices
        return None

    def close(self, tenant: str | None, generated_tokens: int, now_us: int) -> None:
        """A choice has ended."""
        account = None if tenant is None else self._tenants.get(tenant)
        if account is None:
            return
        account.open -= 1
        if account.tokens is not None:
            account.tokens.take(generated_tokens, now_us)

    def give_back(self, tenant: str | None, prompt_tokens: int) -> None:
        """A request was declined; its choices are closed one by one."""
        account = None if tenant is None else self._tenants.get(tenant)
        if account is not None and account.tokens is not None:
            account.tokens.give_back(prompt_tokens)

    def _account(self, tenant: str, now_us: int) -> _Tenant:
        account = self._tenants.get(tenant)
        if account is None:
            if len(self._tenants) >= TENANTS_MAX:
                self._forget_idle(now_us)
            bucket = None if self._per_minute is None else TokenBucket(self._per_minute, self._per_minute / 60, now_us)
            account = self._tenants[tenant] = _Tenant(bucket)
        return account

    def _forget_idle(self, now_us: int) -> None:
        idle = [n for n, a in self._tenants.items() if not a.open and (a.tokens is None or a.tokens.is_full(now_us))]
        for name in idle:
            del self._tenants[name]
