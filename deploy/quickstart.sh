#!/usr/bin/env bash
# Shows in a few minutes what superoffload does: trains a transformer of 57 million parameters with torch.optim.AdamW and
# with superoffload, kills the daemon in the middle of it, and ends with a picture of both loss curves, a table, and another
# of what it would be on a Superchip.
# Usage: deploy/quickstart.sh [--steps=N]
# It takes the wheel in build/wheels where there is one (deploy/wheel.sh makes it) and builds a release where there is none.
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/.."
venv="$PWD/build/quickstart" picture="$PWD/build/quickstart.svg" log="$PWD/build/quickstart.log"
mkdir -p build/wheels

quietly() { "$@" >"$log" 2>&1 || { tail -n 30 "$log" >&2 && echo "the quick start stops here; all of it: $log" >&2 && exit 1; }; }

wheel="$(find build/wheels -name "superoffload-*_$(uname -m).whl" | sort | tail -n 1)"
if [[ -z "$wheel" ]]; then
  echo "== installing compilers and libraries (Debian packages; a minute where none are there)"
  quietly deploy/install-dependencies.sh
fi
if [[ ! -x "$venv/bin/python" ]] || ! "$venv/bin/python" -c 'import torch, grpc, grpc_tools' 2>/dev/null; then
  echo "== installing PyTorch into build/quickstart (half a minute to two, by the network)"
  quietly python3 -m venv "$venv"
  quietly "$venv/bin/python" -m pip install torch numpy safetensors grpcio protobuf grpcio-tools setuptools wheel
fi
if [[ -n "$wheel" ]]; then
  echo "== installing $wheel"
  quietly "$venv/bin/python" -m pip install --force-reinstall --no-deps "$wheel"
  daemon="$venv/bin/superoffloadd" ctl="$venv/bin/superoffloadctl"
else
  echo "== building a release (about 3 minutes from nothing on 2 cores)"
  quietly cmake -S . -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_TESTS=OFF
  quietly ninja -C build/release superoffloadd superoffload-plan superoffloadctl superoffload_client
  quietly "$venv/bin/python" -m pip install --no-build-isolation --no-deps ./client/python
  daemon="$PWD/build/release/server/superoffloadd" ctl="$PWD/build/release/client/superoffloadctl"
  export SUPEROFFLOAD_LIBRARY="$PWD/build/release/client/libsuperoffload.so.0"
fi

"$venv/bin/python" deploy/quickstart/compare.py "$daemon" "$picture" "$@"
"$venv/bin/python" deploy/quickstart/superchip.py "$ctl"
cat <<NEXT
In your script:    optimizer = superoffload.torch.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
Watch a trainer:   $ctl watch
Install for good:  deploy/wheel.sh; pip install build/wheels/superoffload-*_$(uname -m).whl; superoffloadctl install-service
NEXT
