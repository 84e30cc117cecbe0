#!/usr/bin/env bash
# From a clone to a fine-tuned model: installs what is missing, builds a release, starts a daemon, trains a small Llama
# with superoffload and with torch.optim.AdamW, and compares. Arguments go to client/examples/finetune_llama.py.
set -euo pipefail
cd "$(dirname "$0")/.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"

deploy/install-dependencies.sh --python
"$venv/bin/python" -c 'import matplotlib, tqdm' 2>/dev/null || "$venv/bin/pip" install -q matplotlib tqdm
echo "== building a release (about 3 minutes from nothing on 2 cores)"
cmake -S . -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_TESTS=OFF >/dev/null
ninja -C build/release --quiet

runtime="$(mktemp -d)"
build/release/server/superoffloadd --runtime_directory="$runtime" --metrics_address=127.0.0.1:0 &
daemon=$!
trap 'kill "$daemon" 2>/dev/null; wait "$daemon" || true; rm -rf "$runtime"' EXIT
for _ in $(seq 100); do [[ -S "$runtime/control.sock" ]] && break; sleep 0.1; done

export SUPEROFFLOAD_LIBRARY="$PWD/build/release/client/libsuperoffload.so.0"
"$venv/bin/python" client/examples/finetune_llama.py --endpoint "unix:$runtime/control.sock" "$@"
cat <<NEXT

Look further:
  build/release/server/superoffloadd                       # a daemon that stays
  SUPEROFFLOAD_LIBRARY=$SUPEROFFLOAD_LIBRARY \\
    $venv/bin/python client/examples/finetune_llama.py --endpoint unix:/run/superoffloadd/control.sock
  build/release/client/superoffloadctl watch               # its steps, live; also info, list, describe NAME
  curl -s 127.0.0.1:9470/metrics                           # its metrics
NEXT
