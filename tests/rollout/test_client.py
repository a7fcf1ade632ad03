"""The client's behaviour towards servers that fail, against a small fake; the real server is in test_server.py."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megatron_gspo.batch.trajectory import Finish
from megatron_gspo.rollout import client as client_module
from megatron_gspo.rollout.client import Sampling, SglangClient
from megatron_gspo.rollout.control import ServerError

SAMPLING = Sampling(max_new_tokens=3, stop_token_ids=(9,))


def answer(tokens=(4, 9), versions=((1, 0, 1), (2, 1, 2)), finish="stop"):
    return {
        "output_ids": list(tokens),
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(tokens)],
            "weight_versions": [{"version": str(v), "start": start, "end": end} for v, start, end in versions],
        },
    }


def run(handlers: list[Callable[[web.Request], Awaitable[web.Response]]], use, **options):
    """`use(client)` against one fake server per handler."""

    async def main():
        servers = []
        for handler in handlers:
            app = web.Application()
            app.router.add_post("/generate", handler)
            servers.append(TestServer(app))
            await servers[-1].start_server()
        urls = [str(server.make_url("")).rstrip("/") for server in servers]
        defaults = {"vocab_size": 10, "max_concurrency": 8, "timeout_s": 5.0, "retries": 2}
        try:
            async with SglangClient(urls, **(defaults | options)) as client:
                return await use(client)
        finally:
            for server in servers:
                await server.close()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 0.0)


def test_a_reply_becomes_samples_with_a_version_per_token():
    bodies = []

    async def handler(request):
        bodies.append(await request.json())
        return web.json_response([answer(), answer((5, 6, 7), ((3, 0, 3),), "length")])

    first, second = run([handler], lambda c: c.generate([1, 2], SAMPLING, n=2, rid="step-0"))
    assert first.output_ids.tolist() == [4, 9] and first.versions.tolist() == [1, 2]
    assert first.logprobs.tolist() == [-0.5, -1.5] and first.finish is Finish.stop
    assert second.versions.tolist() == [3, 3, 3] and second.finish is Finish.length
    assert bodies[0]["input_ids"] == [1, 2] and bodies[0]["return_logprob"]
    assert bodies[0]["sampling_params"] == {
        "n": 2,
        "max_new_tokens": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [9],
    }


def test_a_server_that_is_down_for_a_moment_is_asked_again_under_another_name():
    rids = []

    async def handler(request):
        rids.append((await request.json())["rid"])
        return web.json_response(answer()) if len(rids) == 3 else web.Response(status=503, text="busy")

    assert len(run([handler], lambda c: c.generate([1], SAMPLING, n=1, rid="r"))) == 1
    assert rids == ["r-0", "r-1", "r-2"]


def test_a_dropped_connection_counts_as_a_failed_attempt():
    async def handler(request):
        request.transport.close()
        return web.Response()

    with pytest.raises(ServerError, match=r"request r failed 3 times: http://.*ServerDisconnectedError"):
        run([handler], lambda c: c.generate([1], SAMPLING, n=1, rid="r"))


def test_a_refusal_is_not_repeated_and_carries_the_servers_words():
    calls = []

    async def handler(request):
        calls.append(1)
        return web.Response(status=400, text="input is longer than the context")

    with pytest.raises(ServerError, match=r"refused request r-0 \(400\): input is longer than the context"):
        run([handler], lambda c: c.generate([1], SAMPLING, n=1, rid="r"))
    assert len(calls) == 1


@pytest.mark.parametrize("prompt", [[], [3, 10], [-1]])
def test_a_prompt_that_would_kill_the_server_is_not_sent(prompt):
    async def handler(request):
        raise AssertionError("sent")

    with pytest.raises(ValueError, match="prompt_ids"):
        run([handler], lambda c: c.generate(prompt, SAMPLING, n=1, rid="r"))


def test_requests_go_to_the_least_loaded_server_and_are_bounded():
    loads = {"slow": 0, "fast": 0}
    open_now, most = 0, 0

    def handler(name, delay_s):
        async def handle(request):
            nonlocal open_now, most
            loads[name] += 1
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(delay_s)
            open_now -= 1
            return web.json_response(answer())

        return handle

    async def use(client):
        await asyncio.gather(*(client.generate([1], SAMPLING, n=1, rid=str(i)) for i in range(20)))

    run([handler("slow", 0.2), handler("fast", 0.01)], use, max_concurrency=4)
    assert most == 4
    assert loads["fast"] > 2 * loads["slow"]


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("<html>Sign in</html>", "output_ids"),
        ('{"detail": "ok"}', "output_ids"),
        ('{"output_ids": [1], "meta_info": {}}', "meta_info.output_token_logprobs"),
        ("[3]", "output_ids"),
    ],
)
def test_a_reply_of_another_program_is_not_repeated_and_names_the_url(body, missing):
    async def handler(request):
        return web.Response(text=body)

    expected = rf"http://.*/generate, request r: expected the reply of an SGLang server, with {missing}, got"
    with pytest.raises(ServerError, match=expected):
        run([handler], lambda c: c.generate([1], SAMPLING, n=1, rid="r"))


def test_log_probabilities_of_other_tokens_are_refused():
    async def handler(request):
        reply = answer()
        reply["meta_info"]["output_token_logprobs"].pop()
        return web.json_response(reply)

    with pytest.raises(ServerError, match="2 output ids but log-probabilities of 1"):
        run([handler], lambda c: c.generate([1], SAMPLING, n=1, rid="r"))
