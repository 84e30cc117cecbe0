#!/usr/bin/env bash
# Builds with a sanitizer and runs the tests that fit into CI's time: everything in C++ but for most of the long exactness
# runs, and the Python integration tests against a daemon built that way. The asan build has the fuzzers, too.
# Usage: tests/sanitizers.sh asan|tsan PYTHON RESULTS_DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
preset="$1" python="$2" results="$3"
build="$PWD/build/$preset"

export ASAN_OPTIONS="abort_on_error=1:detect_stack_use_after_return=1" UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1"
export LSAN_OPTIONS="use_tls=0"  # clang 14's leak checker may crash over the TLS of threads that end with the process
export TSAN_OPTIONS="halt_on_error=1:ignore_noninstrumented_modules=1:suppressions=$PWD/tests/support/tsan.supp"
export SUPEROFFLOAD_DAEMON="$build/server/superoffloadd"

cmake --preset "$preset" >/dev/null
ninja -C "$build" --quiet
# Of the exactness runs those with three worker threads.
ctest --test-dir "$build" -j "$(nproc)" --output-on-failure --no-tests=error --output-junit "$results/$preset.xml" \
  --exclude-regex '/ExactnessTest.*_[124]Threads|WholePathTest.*_(1|2|4)_|WholePathTest.*_3_BFloat16FromFloat32' \
  | grep -v ' Passed \|Start ' || true
"$python" -m pytest -q --import-mode=importlib -n $(($(nproc) + 1)) --dist loadfile tests/integration --junitxml "$results/$preset-pytest.xml"
