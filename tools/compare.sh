#!/usr/bin/env bash
# GSPO, GRPO and SAPO from the demo's warm start on the same prompts, then one report on all three: runs/compare/report.
# Words are overrides for each of them: tools/compare.sh run.steps=40
set -euo pipefail
cd "$(dirname "$0")/.."
run=.venv/bin

if [[ ! -e runs/demo_sort_sft/hf/config.json ]]; then
    $run/python tools/make_demo_policy.py --out runs/demo_policy
    rm -rf runs/demo_sort_sft # of a warm start that was stopped
    $run/megatron-gspo train recipes/demo_sort_sft.yaml
fi
rm -rf runs/compare # of an earlier comparison
for objective in gspo grpo sapo; do
    echo "[compare] $objective: recipes/compare/$objective.yaml"
    $run/megatron-gspo train "recipes/compare/$objective.yaml" "$@"
done
exec $run/megatron-gspo report runs/compare/{gspo,grpo,sapo} --out runs/compare/report
