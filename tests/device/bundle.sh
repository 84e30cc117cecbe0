#!/usr/bin/env bash
# Puts what tests/device/run.sh needs on a machine without compilers or network, of whatever distribution, into one archive
# below 60 MiB: programs with the libraries and the loader they were linked with, and the Python client with grpcio for
# several Pythons. PyTorch and the NVIDIA driver are the machine's.
# Usage: tests/device/bundle.sh ARCHIVE.tar.gz   then there: unpack it and run tests/device/run.sh --bundle .
set -euo pipefail
archive="$(realpath -m "$1")"
cd "$(dirname "$0")/../.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"
build=build/device
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_CUDA=ON >/dev/null
ninja -C "$build" --quiet kernel_check gpu_test superoffloadd superoffload_client
staging="$(mktemp -d)"
trap 'rm -rf "$staging"' EXIT

mkdir -p "$staging"/{bin,lib,real,tests/device,python/superoffload}
cp "$build"/tests/device/kernel_check "$build"/tests/integration/gpu_test "$build"/server/superoffloadd "$staging/real"
cp "$build"/client/libsuperoffload.so.0 "$staging/lib"
ldd "$staging"/real/* | grep -oE '/[^ ]+' | grep -E '\.so' | sort -u | xargs cp -Lt "$staging/lib" --update=none 2>/dev/null ||
  ldd "$staging"/real/* | grep -oE '/[^ ]+' | grep -E '\.so' | sort -u | xargs cp -Lnt "$staging/lib"
strip "$staging"/real/* "$staging"/lib/*.so* 2>/dev/null || true
# The bundle's own loader and libraries first; only the driver is the machine's.
for program in "$staging"/real/*; do
  cat >"$staging/bin/$(basename "$program")" <<'WRAPPER'
#!/bin/sh
here="$(cd "$(dirname "$0")/.." && pwd)"
driver="$(ldconfig -p 2>/dev/null | sed -n 's/.*libcuda\.so\.1 .*=> \(.*\)\/libcuda.*/\1/p' | head -n 1)"
export GPU_TEST_PROGRAM="$0"
exec "$here/lib/ld-linux-x86-64.so.2" --library-path \
  "$here/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}${driver:-/usr/lib64}:/usr/local/nvidia/lib64" "$here/real/$(basename "$0")" "$@"
WRAPPER
  chmod +x "$staging/bin/$(basename "$program")"
done

cp -r client/python/superoffload "$staging/python"
find "$staging/python" -name __pycache__ -prune -exec rm -r {} +
cp tests/device/{run.sh,torch_check.py,train_bench.py} "$staging/tests/device"
versions="$("$venv/bin/python" -c 'import google.protobuf, grpc; print("protobuf==" + google.protobuf.__version__, "grpcio==" + grpc.__version__)')"
for python in 3.10 3.11 3.12 3.13; do
  # shellcheck disable=SC2086
  "$venv/bin/pip" install -q --no-deps --only-binary=:all: --python-version "$python" --target "$staging/python/$python" \
    $versions typing_extensions
  find "$staging/python/$python" -name '*.so' -exec strip {} +
done

tar -C "$staging" -czf "$archive" .
bytes=$(stat -c %s "$archive")
echo "$archive: $((bytes >> 20)) MiB"
((bytes < 60 << 20))
