#!/bin/bash
# Starts the OPT service, as the container of the tutorial does: its config and checkpoint are mounted folders.
#   CONFIG_DIR=. CHECKPOINT_DIR=path/to/checkpoint ./server.sh [more options of `colossalai serve`]
set -euo pipefail

export CONFIG_DIR="${CONFIG_DIR:-/config}"
export CHECKPOINT_DIR="${CHECKPOINT_DIR:-/model_checkpoint}"
PORT="${PORT:-8020}"

if ! command -v colossalai > /dev/null; then
    echo "server.sh: the command colossalai is not on PATH: pip install colossalai[serve], or activate its environment" >&2
    exit 127
fi

echo "server.sh: --no-auth --host 0.0.0.0: whoever reaches port ${PORT} of this machine may ask, without a key." >&2
echo "server.sh: within a container that is what its published ports reach. Elsewhere give --api-key-file" >&2
echo "server.sh: to \`colossalai serve\` in the place of --no-auth." >&2

exec colossalai serve --config "${CONFIG_DIR}/opt_config.py" --no-auth --host 0.0.0.0 --port "${PORT}" "$@"
