# Test runners for scripts that source this file. Each writes NAME.xml and NAME.log into a folder of results. What fails
# runs once more when everything else has ended, alone, into NAME-again.xml and NAME-again.log; summary.py compares the two.
# More failures than that are no accident and are not repeated.
most_repeated=20
# Tests wait a lot, for daemons and disks: one more at once than there are cores.
at_once=$(($(nproc) + 1))

failures() { grep -oE '<(failure|error)\b' "$1" 2>/dev/null | wc -l; }
worth_repeating() { (($(failures "$1") > 0 && $(failures "$1") <= most_repeated)); }

# Usage: run_ctest BUILD_DIRECTORY RESULTS NAME [OPTION...]
run_ctest() {
  local build="$1" report="$2/$3" all=(ctest --test-dir "$1" --output-on-failure --no-tests=error)
  "${all[@]}" -j "$at_once" --output-junit "$report.xml" "${@:4}" 2>&1 | tee "$report.log" | grep -v ' Passed \|Start ' || true
  worth_repeating "$report.xml" || return 0
  "${all[@]}" --rerun-failed --output-junit "$report-again.xml" 2>&1 | tee "$report-again.log" || true
}

# Usage: run_pytest PYTHON RESULTS NAME [OPTION...]
# No thread of torch's waits for its neighbour by spinning, since there are more of them than cores.
run_pytest() {
  local report="$2/$3" all=(env OMP_WAIT_POLICY=passive "$1" -m pytest -q --import-mode=importlib -o cache_dir="$2/$3-cache" "${@:4}")
  "${all[@]}" -n "$at_once" --dist loadfile --junitxml "$report.xml" 2>&1 | tee "$report.log" || true
  worth_repeating "$report.xml" || return 0
  "${all[@]}" --last-failed --last-failed-no-failures none --junitxml "$report-again.xml" 2>&1 | tee "$report-again.log" || true
}

# Usage: run_gtest RESULTS NAME FILTER COMMAND...   then, when nothing else runs, repeat_gtest with the same words
run_gtest() {
  local report="$1/$2"
  "${@:4}" --gtest_brief=1 "--gtest_filter=$3" "--gtest_output=xml:$report.xml" </dev/null 2>&1 | tee "$report.log" || true
}

# A program that ended before it could report runs again as a whole.
repeat_gtest() {
  local report="$1/$2" filter="$3"
  if [[ -f "$report.xml" ]]; then
    worth_repeating "$report.xml" || return 0
    filter="$(sed -n '/<testcase /{s/.* name="\([^"]*\)".* classname="\([^"]*\)".*/\2.\1/;h}; /<failure /{x;p;x}' "$report.xml" |
      sort -u | paste -sd:)"
    unset GTEST_TOTAL_SHARDS GTEST_SHARD_INDEX
  fi
  run_gtest "$1" "$2-again" "$filter" "${@:4}"
}
