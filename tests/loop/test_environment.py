import pytest

from megatron_gspo.loop.environment import read_environment

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_nobody_started_us():
    assert read_environment({}) is None


def test_srun_with_one_task_is_nobody():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_torchrun():
    place = read_environment({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MASTER})
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.master_port) == (3, 8, 1, 29500)


def test_a_batch_script_is_no_rank():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


def test_srun():
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_RESTART_COUNT": "2",
        **MASTER,
    }
    place = read_environment(variables)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank) == (5, 16, 1)


def test_torchrun_wins_inside_an_allocation():
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "7", "SLURM_NTASKS": "9", **MASTER}
    place = read_environment(variables)
    assert place is not None and place.world_size == 2


def test_the_number_of_nodes():
    variables = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER}
    place = read_environment(variables)
    assert place is not None and place.num_nodes == 4
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "16",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "8",
        **MASTER,
    }
    place = read_environment(variables)
    assert place is not None and place.num_nodes == 8


def test_a_missing_address_is_named():
    with pytest.raises(ValueError, match=r"LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not set although RANK is"):
        read_environment({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_malformed_number_is_named():
    with pytest.raises(ValueError, match=r"MASTER_PORT is '29x'"):
        read_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "29x"})
