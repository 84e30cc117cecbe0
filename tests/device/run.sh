#!/usr/bin/env bash
# Everything that needs a GPU, in one command: checks bits, measures speed, prints one table. The daemon's CUDA data plane
# is not built yet; what is there are the GPU kernels. Results with date and machine class go to RESULTS.md.
# Usage: tests/device/run.sh [--bundle DIRECTORY]   DIRECTORY: an unpacked bundle; without one everything is built here
set -euo pipefail
cd "$(dirname "$0")/../.."
programs=build/device/tests/device
if [[ "${1:-}" == --bundle ]]; then
  programs="$2"
else
  cmake -S . -B build/device -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_CUDA=ON >/dev/null
  ninja -C build/device --quiet kernel_check
fi
echo "# $(date -u +%Y-%m-%d), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi')"
status=0
"$programs/kernel_check" || status=$?
if command -v compute-sanitizer >/dev/null && ((status == 0)); then
  for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$programs/kernel_check" --elements 1048576 | tail -3 || status=1
  done
fi
exit "$status"
