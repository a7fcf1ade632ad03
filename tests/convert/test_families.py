"""Every family crosses: HF to Megatron, loaded by Megatron on two ranks, and back with every tensor as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gspo.config.schema import Dtype, LayoutConfig
from megatron_gspo.convert.to_hf import megatron_to_hf
from megatron_gspo.convert.to_megatron import hf_to_megatron
from tests.convert.folders import differences, load_by_megatron, tensors
from tests.ranks import run_ranks
from tests.weights.families.test_deepseek_v3 import models as deepseek_v3
from tests.weights.families.test_glm4_moe import models as glm4_moe
from tests.weights.families.test_gpt_oss import models as gpt_oss
from tests.weights.families.test_llama import models as llama
from tests.weights.families.test_mixtral import models as mixtral
from tests.weights.families.test_olmoe import models as olmoe
from tests.weights.families.test_qwen2 import models as qwen2
from tests.weights.families.test_qwen2_moe import models as qwen2_moe
from tests.weights.families.test_qwen3 import models as qwen3
from tests.weights.parity import file_tensors

FIXTURES = (deepseek_v3, glm4_moe, gpt_oss, llama, mixtral, olmoe, qwen2, qwen2_moe, qwen3)
FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "llama", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3")


def there_and_back(root: Path, folders: dict[str, Path]) -> None:
    for name, hf in folders.items():
        hf_to_megatron(hf, root / "megatron" / name)
        megatron_to_hf(root / "megatron" / name, root / "back" / name)


def load_each(root: Path, folders: dict[str, Path]) -> dict[str, tuple[int, list[str]]]:
    layout = LayoutConfig(tp=2)
    return {name: load_by_megatron(hf, root / "megatron" / name, layout, Dtype.fp32) for name, hf in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_checkpoint_of_a_family(family: str, request, tmp_path: Path):
    folders = {name: directory for name, (directory, _) in request.getfixturevalue(family).items()}
    run_ranks(1, there_and_back, tmp_path, folders)
    for results in run_ranks(2, load_each, tmp_path, folders):
        assert all(count and not different for count, different in results.values()), results
    for name, hf in folders.items():
        wanted, found = file_tensors(hf), tensors(tmp_path / "back" / name)
        if name == "mxfp4":  # decoded into bf16, which holds every value; the helper decodes into fp32
            wanted = {key: value.to(found[key].dtype) for key, value in wanted.items()}
        assert differences(wanted, found) == [], name
