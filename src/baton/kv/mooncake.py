"""`mooncake`: D reads P's registered pool with Mooncake's Transfer Engine. Not there yet."""

from __future__ import annotations

from baton.kv.contract import KvMemory, Receiver, ReceiverOptions, Report, Sender, SenderOptions, TransferUnavailable


def why_not() -> str | None:
    return "mooncake is not there yet"


def mooncake_receiver(_memory: KvMemory, _report: Report, _options: ReceiverOptions) -> Receiver:
    raise TransferUnavailable(str(why_not()))


def mooncake_sender(_memory: KvMemory, _report: Report, _options: SenderOptions) -> Sender:
    raise TransferUnavailable(str(why_not()))
