"""What training writes becomes the HF checkpoint that training itself would have exported, optimizer state left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_gspo.config.schema import LayoutConfig
from megatron_gspo.convert.dcp_read import MegatronCheckpoint
from megatron_gspo.convert.to_hf import megatron_to_hf
from megatron_gspo.policy.checkpoint import save_model
from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.model import build_model, ddp_config, wrap
from megatron_gspo.policy.optimizer import build_optimizer
from megatron_gspo.policy.step import Stepper
from megatron_gspo.weights.bind import bind
from megatron_gspo.weights.export import plan_export
from megatron_gspo.weights.save import save_hf
from tests.convert.folders import differences, tensors
from tests.policy import tiny
from tests.ranks import run_ranks
from tests.weights.models import write_checkpoint


def train(root: Path, layout_config: LayoutConfig, distributed: bool) -> None:
    """One step, then a checkpoint and an export."""
    recipe = tiny.recipe(distributed=distributed)
    recipe = replace(recipe, policy=replace(recipe.policy, layout=layout_config))
    layout = init_layout(layout_config)
    model = build_model(tiny.hf_config(), recipe.policy, layout)
    tiny.fill(model.chunks, layout)
    export = plan_export(bind(model.chunks, model.hf_config, layout.pgs))
    chunks = wrap(model, ddp_config(recipe.policy), layout)
    optimizer, scheduler = build_optimizer(recipe, chunks, layout)
    stepper = Stepper(model, chunks, layout, temperature=1.0)
    stepper.forward_backward(
        tiny.micro_batches(layout), lambda batch, number, logp, entropy: (-logp.mean(), {}), sum(tiny.LENS)
    )
    optimizer.step()
    scheduler.step(1)
    save_model(root / "megatron", chunks, optimizer, scheduler, layout)
    save_hf(root / "export", export, root / "source")
    dist.barrier()


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("layout", [LayoutConfig(tp=2, ep=2), LayoutConfig(pp=2, vpp=2)])
def test_a_training_checkpoint_is_its_export(tmp_path: Path, layout: LayoutConfig, distributed: bool):
    (tmp_path / "megatron").mkdir()
    config = tiny.hf_config()
    write_checkpoint(tmp_path / "source", moe=True, **{k: v for k, v in config.items() if k != "model_type"})
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    run_ranks(2, train, tmp_path, layout, distributed)
    with MegatronCheckpoint(tmp_path / "megatron") as checkpoint:
        assert any("optimizer" in key for key in checkpoint.tensors)
    run_ranks(1, to_hf, tmp_path)
    assert differences(tensors(tmp_path / "export"), tensors(tmp_path / "back")) == []
    assert differences(tensors(tmp_path / "source"), tensors(tmp_path / "back")) != []


def to_hf(root: Path) -> int:
    return megatron_to_hf(root / "megatron", root / "back", hf=root / "source")
