"""Runs Megatron-Core 0.19.2 without CUDA: every patch of upstream code that the CPU path needs, in one file.

Inert when CUDA is there. Nothing is simulated: the patched calls do on the CPU what they do on a GPU, or are
synchronisation that a CPU has no need of. Upstream guards none of these calls.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

MEGATRON_VERSION = "0.19.2"
_installed = False


def on_gpu() -> bool:
    """Whether this process trains on CUDA. The one question that the CPU and GPU paths branch on."""
    return torch.cuda.is_available()


def install() -> None:
    """Patch Megatron-Core for the CPU, once; does nothing when CUDA is available. Call before any megatron import.

    Raises RuntimeError when another version than the one these patches were read against is installed.
    """
    global _installed
    if on_gpu() or _installed:
        return
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON_VERSION:
        raise RuntimeError(
            f"megatron-core {found} is installed, but policy/cpu.py patches {MEGATRON_VERSION} only: "
            f"install the version that pyproject.toml pins"
        )
    _without_gpu_packages()
    _expected_warnings()
    _without_compiler()
    _cuda_calls_on_cpu()
    _factories_on_cpu()
    _rng_state_on_cpu()
    _uneven_collectives()
    _splits_as_numpy()
    _packed_rope()
    _latent_projections()
    _optimizer_type_names()
    _adamw_state()
    _installed = True


def _without_gpu_packages() -> None:
    """Where TE or Apex are installed and no GPU is visible, Megatron would take their CUDA optimizers and GEMMs."""
    for package in ("transformer_engine", "apex", "amp_C"):
        absent: Any = None  # in sys.modules, None makes an import raise ImportError
        sys.modules.setdefault(package, absent)


def _expected_warnings() -> None:
    """Megatron says at import, six times over, that Transformer Engine and Apex are missing: here they are to be."""
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).* not installed", module="megatron")


def _without_compiler() -> None:
    """`jit_fuser` is torch.compile: off, for it would compile each of Megatron's fused bodies for minutes."""
    torch._dynamo.config.disable = True


class _NoStream:
    """Stands for CUDA streams and events: waiting for the CPU's only stream is a no-op."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *args, **kwargs: self


def _cuda_calls_on_cpu() -> None:
    """Device queries name the CPU; streams, events and synchronisation are no-ops; tensors are where they must be."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda device=None: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = lambda device=None: _NoStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self


def _factories_on_cpu() -> None:
    """Schedules, gradient clipping and checkpointing allocate with a literal `device="cuda"`, some in pinned memory."""
    # `with torch.device(...)`, which transformers loads under, collects the factories that it redirects at its first
    # use: it has to see the originals, or it lets the wrapped ones pass and loaded buffers stay uninitialised.
    torch.utils._device._device_constructors()

    def on_cpu(factory: Callable) -> Callable:
        @functools.wraps(factory)
        def make(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> torch.Tensor:
            return factory(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

        return make

    for name in ("zeros", "ones", "empty", "tensor"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _rng_state_on_cpu() -> None:
    """The RNG tracker forks the CUDA generator for tensor-parallel regions: here it forks the CPU's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _uneven_collectives() -> None:
    """Expert TP gathers and reduce-scatters uneven pieces, which gloo refuses: pad the gather, slice an all-reduce."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return even_gather(input_, group, sizes, use_global_buffer)
        padded = input_.new_zeros((int(max(sizes)), *input_.shape[1:]))
        padded[: len(input_)] = input_
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    def reduce_scatter(
        input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return even_scatter(input_, group, sizes, use_global_buffer)
        summed = input_.clone()
        dist.all_reduce(summed, group=group)
        return summed.split([int(size) for size in sizes])[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def _splits_as_numpy() -> None:
    """The token dispatcher turns split sizes into numpy only while moving them off a GPU; gloo needs that too."""
    from megatron.core.transformer.moe import token_dispatcher

    def host_copy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = host_copy


def _packed_rope() -> None:
    """Unfused RoPE walks over the documents of a packed row one by one; one gather of frequencies does the same."""
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_gspo.policy.packed import packed_positions

    def rotate(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_group: Any, **options: Any
    ) -> torch.Tensor:
        positions = packed_positions(tuple(cu_seqlens.tolist()), cp_group.size(), cp_group.rank())
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], **options).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate


def _latent_projections() -> None:
    """MLA knows a projection to latents that TP ranks hold whole by Transformer Engine's class alone. Its other one is
    cut, and loses the gradients that the heads of other ranks send to the keys' part with the position."""
    from megatron.core.transformer import multi_latent_attention

    from megatron_gspo.policy.local_linear import LocalReplicatedLinear

    module: Any = multi_latent_attention
    module.TELinear = LocalReplicatedLinear


def _optimizer_type_names() -> None:
    """The optimizers sort parameters by strings such as 'torch.cuda.FloatTensor' and refuse the CPU's names."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    def with_cuda_names(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor: Any = torch.Tensor
            real = tensor.type

            def named(self: torch.Tensor, *to: Any, **options: Any) -> Any:
                result = real(self, *to, **options)
                return result if to or options else result.replace("torch.", "torch.cuda.", 1)

            tensor.type = named
            try:
                return fn(*args, **kwargs)
            finally:
                tensor.type = real

        return call

    for cls in (optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        setattr(cls, "__init__", with_cuda_names(cls.__init__))  # noqa: B010  (mypy forbids plain assignment)
    optimizer.clip_grad_by_total_norm_fp32 = with_cuda_names(optimizer.clip_grad_by_total_norm_fp32)


def _adamw_state() -> None:
    """DistributedOptimizer's checkpoints expect TE's FusedAdam; torch's AdamW differs in two ways.

    Its `step` is a tensor per parameter, of which `load_state_dict` makes one tensor shared by all parameters: AdamW
    then adds 1 to it once per parameter. And it has no state before its first step, where saving and loading need one.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    original: Any = {name: getattr(Optimizer, name) for name in ("load_state_dict", "state_dict", "sharded_state_dict")}
    set_states = Optimizer._set_main_param_and_optimizer_states

    def prime(self: Any) -> None:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    moments = {key: torch.zeros_like(param, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[param] = {"step": torch.tensor(0.0), **moments}

    def load_state_dict(self: Any, state_dict: dict) -> None:
        original["load_state_dict"](self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def state_dict(self: Any) -> dict:
        prime(self)
        return original["state_dict"](self)

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> dict:
        prime(self)
        return original["sharded_state_dict"](self, *args, **kwargs)

    @torch.no_grad()
    def set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: dict) -> None:
        set_states(self, model_param, {**tensors, "step": None})

    patched: Any = Optimizer
    patched.load_state_dict, patched.state_dict = load_state_dict, state_dict
    patched.sharded_state_dict = sharded_state_dict
    patched._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states
