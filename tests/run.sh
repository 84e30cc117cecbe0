#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, and ends with "N passed, N failed".
# Usage: tests/run.sh [--quick]   --quick: no long exactness runs, emulation, fuzzers or sanitizers
# Compilers' results are kept by ccache, and virtual machines and sysroots in build/, from one run to the next.
set -uo pipefail
cd "$(dirname "$0")/.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"
build="$(realpath -m "${SUPEROFFLOAD_BUILD:-build/test}")"
results="$build/results"
quick=0
[[ "${1:-}" == --quick ]] && quick=1

# What there is to do, and the minutes that it takes on two cores when nothing is there yet.
# The virtual machine of tests/vm runs what arm64 builds, tests/fuzz what asan builds.
steps=("2 dependencies" "6 build" "4 cpp_tests" "7 arm64" "12 asan" "10 python_tests" "12 tsan")
((quick)) && steps=("2 dependencies" "6 build" "1 cpp_tests" "5 python_tests")

dependencies() { deploy/install-dependencies.sh --python --tests; }

build() {
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O2 -g1 -DNDEBUG" >/dev/null &&
    ninja -C "$build" --quiet
}

cpp_tests() {
  local exclude=()
  ((quick)) && exclude=(--exclude-regex 'ExactnessTest')
  ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error "${exclude[@]}" \
    --output-junit "$results/ctest.xml" | grep -v ' Passed \|Start '
}

# Tests wait a lot, for daemons and disks: one more at once than there are cores.
python_tests() {
  local ignored=()
  ((quick)) && ignored=(--ignore tests/fuzz)
  "$venv/bin/python" -m pytest -q --import-mode=importlib -n $(($(nproc) + 1)) --dist loadfile tests "${ignored[@]}" \
    --durations 20 --junitxml "$results/pytest.xml"
}

arm64() { tests/arm64.sh "$build" "$results"; }
asan() { tests/sanitizers.sh asan "$venv/bin/python" "$results"; }
tsan() { tests/sanitizers.sh tsan "$venv/bin/python" "$results"; }

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
((quick)) || expected+=(arm64-sve{16,32,256}-{0,1,2,3}.xml arm64-daemon.xml arm64-gpu.xml
  asan.xml asan-pytest.xml tsan.xml tsan-pytest.xml)
"$venv/bin/python" - "$results" "${expected[@]}" <<'SUM'
import pathlib, sys, xml.etree.ElementTree as xml
passed = failed = 0
files = set(sys.argv[2:])
for path in pathlib.Path(sys.argv[1]).glob("*.xml"):
    files.discard(path.name)
    for suite in [node for node in xml.parse(path).getroot().iter("testsuite")]:
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        failed += bad
        passed += int(suite.get("tests", 0)) - bad - int(suite.get("skipped", 0))
failed += len(files)  # a runner that did not report
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0 or passed == 0)
SUM
