"""Asynchronous generation from SGLang servers: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import torch
from torch import Tensor

from megatron_gspo.batch.trajectory import Finish
from megatron_gspo.config.schema import RolloutConfig
from megatron_gspo.rollout.control import ServerError, field

FIRST_BACKOFF_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are sampled. Generation ends after any of `stop_token_ids`, which the response keeps."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: RolloutConfig, stop_token_ids: Sequence[int]) -> Sampling:
        """The sampling that a recipe asks for; stop tokens are the tokenizer's and the generation config's."""
        return cls(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(stop_token_ids),
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """One response of t tokens, on CPU.

    output_ids [t] int64. logprobs [t] float32: log_softmax(logits / temperature) of each token, before top_p and top_k.
    versions [t] int64: weight version that sampled the token.
    """

    output_ids: Tensor
    logprobs: Tensor
    versions: Tensor
    finish: Finish


class SglangClient:
    """Generates from several servers that hold the same weights; each request goes to the least loaded one.

    At most `max_concurrency` requests are in flight. A connection error or 5xx answer is tried again `retries` times,
    on whichever server is least loaded then; a 4xx answer is the caller's mistake and raises ServerError at once. Use
    it as an asynchronous context manager.
    """

    def __init__(self, urls: Sequence[str], *, vocab_size: int, max_concurrency: int, timeout_s: float, retries: int):
        self._in_flight = dict.fromkeys(urls, 0)
        self._vocab_size = vocab_size
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout_s = timeout_s
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> SglangClient:
        # The semaphore bounds the connections.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=self._timeout_s)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int, rid: str) -> list[Sample]:
        """`n` responses to one prompt; `rid` names the request in the server's log.

        Raises ValueError for an empty prompt or an id outside the vocabulary (which would kill the server),
        ServerError when every attempt failed.
        """
        _check_prompt(prompt_ids, self._vocab_size)
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": {
                "n": n,  # one request for all: the server computes the prompt once
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            "return_logprob": True,
        }
        async with self._slots:
            where, reply = await self._post_with_retries(body, rid)
        replies = reply if isinstance(reply, list) else [reply]
        if len(replies) != n:
            raise ServerError(f"{where}, request {rid}: asked for {n} responses, got {len(replies)}")
        return [_sample(each, f"{where}, request {rid}") for each in replies]

    async def _post_with_retries(self, body: dict[str, Any], rid: str) -> tuple[str, Any]:
        """The address that answered, and its reply."""
        failures: list[str] = []
        while True:
            url = min(self._in_flight, key=self._in_flight.__getitem__)
            self._in_flight[url] += 1
            try:
                # A name of its own per attempt: the server refuses one that it still holds.
                where = f"{url}/generate"
                return where, await self._post(where, body | {"rid": f"{rid}-{len(failures)}"})
            except (aiohttp.ClientError, TimeoutError, _Unavailable) as error:
                failures.append(f"{url}: {error!r}")
            finally:
                self._in_flight[url] -= 1
            if len(failures) > self._retries:
                raise ServerError(f"request {rid} failed {len(failures)} times: {'; '.join(failures)}")
            await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (len(failures) - 1))

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        assert self._session is not None, "use the client as an asynchronous context manager"
        async with self._session.post(url, json=body) as response:
            if response.status >= 500:
                raise _Unavailable(f"{response.status}: {(await response.text())[:2000]}")
            if response.status >= 400:
                raise ServerError(f"{url} refused request {body['rid']} ({response.status}): {await response.text()}")
            text = await response.text(errors="replace")
            try:
                return json.loads(text)
            except json.JSONDecodeError:
                return text  # of another program; `_sample` says what was expected


class _Unavailable(Exception):
    """A 5xx answer."""


def _check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: a response needs at least one token to follow")
    worst = min(prompt_ids) if min(prompt_ids) < 0 else max(prompt_ids)
    if not 0 <= worst < vocab_size:
        raise ValueError(
            f"prompt_ids holds {worst}, outside the vocabulary [0, {vocab_size}): "
            "tokenizer and model do not belong together"
        )


def _sample(reply: Any, where: str) -> Sample:
    """The response in a reply of `where`. Raises ServerError for one of another form, or that contradicts itself."""
    tokens = [int(token) for token in field(reply, "output_ids", where=where)]
    scored = field(reply, "meta_info", "output_token_logprobs", where=where)
    spans = field(reply, "meta_info", "weight_versions", where=where)
    finish = field(reply, "meta_info", "finish_reason", "type", where=where)
    if [entry[1] for entry in scored] != tokens:
        raise ServerError(f"{where}: {len(tokens)} output ids but log-probabilities of {len(scored)} others")
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    if len(versions) != len(tokens):
        raise ServerError(f"{where}: {len(tokens)} output ids but weight versions of {len(versions)}")
    return Sample(
        output_ids=torch.tensor(tokens, dtype=torch.int64),
        logprobs=torch.tensor([entry[0] for entry in scored], dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.int64),
        finish=Finish[finish],
    )
