"""The one reader of environment variables: which rank this process is, as torchrun, srun or our own launcher say it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_gspo.config import Problem, RecipeError


@dataclass(frozen=True, kw_only=True)
class Environment:
    """This process's place in the world of trainer ranks."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    num_nodes: int = 1


def _integer(variables: Mapping[str, str], name: str) -> int:
    value = variables[name]
    if not value.isdigit():
        raise _refused(f"{name} is {value!r}; expected a non-negative integer")
    return int(value)


def _refused(reason: str) -> RecipeError:
    return RecipeError([Problem(key="environment variables", reason=reason)], {})


def _num_nodes(variables: Mapping[str, str]) -> int:
    if "LOCAL_WORLD_SIZE" in variables:
        return -(-_integer(variables, "WORLD_SIZE") // max(1, _integer(variables, "LOCAL_WORLD_SIZE")))
    return _integer(variables, "SLURM_NNODES") if "SLURM_NNODES" in variables else 1


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment | None:
    """The rank that torchrun (RANK, WORLD_SIZE, ...) or srun (SLURM_PROCID, SLURM_NTASKS, ...) gave this process.

    None when neither did, or when srun started a single task: `train` then starts local workers itself.
    Raises RecipeError for a malformed or missing variable.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
    elif "SLURM_STEP_ID" in variables and "SLURM_NTASKS" in variables and _integer(variables, "SLURM_NTASKS") > 1:
        names = {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"}
    else:
        return None
    missing = [name for name in (*names.values(), "MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise _refused(
            f"{', '.join(missing)} are not set although {names['rank']} is; torchrun sets them, and under srun the job "
            "script has to export MASTER_ADDR and MASTER_PORT"
        )
    return Environment(
        **{field: _integer(variables, name) for field, name in names.items()},
        master_addr=variables["MASTER_ADDR"],
        master_port=_integer(variables, "MASTER_PORT"),
        num_nodes=_num_nodes(variables),
    )
