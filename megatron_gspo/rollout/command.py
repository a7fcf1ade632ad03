"""The command line and environment of an SGLang server. Pure: nothing is started or looked up here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_gspo.config.schema import ServerConfig

STAND_IN = Path(__file__).parent / "cpu" / "stand_in"

DERIVED = {
    "model_path": "policy.hf",
    "model": "policy.hf",
    "host": "the address that the trainer reaches",
    "port": "rollout.server.port",
    "device": "the machine: cuda where there is a GPU, else cpu",
    "tp_size": "rollout.server.tp",
    "tensor_parallel_size": "rollout.server.tp",
    "context_length": "data.max_prompt_tokens and rollout.max_new_tokens",
    "weight_version": "the trainer's weight version",
}
UNSUPPORTED = {
    name: "weight updates reach one replica of a server only: start several servers instead"
    for name in ("dp_size", "data_parallel_size", "pp_size", "pipeline_parallel_size")
}

# Of a torchrun or srun launch around the trainer, whose process group the server must not join.
TRAINER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# Sequences decoded together on CPU: the tokens per second of small models grow up to about here.
CPU_MAX_RUNNING = 512
CPU_KV_TOKENS = 1 << 16


def launch_command(
    model_path: str | Path,
    config: ServerConfig,
    *,
    host: str,
    port: int,
    on_cpu: bool,
    context_length: int,
    environment: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """Command and whole environment of a server. `config.args` adds flags to our defaults and overrides them; true is
    a bare flag, false takes a default away, a list is several values, a mapping is JSON.

    Raises ValueError for flags that are derived from other keys, unsupported, or without a value.
    """
    flags: dict[str, Any] = {
        "model_path": str(model_path),
        "host": host,
        "port": port,
        "device": "cpu" if on_cpu else "cuda",
        "tp_size": config.tp,
        "context_length": context_length,
        "weight_version": "0",
        **_defaults(on_cpu, context_length),
    }
    for key, value in config.args.items():
        name = key.lstrip("-").replace("-", "_")
        _check_arg(name, value, flags)
        flags[name] = value
    argv = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        argv += _flag(name, value)
    return argv, _environment(environment, on_cpu)


def _defaults(on_cpu: bool, context_length: int) -> dict[str, Any]:
    # Prompts are sent as token ids, so the server needs no tokenizer; one access-log line per request tells nothing.
    common = {"skip_tokenizer_init": True, "grammar_backend": "none", "log_level_http": "warning"}
    if not on_cpu:
        return common
    return common | {
        "dtype": "float32",  # in bf16, CPU kernels round differently enough to route tokens to other experts
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "sleep_on_idle": True,
        "max_running_requests": CPU_MAX_RUNNING,
        "max_total_tokens": max(context_length, min(CPU_MAX_RUNNING * context_length, CPU_KV_TOKENS)),
    }


def _check_arg(name: str, value: Any, flags: Mapping[str, Any]) -> None:
    where = f"rollout.server.args.{name}"
    if name in DERIVED:
        raise ValueError(f"{where}={value!r}: this flag follows from {DERIVED[name]}; remove it from args")
    if name in UNSUPPORTED:
        raise ValueError(f"{where}={value!r}: {UNSUPPORTED[name]}")
    if value is None or (value is False and name not in flags):
        raise ValueError(f"{where}={value!r}: no such default to take away; give a value, or true for a bare flag")


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, Mapping):
        return [flag, json.dumps(dict(value))]
    if isinstance(value, (list, tuple)):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _environment(base: Mapping[str, str], on_cpu: bool) -> dict[str, str]:
    environment = {
        name: value
        for name, value in base.items()
        if name not in TRAINER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environment["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        path = [str(STAND_IN), *filter(None, [base.get("PYTHONPATH")])]
        environment |= {
            "PYTHONPATH": os.pathsep.join(path),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",  # the server's processes are forked, and an OpenMP pool does not survive a fork
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment
