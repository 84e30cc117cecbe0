#!/usr/bin/env bash
# Builds the fuzzers and runs each on its corpus and then on new inputs. Ends with "fuzzers=N failures=M".
# Usage: tests/fuzz/run.sh [--seconds N]   N per fuzzer, 10 unless told; what it finds new is kept in build/fuzz/found
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/../.."
seconds=10
[[ "${1:-}" == --seconds ]] && seconds="$2"

cmake --preset asan >/dev/null
ninja -C build/asan --quiet fuzzers
failures=0 count=0
for corpus in tests/fuzz/corpus/*/; do
  name=$(basename "$corpus")
  found="build/fuzz/found/$name"
  mkdir -p "$found"
  count=$((count + 1))
  echo "== fuzz_$name"
  if ! "build/asan/tests/fuzz/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -max_len=4096 \
    -artifact_prefix="$found/" "$found" "$corpus" >"$found.log" 2>&1; then
    failures=$((failures + 1))
    tail -40 "$found.log"
  fi
  tail -1 "$found.log"
done
echo "fuzzers=$count failures=$failures"
exit $((failures > 0))
