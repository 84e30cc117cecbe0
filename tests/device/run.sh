#!/usr/bin/env bash
# Everything that needs a GPU, in one command: checks bits, kills either side, measures, prints one table. Results with date
# and machine class go to RESULTS.md.
# Usage: tests/device/run.sh [--bundle DIRECTORY] [--quick]
#   --bundle  an unpacked bundle; without one everything is built here
#   --quick   no compute-sanitizer, and only the model of 1 billion parameters
set -uo pipefail
cd "$(dirname "$0")/../.."
bundle="" quick=0
while (($#)); do
  case "$1" in
    --bundle) bundle="$(realpath "$2")" && shift ;;
    --quick) quick=1 ;;
    *) sed -n '2,/^set/s/^# //p' "$0" && exit 2 ;;
  esac
  shift
done
if [[ -n "$bundle" ]]; then
  check="$bundle/bin/kernel_check" gpu_test="$bundle/bin/gpu_test" python="${PYTHON:-python3}"
  export SUPEROFFLOAD_DAEMON="$bundle/bin/superoffloadd" SUPEROFFLOAD_LIBRARY="$bundle/lib/libsuperoffload.so.0"
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  export PYTHONPATH="$bundle/python:$bundle/python/$version${PYTHONPATH:+:$PYTHONPATH}"
else
  build=build/device
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_CUDA=ON >/dev/null || exit 1
  ninja -C "$build" --quiet kernel_check gpu_test superoffloadd superoffload_client || exit 1
  check="$build/tests/device/kernel_check" gpu_test="$build/tests/integration/gpu_test"
  python="${PYTHON:-${SUPEROFFLOAD_VENV:-.venv}/bin/python}"
  export SUPEROFFLOAD_DAEMON="$PWD/$build/server/superoffloadd"
  export SUPEROFFLOAD_LIBRARY="$PWD/$build/client/libsuperoffload.so.0"
fi
export PATH="$(dirname "$SUPEROFFLOAD_DAEMON"):$PATH" PYTHONUNBUFFERED=1
status=0
run() {
  echo "== $1"
  timeout "${limit:-300}" "${@:2}" </dev/null || { echo "FAILED ($?): $1" && status=1; }
}

echo "# $(date -u +%Y-%m-%d), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi'), $(nproc) cores"
run "kernels: bits and bandwidth" "$check"
((status)) && exit "$status"  # no GPU, or none that anything could be said about
# PyTorch's wheels bring NCCL along, where no loader looks.
nccl="$("$python" -c 'import importlib.util; print(importlib.util.find_spec("nvidia.nccl").submodule_search_locations[0])' 2>/dev/null)"
[[ -n "$nccl" ]] && export LD_LIBRARY_PATH="$nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# What asks a fake to fail is skipped on a GPU.
run "movers, residents and kills: bits equal the host's" "$gpu_test" --gtest_brief=1
run "PyTorch: bits equal the host's" "$python" tests/device/torch_check.py
run "movers measured" "$python" tests/device/train_bench.py --probe
if command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY="$(mktemp -d)" CUDA_MPS_LOG_DIRECTORY="$(mktemp -d)"
  if nvidia-cuda-mps-control -d 2>/dev/null; then
    run "movers measured, with MPS" "$python" tests/device/train_bench.py --probe
    echo quit | nvidia-cuda-mps-control >/dev/null
  fi
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
models=() && ((quick)) && models=(--parameters 1e9)
limit=480 run "training steps" "$python" tests/device/train_bench.py "${models[@]}"
if ((!quick)) && command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    run "compute-sanitizer $tool: kernels" compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 1 \
      "$check" --elements 1048576
  done
  run "compute-sanitizer memcheck: movers, trainer and daemon" compute-sanitizer --tool memcheck --target-processes all \
    --error-exitcode 1 "$gpu_test" --gtest_brief=1 --gtest_filter='*/DaemonResident:*/Trainer:*/Direct'
fi
exit "$status"
