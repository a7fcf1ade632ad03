#!/usr/bin/env bash
# Makes .venv with everything that pyproject.toml pins: trainer, SGLang for CPU, development tools.
# Safe to run twice: it does nothing while pyproject.toml and this script are unchanged since the last whole set-up.
#   PYTHON=/path/to/python3.12 tools/setup_venv.sh    names the interpreter when none is found
set -euo pipefail
cd "$(dirname "$0")/.."

readonly NEED_DISK_GB=9 NEED_MEMORY_GB=6 VENV=.venv
say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

is_312() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
        /usr/local/bin/python3.12 /opt/*/bin/python3.12 "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12 \
        "$HOME"/*conda*/envs/*/bin/python3.12; do
        if is_312 "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    die "no Python 3.12 with venv found (tried PATH, pyenv, uv, conda, /opt). Install one, e.g.
        'apt-get install python3.12 python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12',
        then run again, or name it: PYTHON=/path/to/python3.12 make ..."
}

fingerprint() { cat pyproject.toml tools/setup_venv.sh | sha256sum | cut -d' ' -f1; }

[ -z "${PYTHON:-}" ] || is_312 "$PYTHON" ||
    die "PYTHON=$PYTHON is no Python 3.12 with venv: $("$PYTHON" -V 2>&1 | tail -n 1)
        Name another one, or leave PYTHON unset to have one looked for."
if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.complete" 2>/dev/null)" = "$(fingerprint)" ]; then
    say "$VENV is up to date"
    exit 0
fi

python=$(find_python)
disk_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
memory_gb=$(awk '/^MemTotal/ { print int($2 / 1048576) }' /proc/meminfo)
[ -d "$VENV" ] || [ "$disk_gb" -ge $NEED_DISK_GB ] ||
    die "$disk_gb GB free on the disk of $(pwd); the packages need $NEED_DISK_GB GB. Free some or clone elsewhere."
[ "$memory_gb" -ge $NEED_MEMORY_GB ] ||
    die "$memory_gb GB of memory; two trainer ranks and a server need $NEED_MEMORY_GB GB."

say "Python: $python ($("$python" -V))"
[ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
rm -f "$VENV/.complete"
pip() { "$VENV/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-input; }
say "installing packages, about 6.5 GB in all (3 to 5 minutes) ..."
pip install 'pip==26.3'
say "  1/3 trainer, SGLang's requirements, development tools"
# setuptools has a page to say about editable installs, of which nothing concerns this one.
PYTHONWARNINGS='ignore:Editable installation' pip install -e '.[tasks]' --group sglang-cpu --group dev
say "  2/3 SGLang itself, and what else must not choose its own torch"
pip install --no-deps --group sglang-no-deps --group dev-no-deps
say "  3/3 check that they import"
"$VENV/bin/python" -c 'import torch, megatron.core, transformers, sglang, omegaconf' 2>/dev/null ||
    die "the packages are installed but do not import; see: $VENV/bin/python -c 'import torch, megatron.core, sglang'"
fingerprint >"$VENV/.complete"
say "done: $VENV"
