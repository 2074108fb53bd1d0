"""`baton store`: look at a store of KV, verify what is in it, and empty it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.cli.bench_screen import progress_bar, wide_console
from baton.core.errors import BatonError
from baton.kv.store import MISSING, OVERSIZED, Store, StoreStat, open_store
from baton.wire.envelope import EnvelopeFlaw, object_name, open_any

store_app = typer.Typer(
    help="Stores of KV: what is in them, whether it is sound, and how to empty them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

BATCH_OBJECTS = 64
DROP_OBJECTS = 256
ARENA_BYTES = 16 << 20
SHOWN_MAX = 20
TIMEOUT_S = 10.0
"""Longer than a server's timeout, since the store may be busy with servers."""
MISPLACED = "under another's name"

Url = Annotated[
    str, typer.Argument(metavar="URL", help="As --kv-store has it: file:DIR, valkey://HOST:PORT/0, mooncake://HOST:PORT.")
]
Repair = Annotated[bool, typer.Option("--repair", help="Drop what is not sound; servers compute it again.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@dataclass
class StoreFindings:
    sound: int = 0
    sound_bytes: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    names: list[tuple[str, str]] = field(default_factory=list)
    """Names of bad objects, with the reason."""
    gone: int = 0


@store_app.command("stat")
def stat_(url: Url) -> None:
    """Show how much is in a store."""
    console = wide_console()
    with _opened(console, url) as store:
        stat = _counted(store)
    table = Table(show_header=False, box=None)
    table.add_row("kind", stat.kind)
    table.add_row("objects", f"{stat.objects:,}")
    table.add_row("size", shown_bytes(stat.bytes))
    table.add_row("limit", "none given" if stat.limit_bytes is None else shown_bytes(stat.limit_bytes))
    for name, value in stat.details.items():
        table.add_row(name, value)
    console.print(table, highlight=False)


@store_app.command()
def verify(url: Url, repair: Repair = False) -> None:
    """Read every object of a store and see whether it is whole, and in its place.

    Ends with 1 where something is not sound. Servers look at each block that they fetch and drop what is bad by themselves:
    this finds it before they do. It is safe while they use the store.
    """
    console = wide_console()
    with _opened(console, url) as store:
        found = _examined(store)
        if repair and found.names:
            store.drop([name for name, _ in found.names])
    _tell(console, found, repair)
    if found.bad and not repair:
        raise typer.Exit(1)


@store_app.command()
def clear(url: Url, yes: Yes = False) -> None:
    """Drop everything in a store. Servers that use it go on, and compute again what they no longer find."""
    console = wide_console()
    with _opened(console, url) as store:
        if not yes:
            stat = _counted(store)
            typer.confirm(
                f"Drop {stat.objects:,} objects ({shown_bytes(stat.bytes)}) of this {stat.kind} store?", abort=True
            )
        count = _cleared(store)
    console.print(f"dropped {count:,} objects", highlight=False)


def _counted(store: Store) -> StoreStat:
    with progress_bar(_progress_console()) as bar:
        bar.add_task("counting", total=None)
        return store.stat()


def _cleared(store: Store) -> int:
    """Remove the listed objects in batches with progress, then objects added meanwhile."""
    with progress_bar(_progress_console()) as bar:
        task = bar.add_task("counting", total=None)
        names = [name for name, _ in store.names()]
        bar.update(task, description="dropping", total=len(names))
        for at in range(0, len(names), DROP_OBJECTS):
            store.drop(names[at : at + DROP_OBJECTS])
            bar.update(task, advance=DROP_OBJECTS)
        return len(names) + store.clear()


# ── verifying ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _examined(store: Store) -> StoreFindings:
    found = StoreFindings()
    with progress_bar(_progress_console()) as bar:
        task = bar.add_task("counting", total=None)
        listed = sorted(store.names())
        bar.update(task, description="verifying", total=len(listed))
        arena = memoryview(bytearray(max([ARENA_BYTES, *(size for _, size in listed)])))
        store.attach(arena)
        for batch in _batches(listed, len(arena)):
            _examine(store, batch, arena, found)
            bar.update(task, advance=len(batch))
    return found


def _batches(listed: list[tuple[str, int]], room: int) -> Iterator[list[tuple[str, int]]]:
    """Batches that fit into the arena."""
    batch: list[tuple[str, int]] = []
    left = room
    for name, size in listed:
        if batch and (size > left or len(batch) == BATCH_OBJECTS):
            yield batch
            batch, left = [], room
        batch.append((name, size))
        left -= size
    if batch:
        yield batch


def _examine(store: Store, batch: list[tuple[str, int]], arena: memoryview, found: StoreFindings) -> None:
    ends = list(accumulate(size for _, size in batch))
    buffers = [arena[end - size : end] for (_, size), end in zip(batch, ends, strict=True)]
    counts = store.get([name for name, _ in batch], buffers)
    for (name, _), buffer, count in zip(batch, buffers, counts, strict=True):
        if count == MISSING:
            found.gone += 1
            continue
        flaw = _flaw_of(name, buffer, count)
        if flaw is None:
            found.sound += 1
            found.sound_bytes += count
        else:
            found.bad[flaw] += 1
            found.names.append((name, flaw))


def _flaw_of(name: str, buffer: memoryview, count: int) -> str | None:
    if count == OVERSIZED:
        return str(EnvelopeFlaw.TORN)
    opened = open_any(buffer[:count])
    if isinstance(opened, EnvelopeFlaw):
        return str(opened)
    return None if object_name(opened.layout, opened.key) == name else MISPLACED


def _tell(console: Console, found: StoreFindings, repaired: bool) -> None:
    console.print(f"{found.sound:,} objects are sound ({shown_bytes(found.sound_bytes)})", highlight=False)
    if found.gone:
        console.print(f"{found.gone:,} went away meanwhile", highlight=False)
    if not found.bad:
        return
    reasons = ", ".join(f"{reason} {times:,}" for reason, times in sorted(found.bad.items()))
    console.print(f"{found.bad.total():,} are not sound: {reasons}", style="red", markup=False, highlight=False)
    for name, reason in found.names[:SHOWN_MAX]:
        console.print(f"  {name}  {reason}", markup=False, highlight=False, soft_wrap=True)
    if len(found.names) > SHOWN_MAX:
        console.print(f"  … and {len(found.names) - SHOWN_MAX:,} more", highlight=False)
    console.print("dropped" if repaired else "drop them with --repair", style="green" if repaired else "dim")


# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _opened(console: Console, url: str) -> Iterator[Store]:
    """Open a store; errors inside the block are printed in one line, with exit code 2."""
    try:
        store = open_store(url, timeout_s=TIMEOUT_S, create=False)
        try:
            yield store
        finally:
            store.close()
    except BatonError as error:
        console.print(f"baton store: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _progress_console() -> Console:
    """Console on stderr, since stdout may be a file."""
    return Console(stderr=True)


def shown_bytes(size: int) -> str:
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
