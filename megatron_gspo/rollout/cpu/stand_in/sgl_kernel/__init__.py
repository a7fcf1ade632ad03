"""Stand-in for the CPU build of SGLang's `sgl_kernel`, first on PYTHONPATH of a server that runs on CPU.

PyPI's `sglang-kernel` is CUDA-only and the CPU build exists as source for AMX machines. Without AMX, SGLang runs
every layer on its own torch fallbacks; its modules only import these names (for speculative decoding and KV moves)
and never call them.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0+megatron_gspo.stand_in"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # Only the `_cpu` entry points: SGLang probes for others with `except ImportError`, and must see that they are
    # absent.
    if not name.endswith("_cpu"):
        raise AttributeError(f"the CPU stand-in for sgl_kernel has no attribute {name!r}")

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not in the CPU stand-in: this SGLang feature needs its AMX build"
        )

    return missing
