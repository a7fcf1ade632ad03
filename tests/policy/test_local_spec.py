"""Checkpoints that a CPU writes have the names that Transformer Engine's spec gives norms on a GPU."""

from __future__ import annotations

import pytest
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megatron_gspo.policy.layout import init_layout
from megatron_gspo.policy.model import build_model
from tests.policy import tiny
from tests.ranks import run_ranks

LATENT = dict(
    model_type="deepseek_v3",
    first_k_dense_replace=1,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)


def stored(changes: dict) -> set[str]:
    layout = init_layout(tiny.policy().layout)
    model = build_model(tiny.hf_config(**changes), tiny.policy(), layout)
    state = model.chunks[0].sharded_state_dict(metadata={"dp_cp_group": layout.pgs.dp_cp})
    return {item.key for item in nested_values(state)}


# Dense layers fuse the norm before their MLP, layers with experts have it beside. Grouped-query attention fuses the
# norm before it, latent attention those of its latents. From megatron/core/models/gpt/gpt_layer_specs.py, 0.19.2.
CASES = {
    "grouped": (
        {"mlp_only_layers": [0]},
        {"self_attention.linear_qkv.layer_norm_weight"},
        {"input_layernorm.weight"},
    ),
    "latent": (
        LATENT,
        {
            "input_layernorm.weight",
            "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
        },
        {"self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight"},
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_norms_are_stored_as_transformer_engine_stores_them(kind: str):
    changes, present, absent = CASES[kind]
    (names,) = run_ranks(1, stored, changes)
    dense, sparse = ({n.removeprefix(f"decoder.layers.{i}.") for n in names} for i in (0, 1))
    assert present <= dense & sparse and not absent & (dense | sparse)
    fused, own = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    assert fused in dense and own not in dense
    assert own in sparse and fused not in sparse
