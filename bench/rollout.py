"""Sampling speed of one managed SGLang server on this machine: through our client, and through SGLang's own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from bench.shapes import PROMPT_TOKENS, Shape
from megatron_gspo.config.schema import ServerConfig
from megatron_gspo.policy.cpu import on_gpu
from megatron_gspo.rollout.client import Sampling, SglangClient
from megatron_gspo.rollout.server import ManagedServer


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one client saw: response tokens, and seconds from the first request to the last answer."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second."""
        return self.tokens / self.seconds


@contextmanager
def serve(policy: Path, context_length: int, log: Path) -> Iterator[str]:
    """URL of a server with the recipe's defaults, but with a tokenizer: SGLang's client sends texts.

    SGLang's own warm-up text takes about 30 tokens of `context_length`.
    """
    config = ServerConfig(args={"skip_tokenizer_init": False})
    with ManagedServer(policy, config, log_path=log, on_cpu=not on_gpu(), context_length=context_length) as server:
        server.wait_healthy()
        yield server.url


def make_texts(shape: Shape, seed: int) -> list[str]:
    """[prompts] different texts of PROMPT_TOKENS tokens each, like the demo's."""
    digits = np.random.default_rng((2, seed)).integers(0, 10, (shape.prompts, PROMPT_TOKENS - 1))
    return ["".join(map(str, row)) + ">" for row in digits]


def through_our_client(url: str, policy: Path, shape: Shape, concurrency: int, *, group: int) -> Speed:
    """One request for `group` responses of a prompt; each response as long as the shape says, where group is 1."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompts = [tokenizer(text)["input_ids"] for text in make_texts(shape, seed=group)]
    lens = shape.response_lens(seed=0)
    vocab_size = json.loads((policy / "config.json").read_text())["vocab_size"]

    async def sample() -> int:
        client = SglangClient([url], vocab_size=vocab_size, max_concurrency=concurrency, timeout_s=600.0, retries=0)
        async with client:
            requests = [
                client.generate(
                    prompts[row // shape.samples],
                    Sampling(max_new_tokens=int(lens[row]) if group == 1 else shape.longest),
                    n=group,
                    rid=f"{time.monotonic_ns()}-{row}",
                )
                for row in range(0, shape.n, group)
            ]
            replies = await asyncio.gather(*requests)
        return sum(len(sample.output_ids) for reply in replies for sample in reply)

    start = time.perf_counter()
    tokens = asyncio.run(sample())
    return Speed(tokens=tokens, seconds=time.perf_counter() - start)


def through_sglangs_client(url: str, policy: Path, shape: Shape, concurrency: int, folder: Path) -> Speed:
    """sglang.benchmark.serving on the same prompts and lengths, one request a response, neither streamed.

    Raises RuntimeError with its output when a request failed.
    """
    texts, lens = make_texts(shape, seed=0), shape.response_lens(seed=0)
    data, result = folder / "requests.jsonl", folder / "result.jsonl"
    # Its custom data set takes the lengths of the second turns as the numbers of tokens to generate.
    turns = [(texts[row // shape.samples], "0" * int(lens[row])) for row in range(shape.n)]
    data.write_text("".join(json.dumps({"conversations": [{"content": t} for t in pair]}) + "\n" for pair in turns))
    result.unlink(missing_ok=True)
    options = {
        "backend": "sglang",
        "base-url": url,
        "model": policy,
        "tokenizer": policy,
        "dataset-name": "custom",
        "dataset-path": data,
        "num-prompts": shape.n,
        "max-concurrency": concurrency,
        "temperature": 1.0,
        "output-file": result,
    }
    flags = ["--disable-stream", "--disable-ignore-eos", "--return-logprob", "--disable-tqdm"]
    command = [sys.executable, "-m", "sglang.benchmark.serving", *flags]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode or not result.exists():
        raise RuntimeError(
            f"sglang.benchmark.serving failed ({done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    found = json.loads(result.read_text())
    if found["completed"] != shape.n:
        raise RuntimeError(f"sglang.benchmark.serving: {found['completed']} of {shape.n} requests completed")
    return Speed(tokens=found["total_output_tokens"], seconds=found["duration"])
