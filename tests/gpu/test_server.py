"""A managed SGLang server on the GPU, updated by one trainer rank on the same GPU.

By itself NCCL refuses a group with two ranks on one device; NCCL_MULTI_RANK_GPU_ENABLE, which both sides get here,
lifts that. Real runs give servers devices of their own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gspo.config import Dtype, ServerConfig
from megatron_gspo.loop.probe import score_probe
from megatron_gspo.rollout.control import Servers
from megatron_gspo.rollout.probe import check_probe, server_logprobs
from megatron_gspo.rollout.server import ManagedServer
from megatron_gspo.rollout.sync import WeightSync
from megatron_gspo.rollout.transport import DiskTransport, DistributedTransport
from megatron_gspo.weights.export import buckets, gather
from megatron_gspo.weights.save import save_hf
from tests.gpu.policy import ALL_EXPERTS, build_policy
from tests.gpu.process import GPU, in_process, one_rank
from tests.weights.models import write_checkpoint

pytestmark = pytest.mark.gpu

# bf16 in both engines: each is within 0.035 of fp32 (tests/gpu/test_parity.py), so they are within twice that.
TOLERANCE = 0.07
# SGLang 0.5.23 builds every layer of a Qwen3-MoE with experts, whatever mlp_only_layers says.
SHAPE = ALL_EXPERTS | {"mlp_only_layers": []}
SHARED_DEVICE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
TOKENS = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Path]:
    """Two checkpoints of one architecture."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    model = write_checkpoint(old, **SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
    model.save_pretrained(new)
    return {"old": old, "new": new}


@pytest.fixture(scope="module")
def server(policies, tmp_path_factory) -> Iterator[ManagedServer]:
    """Serves the old policy in bf16, in a fifth of the device's memory."""
    if importlib.util.find_spec("sgl_kernel") is None:
        pytest.skip("SGLang's CUDA kernels (sglang-kernel) are not installed; see docs/gpu.md")
    config = ServerConfig(args={"dtype": "bfloat16", "mem_fraction_static": 0.2})
    log = tmp_path_factory.mktemp("server") / "server.log"
    with mock.patch.dict(os.environ, SHARED_DEVICE):
        server = ManagedServer(policies["old"], config, log_path=log, on_cpu=False, context_length=256)
    with server:
        server.wait_healthy()
        yield server


def update(policy: Path, url: str, way: str, version: int, directory: Path) -> Tensor:
    """Push `policy` from one trainer rank into the server; returns the trainer's own log-probabilities of TOKENS."""
    with one_rank() as device:
        control = dist.new_group(backend="gloo")
        assert isinstance(control, dist.ProcessGroup)
        stepper, plan, layout = build_policy(policy, Dtype.bf16)
        servers = Servers([url], timeout_s=60.0)
        transport: DistributedTransport | DiskTransport
        if way == "disk":
            transport = DiskTransport(
                servers, lambda path: save_hf(path, plan, policy), directory=directory, group=control
            )
        else:
            transport = DistributedTransport(
                servers,
                buckets(plan, 1 << 18),
                gather,
                expected={tensor.name: tensor.shape for tensor in plan.tensors},
                backend="nccl",
                group=control,
            )
        sync = WeightSync(servers, transport, control)
        sync.connect()
        sync.update(version)
        return score_probe(stepper, TOKENS, layout, device)


@pytest.mark.parametrize(("version", "way", "policy"), [(1, "disk", "new"), (2, "nccl", "old")])
def test_after_an_update_the_server_scores_like_the_trainer(version, way, policy, server, policies, tmp_path):
    before = server_logprobs(server.url, TOKENS.tolist(), timeout_s=60.0)
    ours = in_process(
        update, policies[policy], server.url, way, version, tmp_path / "shared", environment=GPU | SHARED_DEVICE
    )
    assert (before - ours).abs().max() > 10 * TOLERANCE, "the server was to hold other weights"
    after = server_logprobs(server.url, TOKENS.tolist(), timeout_s=60.0)
    worst = check_probe(ours, after, tolerance=TOLERANCE, version=version, url=server.url)
    print(f"{way}: largest difference {worst:.1e}")
    assert Servers([server.url], timeout_s=60.0).versions() == [version]
