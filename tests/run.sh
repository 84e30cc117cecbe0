#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, and ends with "N passed, N failed".
# Usage: tests/run.sh [--quick]   --quick skips the long exactness runs
set -uo pipefail
cd "$(dirname "$0")/.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"
build="$(realpath -m "${SUPEROFFLOAD_BUILD:-build/test}")"
quick=0
[[ "${1:-}" == --quick ]] && quick=1

say() { printf '== [%3ds] %s\n' "$SECONDS" "$*"; }

say "dependencies"
deploy/install-dependencies.sh --python --tests || exit 1
say "building (about 5 minutes from nothing on 2 cores)"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null || exit 1
ninja -C "$build" --quiet || exit 1

results="$build/results"
rm -rf "$results" && mkdir -p "$results"
say "C++ tests (about 2 minutes)"
exclude=()
ignored=()
((quick)) && exclude=(--exclude-regex 'ExactnessTest') && ignored=(--ignore tests/fuzz)
ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error "${exclude[@]}" \
  --output-junit "$results/ctest.xml" | grep -v ' Passed \|Start ' 
if ((!quick)); then
  say "arm64 under emulation (about 1 minute and a build of 2)"
  tests/arm64.sh "$build" "$results"
fi
say "Python tests, faults and fuzzers (about 4 minutes and a build of 2)"
export SUPEROFFLOAD_BUILD="$build"
export SUPEROFFLOAD_DAEMON="$build/server/superoffloadd" SUPEROFFLOAD_LIBRARY="$build/client/libsuperoffload.so.0"
"$venv/bin/python" -m pytest -q --import-mode=importlib tests "${ignored[@]}" --junitxml "$results/pytest.xml"
expected=(ctest.xml pytest.xml)
if ((!quick)); then
  for sanitizer in asan tsan; do
    say "$sanitizer (about 3 minutes and a build of 5)"
    tests/sanitizers.sh "$sanitizer" "$venv/bin/python" "$results"
    expected+=("$sanitizer.xml" "$sanitizer-pytest.xml")
  done
  expected+=(arm64-sve16.xml arm64-sve32.xml arm64-sve256.xml arm64-daemon.xml arm64-gpu.xml)
fi
say "done"
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
