#!/usr/bin/env bash
# Puts what tests/device/run.sh needs on a machine without compilers or network into one archive, below 60 MiB.
# Usage: tests/device/bundle.sh ARCHIVE.tar.gz   then there: unpack it and run tests/device/run.sh --bundle .
set -euo pipefail
archive="$(realpath -m "$1")"
cd "$(dirname "$0")/../.."
cmake -S . -B build/device -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_CUDA=ON >/dev/null
ninja -C build/device --quiet kernel_check
staging="$(mktemp -d)"
trap 'rm -rf "$staging"' EXIT
mkdir -p "$staging/tests/device"
cp build/device/tests/device/kernel_check "$staging"
cp tests/device/run.sh "$staging/tests/device"
strip "$staging/kernel_check"
tar -C "$staging" -czf "$archive" .
bytes=$(stat -c %s "$archive")
echo "$archive: $((bytes >> 10)) KiB"
((bytes < 60 << 20))
