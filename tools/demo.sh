#!/usr/bin/env bash
# The main job on one machine: make a tiny MoE, warm-start it (sft), then train it by GSPO against a real SGLang server.
set -euo pipefail
cd "$(dirname "$0")/.."
run=.venv/bin

echo "[demo] 1/3 a random Qwen3-MoE in HF format: runs/demo_policy"
$run/python tools/make_demo_policy.py --out runs/demo_policy
# Folders of an earlier demo are kept, each under the time at which it was moved aside.
for folder in runs/demo_sort_sft runs/demo_sort; do
    if [ -e "$folder" ]; then
        # A run that goes on would write into the folder of the new one.
        [ ! -e "$folder/run.lock" ] || flock --nonblock "$folder/run.lock" true ||
            { echo "[demo] error: a run goes on in $folder; wait for its end or stop it" >&2; exit 1; }
        aside="${folder}_before_$(date +%Y%m%d_%H%M%S)"
        mv "$folder" "$aside"
        echo "[demo] the earlier $folder is now $aside"
    fi
done
echo "[demo] 2/3 warm start by supervised learning: recipes/demo_sort_sft.yaml"
$run/megatron-gspo train recipes/demo_sort_sft.yaml
echo "[demo] 3/3 GSPO: recipes/demo_sort.yaml"
exec $run/megatron-gspo train recipes/demo_sort.yaml
