#!/usr/bin/env bash
# Trains a real small model while killing trainer and daemon at random instants, and demands the weights of an undisturbed
# run, bit for bit. Ends with one line "kills=N mismatches=M".
# Usage: tests/fault/run.sh [--ranks] [--kills N] [--seed S] [--long] [--algorithm NAME]   --long: thousands of kills
# --algorithm: of one rank, adamw_8bit for example
# --ranks: two ranks with a daemon each, of which any die, several at once, during their agreements, too
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/../.."
build="${SUPEROFFLOAD_BUILD:-build/test}"
kills=200 seed=0 driver=kill_driver algorithm=adamw
while (($#)); do
  case "$1" in
    --ranks) driver=rank_kill_driver; shift ;;
    --kills) kills="$2"; shift 2 ;;
    --seed) seed="$2"; shift 2 ;;
    --long) kills=5000; shift ;;
    --algorithm) algorithm="$2"; shift 2 ;;
    *) echo "usage: tests/fault/run.sh [--ranks] [--kills N] [--seed S] [--long] [--algorithm NAME]" >&2; exit 2 ;;
  esac
done
if [[ ! -e "$build/build.ninja" ]]; then
  deploy/install-dependencies.sh --tests >&2
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
fi
ninja -C "$build" --quiet "$driver" >&2
text="$(python3 -c 'import pydoc_data.topics; print(pydoc_data.topics.__file__)')"
unset SUPEROFFLOAD_DAEMON
if [[ "$driver" == rank_kill_driver ]]; then
  exec "$build/tests/fault/ranks/$driver" --kills="$kills" --seed="$seed" 2>"$build/fault.log" </dev/null
fi
exec "$build/tests/fault/kill_driver" --kills="$kills" --seed="$seed" --text="$text" --algorithm="$algorithm" \
  2>"$build/fault.log" </dev/null
