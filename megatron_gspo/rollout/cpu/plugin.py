"""SGLang plugin (entry point group `sglang.srt.plugins`) for servers on CPU. Every SGLang of this venv loads it.

Inert unless SGLANG_USE_CPU_ENGINE=1, and imports nothing heavy before that is known. It changes three things of SGLang
0.5.23:
- the torch_native attention backend loops over sequences in Python; `attention.py` batches that loop, which more than
  doubles the tokens per second of small models;
- the server's processes are spawned, and each imports SGLang anew, 9 CPU-seconds three times; CUDA needs that, a CPU
  does not: they are forked;
- `--enable-return-routed-experts` pins its host buffer with cudaHostRegister, which a machine without CUDA does not
  have.
"""

from __future__ import annotations

import multiprocessing
import os
from importlib.metadata import version

SGLANG_VERSION = "0.5.23"


def check_version() -> None:
    """Raises RuntimeError on another SGLang version, whose internals may differ."""
    found = version("sglang")
    if found != SGLANG_VERSION:
        raise RuntimeError(
            f"on CPU, megatron_gspo hooks into sglang {SGLANG_VERSION} and found {found}: install "
            f"sglang=={SGLANG_VERSION}, or check rollout/cpu/ against the new version and change SGLANG_VERSION"
        )


def register() -> None:
    """Register the hooks in this SGLang process."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return
    check_version()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from megatron_gspo.rollout.cpu import attention

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}._run_sdpa_forward_decode", attention.decode, HookType.AROUND)
    HookRegistry.register(f"{backend}._run_sdpa_forward_extend", attention.extend, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda *_args, **_kwargs: None, HookType.REPLACE
    )
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)


def _fork(_result: None, *_args: object, **_kwargs: object) -> None:
    multiprocessing.set_start_method("fork", force=True)
