"""`baton models`: the converted and fetched models in the cache, and their removal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.cli.bench_screen import wide_console
from baton.cli.store import shown_bytes
from baton.executor.cache_folder import MODELS, cache_folder
from baton.node.model_cache import (
    CachedModel,
    ModelCacheError,
    cached_models,
    chosen,
    now_s,
    remove_model,
    seconds_of,
    shown_age,
)

models_app = typer.Typer(
    help="Models in the cache: built-in ones that were fetched, GGUF files that were converted, shapes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="As listed; the part before the dash will do.")]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", metavar="AGE", help="Only those unused for so long: 12h, 30d or 4w.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@models_app.command("list")
def list_() -> None:
    """Show the models in the cache, with size and last use."""
    console, models = wide_console(), cached_models()
    if not models:
        console.print(f"no models in {cache_folder() / MODELS}", markup=False, highlight=False, soft_wrap=True)
        return
    table, now = Table(box=None, pad_edge=False), now_s()
    table.add_column("name")
    table.add_column("size", justify="right")
    table.add_column("last used")
    for model in models:
        table.add_row(model.name, shown_bytes(model.bytes), "in use" if model.is_used else shown_age(now - model.used_s))
    console.print(table, highlight=False)
    total = shown_bytes(sum(model.bytes for model in models))
    console.print(f"{total} in {cache_folder() / MODELS}", markup=False, highlight=False, soft_wrap=True)


@models_app.command()
def prune(names: Names = None, older_than: OlderThan = None, yes: Yes = False) -> None:
    """Remove models from the cache; they are fetched or converted again when they are needed.

    Removes those that are named, or those that were not used for the time given with --older-than, or, with both, the named
    ones that were not. What a server of this machine has open stays.
    """
    console = wide_console()
    try:
        if not names and older_than is None:
            raise ModelCacheError(
                "name models, or say how long they were not used with --older-than; see: baton models list"
            )
        found = chosen(cached_models(), names or [], None if older_than is None else seconds_of(older_than), now_s())
        _prune(console, found, yes)
    except ModelCacheError as error:
        Console(stderr=True).print(f"baton models: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _prune(console: Console, found: list[CachedModel], yes: bool) -> None:
    for model in found:
        if model.is_used:
            console.print(f"{model.name} is in use and stays", markup=False, highlight=False, soft_wrap=True)
    free = [model for model in found if not model.is_used]
    if not free:
        console.print("nothing to remove", highlight=False)
        return
    for model in free:
        console.print(f"{model.name}  {shown_bytes(model.bytes)}", markup=False, highlight=False, soft_wrap=True)
    total = shown_bytes(sum(model.bytes for model in free))
    if not yes:
        typer.confirm(f"Remove {len(free)} from the cache ({total})?", abort=True)
    removed = [model for model in free if remove_model(model)]
    console.print(f"removed {len(removed)} ({shown_bytes(sum(model.bytes for model in removed))})", highlight=False)
