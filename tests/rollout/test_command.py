import os
from pathlib import Path

import pytest

from megatron_gspo.config.schema import ServerConfig
from megatron_gspo.rollout.command import launch_command


def command(on_cpu=True, environment=None, **config):
    return launch_command(
        "/models/policy",
        ServerConfig(**config),
        host="127.0.0.1",
        port=4000,
        on_cpu=on_cpu,
        context_length=64,
        environment=environment or {},
    )


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_what_the_run_derives_is_on_the_command_line():
    argv, _ = command(on_cpu=False, tp=4)
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    assert value(argv, "--model-path") == "/models/policy"
    assert (value(argv, "--port"), value(argv, "--tp-size"), value(argv, "--context-length")) == ("4000", "4", "64")
    assert value(argv, "--device") == "cuda"
    assert value(argv, "--weight-version") == "0"


def test_a_gpu_server_keeps_sglangs_own_choices():
    argv, environment = command(on_cpu=False, environment={"PYTHONPATH": "/mine"})
    assert not {"--dtype", "--attention-backend", "--max-total-tokens"} & set(argv)
    assert environment == {"PYTHONPATH": "/mine", "HF_HUB_OFFLINE": "1"}


def test_a_cpu_server_computes_in_float32_and_finds_the_stand_in_first():
    argv, environment = command(environment={"PYTHONPATH": "/mine"})
    assert value(argv, "--dtype") == "float32"
    assert value(argv, "--attention-backend") == "torch_native"
    assert int(value(argv, "--max-total-tokens")) == 512 * 64
    first, second = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sgl_kernel" / "__init__.py").is_file()
    assert second == "/mine"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_the_launch_of_the_trainer_does_not_reach_the_server():
    # torch's rendezvous in the server would wait for torchrun's agent, and every server would be "rank 3 of 8"
    launch = {"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "HOME": "/h"}
    _, environment = command(on_cpu=False, environment=launch)
    assert environment == {"HOME": "/h", "HF_HUB_OFFLINE": "1"}


def test_args_add_and_override_flags():
    args = {
        "mem_fraction_static": 0.8,
        "enable-return-routed-experts": True,
        "dtype": "bfloat16",
        "sleep_on_idle": False,
        "lora_paths": ["a", "b"],
        "model_loader_extra_config": {"threads": 2},
    }
    argv, _ = command(args=args)
    assert value(argv, "--mem-fraction-static") == "0.8"
    assert "--enable-return-routed-experts" in argv
    assert argv.count("--dtype") == 1 and value(argv, "--dtype") == "bfloat16"
    assert "--sleep-on-idle" not in argv
    at = argv.index("--lora-paths")
    assert argv[at + 1 : at + 3] == ["a", "b"]
    assert value(argv, "--model-loader-extra-config") == '{"threads": 2}'


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"port": 1}, r"rollout.server.args.port=1: this flag follows from rollout.server.port"),
        ({"tensor-parallel-size": 2}, r"args.tensor_parallel_size=2: this flag follows from rollout.server.tp"),
        ({"dp_size": 2}, r"args.dp_size=2: .*start several servers"),
        ({"enable_metrics": False}, r"args.enable_metrics=False: no such default"),
        ({"mem_fraction_static": None}, r"args.mem_fraction_static=None: .*give a value"),
    ],
)
def test_flags_that_cannot_hold_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        command(args=args)
