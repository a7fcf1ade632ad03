"""HF <-> Megatron conversion of a random Qwen3-MoE in bf16, against copying the same bytes on the same disk.

    python bench/convert.py [--gb 5] [--rounds 3] [--dir .] [--ranks 1]

Each round copies the HF checkpoint (`shutil.copyfile`, which lets the kernel copy), converts it to Megatron, copies
again and converts back. Everything is written to a folder that is new, and synced file by file, on both sides; before
each step what was read or written goes out of the page cache (POSIX_FADV_DONTNEED), so that both sides read the disk.
Conversions run in a process of their own; its start (imports, about 5 s) is not counted, its peak memory is. What comes
back must be the checkpoint that went in, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from megatron_gspo.weights.claims import claims_of
from megatron_gspo.weights.families import family_for
from megatron_gspo.weights.safetensors_file import SafetensorsFile, SafetensorsWriter, Spec
from megatron_gspo.weights.source import INDEX

HIDDEN, FFN, EXPERTS, VOCAB = 2048, 768, 128, 32768
CHILD = """
import json, resource, sys, time
from pathlib import Path
from megatron_gspo.convert.command import run

def work():
    from megatron_gspo.convert.to_hf import megatron_to_hf
    from megatron_gspo.convert.to_megatron import hf_to_megatron
    import torch.distributed as dist
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    {"to_megatron": hf_to_megatron, "to_hf": megatron_to_hf}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"seconds": seconds, "peak_gb": peak * 1024 / 1e9, "imports_gb": before * 1024 / 1e9}))
    return 0

sys.exit(run(work))
"""


def config(layers: int) -> dict:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "moe_intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def config_of(size_gb: float) -> dict:
    """As many layers as make about `size_gb`."""
    layer_gb = 2 * (3 * EXPERTS * HIDDEN * FFN + 2 * 36 * 128 * HIDDEN) / 1e9
    return config(max(1, round((size_gb - 4 * VOCAB * HIDDEN / 1e9) / layer_gb)))


def make_model(folder: Path, hf_config: dict) -> int:
    """A checkpoint of random numbers in shards of 1 GB; returns its bytes."""
    specs = [
        Spec(tensor.name, torch.bfloat16, tensor.shape)
        for claim in claims_of(family_for(hf_config).rules(hf_config))
        for tensor in claim.hf
    ]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(max(spec.size_bytes for spec in specs) // 2 + 1000, generator=generator)
    numbers, shards, filled = (0.02 * numbers).bfloat16(), [[]], 0
    for spec in specs:
        if filled + spec.size_bytes > 1e9:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.size_bytes
    folder.mkdir()
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with SafetensorsWriter(folder / name, shard) as writer:
            for place, spec in enumerate(shard):
                first = (number * 1009 + place) % 1000  # no two tensors of a shape are alike
                writer.write(spec.name, numbers[first : first + spec.size_bytes // 2].view(spec.shape))
                weight_map[spec.name] = name
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(hf_config))
    return sum(spec.size_bytes for spec in specs)


def forget(folder: Path) -> None:
    """Takes a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy a folder, synced."""
    start = time.perf_counter()
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def convert(way: str, source: Path, target: Path, ranks: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(CHILD)
        script.flush()
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launch, script.name, way, str(source), str(target)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors, byte for byte."""
    mine, theirs = (
        {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in SafetensorsFile(path).tensors.items()}
        for folder in (one, other)
    )
    if mine.keys() != theirs.keys():
        return False
    for name, tensor in mine.items():
        a, b = (torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(2))
        tensor.read_into((), a)
        theirs[name].read_into((), b)
        if not torch.equal(a, b):
            return False
    return True


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gb", type=float, default=5.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--dir", type=Path, default=Path())
    args = options.parse_args()
    free = shutil.disk_usage(args.dir).free / 1e9
    if free < 4 * args.gb:
        sys.exit(f"{args.dir.resolve()} has {free:.0f} GB free; the bench needs {4 * args.gb:.0f}")
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        hf, megatron, back, copied = (Path(folder) / name for name in ("hf", "megatron", "back", "copied"))
        size = make_model(hf, config_of(args.gb)) / 1e9
        print(f"{size:.2f} GB, {args.ranks} rank(s), load {os.getloadavg()[0]:.1f}")
        print(
            f"{'round':>5} {'way':>12} {'copy GB/s':>10} {'convert GB/s':>13} {'ratio':>6} {'peak GB':>8} {'load':>5}"
        )
        ratios: dict[str, list[float]] = {"to_megatron": [], "to_hf": []}
        for number in range(args.rounds):
            for way, source, target in (("to_megatron", hf, megatron), ("to_hf", megatron, back)):
                for path in (hf, megatron):
                    if path.exists():
                        forget(path)
                copy_s = copy(hf, copied)
                shutil.rmtree(copied)
                forget(hf)
                found = convert(way, source, target, args.ranks)
                ratios[way].append(copy_s / found["seconds"])
                rates = f"{size / copy_s:>10.2f} {size / found['seconds']:>13.2f} {ratios[way][-1]:>6.2f}"
                print(f"{number:>5} {way:>12} {rates} {found['peak_gb']:>8.2f} {os.getloadavg()[0]:>5.1f}", flush=True)
            if number == 0:
                print("what came back is what went in:", same(hf, back))
            shutil.rmtree(megatron)
            shutil.rmtree(back)
        for way, found in ratios.items():
            print(f"{way}: median ratio {statistics.median(found):.2f} (aim 0.7)")


if __name__ == "__main__":
    main()
