#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, and ends with "N passed, N failed".
# Usage: tests/run.sh [--quick]   --quick: no long exactness runs, emulation, fuzzers or sanitizers
# Compilers' results are kept by ccache, and virtual machines and sysroots in build/, from one run to the next.
set -uo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"
build="$(realpath -m "${SUPEROFFLOAD_BUILD:-build/test}")"
results="$build/results"
quick=0 frameworks=0
[[ "${1:-}" == --quick ]] && quick=1
source tests/support/runners.sh

# What there is to do, and the minutes that it takes on two cores when nothing is there yet.
# The virtual machine of tests/vm runs what arm64 builds, tests/fuzz what asan builds.
steps=("2 dependencies" "9 build" "6 cpp_tests" "8 arm64" "11 asan" "18 python_tests" "9 tsan" "3 frameworks")
((quick)) && steps=("3 dependencies" "9 build" "1 cpp_tests" "7 python_tests")

dependencies() { deploy/install-dependencies.sh --python --tests; }

build() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -g1 -DNDEBUG" >/dev/null &&
    ninja -C "$build" --quiet
}

cpp_tests() {
  local exclude=()
  ((quick)) && exclude=(--exclude-regex 'ExactnessTest')
  run_ctest "$build" "$results" ctest "${exclude[@]}"
}

python_tests() {
  local ignored=()
  ((quick)) && ignored=(--ignore tests/fuzz)
  run_pytest "$venv/bin/python" "$results" pytest tests "${ignored[@]}" --durations 20
}

# The newest torch and JAX, beside the pinned ones that everything else runs with.
frameworks() {
  tests/frameworks.sh --quick torch==2.15.0 jax==0.12.0.1
  frameworks=$?
  ((frameworks == 3)) || cp build/frameworks/results/*.{xml,log} "$results"
}
arm64() { tests/arm64.sh "$build" "$results"; }
asan() { tests/sanitizers.sh asan "$venv/bin/python" "$results"; }
tsan() { tests/sanitizers.sh tsan "$venv/bin/python" "$results"; }

export CCACHE_BASEDIR="$PWD" CCACHE_NOHASHDIR=1  # what another checkout compiled is found again
export SUPEROFFLOAD_BUILD="$build"
export SUPEROFFLOAD_DAEMON="$build/server/superoffloadd" SUPEROFFLOAD_LIBRARY="$build/client/libsuperoffload.so.0"
rm -rf "$results" && mkdir -p "$results"
for step in "${steps[@]}"; do
  left=0
  for other in "${steps[@]}"; do [[ "$other" == "$step" || $left -gt 0 ]] && left=$((left + ${other% *})); done
  printf '== [%2d:%02d] %s: %d minutes; until the end %d, less where something is there already\n' \
    $((SECONDS / 60)) $((SECONDS % 60)) "${step#* }" "${step% *}" "$left"
  "${step#* }" || [[ "$step" != *dependencies && "$step" != *build ]] || exit 1
done
printf '== [%2d:%02d] done\n' $((SECONDS / 60)) $((SECONDS % 60))

expected=(ctest.xml pytest.xml)
((quick)) || expected+=(arm64-{kernels,algorithms}_test-sve{16,32,256}-{0,1,2,3}.xml arm64-daemon.xml arm64-gpu.xml
  asan.xml asan-pytest.xml tsan.xml tsan-pytest.xml)
((quick || frameworks == 3)) || expected+=(frameworks.xml)
"$venv/bin/python" tests/support/summary.py "$results" "${expected[@]}"
