#!/usr/bin/env bash
# What needs a GPU, in steps that each fit into a few minutes. Dated tables go to RESULTS.md.
# Usage: tests/device/run.sh SUBCOMMAND... --output FOLDER [--bundle ARCHIVE | --build FOLDER] [--budget SECONDS]
#        [--only PATTERN] [--dry-run]
#   smoke     3 minutes: the GPU's attributes, the machine, and three steps under each mover. First of all
#   bits      8 minutes: kernels, movers, residents, PyTorch, two ranks of it, and JAX against the host, bit for bit; captured
#             and averaged models, and nearly full memory, against loops that wait
#   bench     9 minutes: a billion parameters at 32 k tokens per step against no optimizer and against peers; a trace
#   kills     5 minutes: trainers and daemons killed under each mover, bits compared
#   sanitize  4 minutes: compute-sanitizer on the kernels and the movers
#   largest   3 minutes: the largest model that trains here
#   --output   gets NAME.log, NAME.json and NAME.txt of each
#   --bundle   an archive of bundle.sh, or the folder that it was unpacked into, unless this is in one; its checks run. Without
#              one everything is built here. An archive is unpacked once, below $TMPDIR
#   --build    a build that is there already; nothing is built
#   --budget   other than the above, for each subcommand; its steps get more or less in proportion
#   --only     a regular expression: only steps whose titles it finds, as in the lines that are printed
#   --dry-run  without a GPU: a fake driver and tiny sizes; needs --bundle or --build
# $PYTHON is the Python that has PyTorch: unless told python3 with a bundle, and .venv's without. A step that fails, hangs or
# finds other bits is reported and the rest goes on; the exit status is 0 when all passed.
set -uo pipefail
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
root="$(cd "$(dirname "$0")/../.." && pwd)"
bundle="" build="" words=()
while (($#)); do
  case "$1" in
    --bundle) bundle="$(realpath -- "${2:?--bundle ARCHIVE}")" && shift ;;
    --build) build="$(realpath -- "${2:?--build FOLDER}")" && shift ;;
    --output) words+=(--output "$(realpath -m -- "${2:?--output FOLDER}")") && shift ;;
    --dry-run) export SUPEROFFLOAD_DEVICE_DRY_RUN=1 ;;
    -h | --help) usage && exit ;;
    *) words+=("$1") ;;
  esac
  shift
done
((${#words[@]})) || { usage && exit 2; }
unpack() {  # prints the folder, which is named for what is in the archive
  local folder
  folder="${TMPDIR:-/tmp}/superoffload-device-$(id -u)-$(sha256sum "$1" | cut -c 1-16)"
  if [[ ! -O "$folder/complete" ]]; then
    rm -rf "$folder" && mkdir -m 700 "$folder" && tar -C "$folder" -xzf "$1" && touch "$folder/complete" || return
  fi
  echo "$folder"
}
if [[ -n "$bundle" ]]; then
  [[ -d "$bundle" ]] || bundle="$(unpack "$bundle")" || exit 1
  [[ -e "$bundle/bin/kernel_check" ]] || { echo "$bundle is no bundle: tests/device/bundle.sh makes one" >&2 && exit 1; }
  exec "$bundle/tests/device/run.sh" "${words[@]}"  # checks and programs of one commit
fi
[[ -e "$root/bin/kernel_check" ]] && bundle="$root"  # this is part of one
cd "$root" || exit 1
if [[ -n "$bundle" ]]; then
  python="${PYTHON:-python3}"
  check="$bundle/bin/kernel_check" gpu_test="$bundle/bin/gpu_test" pack="$bundle/lib/libpack_alone.so"
  export SUPEROFFLOAD_DAEMON="$bundle/bin/superoffloadd" SUPEROFFLOAD_LIBRARY="$bundle/lib/libsuperoffload.so.0"
  export PYTHONPATH="$bundle/python${PYTHONPATH:+:$PYTHONPATH}"
  export SUPEROFFLOAD_BUILD="$bundle"  # where dry runs find the fake driver
  PYTHONPATH="$PYTHONPATH:$bundle/dry"
  made_for="$(cat "$bundle/python/VERSION")"
  found="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || exit 1
  [[ "$found" == "$made_for" ]] ||
    echo "The bundle's wheels are for Python $made_for and $python is $found: PyTorch's steps will fail. Set PYTHON, or make a bundle with --python $found." >&2
else
  python="${PYTHON:-${SUPEROFFLOAD_VENV:-.venv}/bin/python}"
  if [[ -z "$build" ]]; then
    build="$PWD/build/device"
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_CUDA=ON >/dev/null &&
      ninja -C "$build" --quiet kernel_check pack_alone gpu_test superoffloadd superoffload_client ||
      { echo "It cannot be built here. Make a bundle elsewhere, with tests/device/bundle.sh, and name it with --bundle." >&2 && exit 1; }
  fi
  check="$build/tests/device/kernel_check" gpu_test="$build/tests/integration/gpu_test"
  pack="$build/tests/device/libpack_alone.so"
  export SUPEROFFLOAD_BUILD="$build"
  export SUPEROFFLOAD_DAEMON="$build/server/superoffloadd" SUPEROFFLOAD_LIBRARY="$build/client/libsuperoffload.so.0"
fi
export SUPEROFFLOAD_KERNEL_CHECK="$check" SUPEROFFLOAD_GPU_TEST="$gpu_test" SUPEROFFLOAD_PACK_ALONE="$pack" PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
libraries="${LD_LIBRARY_PATH:-}"
if [[ -n "${SUPEROFFLOAD_DEVICE_DRY_RUN:-}" ]]; then
  libraries="$SUPEROFFLOAD_BUILD/tests/support/fake-cuda:$libraries"
else
  # Some containers have the driver where no loader looks, and PyTorch's wheels bring NCCL along to where none does.
  ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1' || libraries="$libraries:/usr/local/nvidia/lib64"
  nccl="$("$python" -c 'import importlib.util; print(importlib.util.find_spec("nvidia.nccl").submodule_search_locations[0])' 2>/dev/null)"
  [[ -n "$nccl" ]] && libraries="$libraries:$nccl/lib"
fi
while [[ "$libraries" == :* ]]; do libraries="${libraries#:}"; done  # an empty word is the current folder
[[ -n "$libraries" ]] && export LD_LIBRARY_PATH="$libraries"
exec "$python" -m tests.device.main "${words[@]}"
