"""The verdict of a soak on made-up figures, and its clients against a server of the test's own."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from benchmarks.soak import SoakedProcess, SoakReport, _verdict
from benchmarks.soak_clients import KINDS, SoakClients


def _process(resident: list[int], before: int = 10, after: int = 10) -> SoakedProcess:
    return SoakedProcess("router", 1, resident, before, after)


@pytest.mark.parametrize(
    ("process", "said"),
    [
        (_process([100, 190, 200, 209]), None),
        (_process([100, 190, 200, 211]), "5.5% in the last quarter"),
        (_process([100, 100, 100, 100], 10, 11), "11 descriptors, and had 10"),
        (_process([100, 100, 100, 100], 10, 9), None),
    ],
)
def test_growth_of_the_last_quarter_and_descriptors_are_judged(process: SoakedProcess, said: str | None) -> None:
    found = _verdict(SoakReport(requests=100, seed=1, processes=[process]))
    assert (said is None and not found) or (said is not None and said in found[0])


async def _answer(request: web.Request) -> web.StreamResponse:
    if request.headers["Authorization"] != "Bearer key":
        return web.Response(status=401)
    stream = (await request.json())["stream"]
    return web.Response(body=b"data: [DONE]\n\n" if stream else b"{}")


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503)


@pytest.mark.parametrize(("handler", "is_well"), [(_answer, True), (_refuse, False)])
async def test_each_kind_of_client_is_sent_and_what_is_not_answered_is_noted(handler: web.Handler, is_well: bool) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        clients, ended = SoakClients(f"http://{host}:{port}", "key", 1), list[int]()

        async def each(count: int) -> None:
            ended.append(count)

        async with asyncio.timeout(30):
            await clients.run(0, 200, 4, each)
    finally:
        await runner.cleanup()
    assert ended == list(range(1, 201))
    assert set(clients.sent) == set(KINDS)
    assert bool(clients.wrong) is not is_well
