"""A small OpenAI-compatible server with faults on demand: it streams words, counts what it is asked, and can misbehave."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Faults:
    """What goes wrong, by the number of the request, counted from 0."""

    status: dict[int, int] = field(default_factory=dict)
    retry_after: str | None = None
    error_event: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    short: set[int] = field(default_factory=set)
    no_usage: bool = False
    token_s: float = 0.0
    preemptions_name: str = ""
    """A counter on /metrics, in two labels, that rises by one with each completion."""


class OpenAiServer:
    def __init__(self, faults: Faults | None = None, port: int = 0) -> None:
        self.faults = faults or Faults()
        self.bodies: list[dict] = []
        self.in_flight = 0
        self.in_flight_max = 0
        self.url = ""
        self._port = port

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "words", "object": "model"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        name, count = self.faults.preemptions_name, len(self.bodies)
        lines = ["# HELP up Up.", "# TYPE up gauge", "up 1.0"]
        if name:
            lines += [f"# TYPE {name} counter", f'{name}{{reason="a"}} {count - 1}.0', f'{name}{{reason="b"}} 1.0']
        return web.Response(text="\n".join(lines) + "\n")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            if number in self.faults.status:
                headers = {"Retry-After": self.faults.retry_after} if self.faults.retry_after else {}
                text = json.dumps({"error": {"message": "not now"}})
                return web.Response(status=self.faults.status[number], text=text, headers=headers)
            return await self._stream(request, body, number)
        except ConnectionResetError:
            return web.Response(status=499)  # the client left; nobody reads this
        finally:
            self.in_flight -= 1

    async def _stream(self, request: web.Request, body: dict, number: int) -> web.StreamResponse:
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if chat:
            await _event(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        tokens = body["max_tokens"] - (number in self.faults.short)
        for n in range(tokens):
            if self.faults.token_s:
                await asyncio.sleep(self.faults.token_s)
            if n == 1 and number in self.faults.error_event:
                await _event(response, {"error": {"message": "engine died"}})
                return response
            if n == 1 and number in self.faults.cut:
                return response
            choice: dict = {"index": 0, "finish_reason": "length" if n == tokens - 1 else None}
            choice |= {"delta": {"content": f"w{n} "}} if chat else {"text": f"w{n} "}
            if body.get("return_token_ids"):
                choice["token_ids"] = [500 + n]
            await _event(response, {"choices": [choice]})
        if not self.faults.no_usage:
            await _event(response, {"choices": [], "usage": _usage(body, tokens)})
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(body: dict, tokens: int) -> dict:
    prompt = body.get("prompt") or [word for message in body["messages"] for word in message["content"].split()]
    details = {"cached_tokens": len(prompt) // 2}
    return {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": details}


async def _event(response: web.StreamResponse, value: dict) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


async def main() -> None:
    """As a process: `python -m tests.bench.server --port N`, for what starts its servers itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--preemptions-name", default="")
    options = parser.parse_args()
    faults = Faults(token_s=options.token_s, preemptions_name=options.preemptions_name)
    server = OpenAiServer(faults, options.port)
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
