#!/usr/bin/env bash
# GSPO, GRPO and SAPO from the demo's warm start on the same prompts, then one report on all three: runs/compare/report.
# Words are overrides for each of them: tools/compare.sh run.steps=40
set -euo pipefail
cd "$(dirname "$0")/.."
run=.venv/bin

# What an earlier run left stays, under the time at which it was moved aside.
move_aside() {
    local lock aside
    if [ -e "$1" ]; then
        for lock in "$1"/run.lock "$1"/*/run.lock; do
            # A run that goes on would write into the folder of the new one.
            [ ! -e "$lock" ] || flock --nonblock "$lock" true ||
                { echo "[compare] error: a run goes on in ${lock%/run.lock}; wait for its end or stop it" >&2; exit 1; }
        done
        aside="$1_before_$(date +%Y%m%d_%H%M%S)"
        mv "$1" "$aside"
        echo "[compare] the earlier $1 is now $aside"
    fi
}

if [ ! -e runs/demo_sort_sft/hf/config.json ]; then
    echo "[compare] the demo's warm start: recipes/demo_sort_sft.yaml"
    $run/python tools/make_demo_policy.py --out runs/demo_policy
    move_aside runs/demo_sort_sft
    $run/megatron-gspo train recipes/demo_sort_sft.yaml
fi
move_aside runs/compare
for objective in gspo grpo sapo; do
    echo "[compare] $objective: recipes/compare/$objective.yaml"
    $run/megatron-gspo train "recipes/compare/$objective.yaml" "$@"
done
exec $run/megatron-gspo report runs/compare/{gspo,grpo,sapo} --out runs/compare/report
