#!/usr/bin/env bash
# Cross-compiles the kernels and their tests for aarch64 and runs them under qemu with 128-bit SVE2, as Grace has, and
# with 256-bit SVE2, which must not change a bit.
# Usage: run_aarch64.sh BUILD_DIRECTORY RESULTS_DIRECTORY
set -euo pipefail
root="$(cd "$(dirname "$0")/../../.." && pwd)"
build="$1" results="$2"
mkdir -p "$build/include"
ln -sfn /usr/include/hwy "$build/include/hwy"  # headers only; the rest of /usr/include is the host's

googletest=/usr/src/googletest
compile() {
  local object="$build/$1"
  shift
  aarch64-linux-gnu-g++ -std=c++20 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math \
    -I"$root" -I"$build/include" -I"$googletest"/googletest/include -I"$googletest"/googlemock/include \
    -I"$googletest"/googletest -I"$googletest"/googlemock "$@" -c -o "$object"
}
kernels="$root/kernels/adam"
compile adam.o "$kernels/adam.cc"
compile scalar.o "$kernels/adam_scalar.cc"
compile step.o "$kernels/adam_step.cc"
compile neon.o -DSUPEROFFLOAD_KERNELS=kNeonKernels '-DSUPEROFFLOAD_TARGET="NEON"' "$kernels/adam_vector.cc"
compile sve2.o -march=armv9-a -DSUPEROFFLOAD_KERNELS=kSve2Kernels '-DSUPEROFFLOAD_TARGET="SVE2"' "$kernels/adam_vector.cc"
compile adam_test.o "$root/tests/unit/kernels/adam_test.cc"
compile conversion_test.o "$root/tests/unit/kernels/float_conversion_test.cc"
compile gtest.o "$googletest/googletest/src/gtest-all.cc"
compile gtest_main.o "$googletest/googletest/src/gtest_main.cc"
aarch64-linux-gnu-g++ -static "$build"/*.o -o "$build/kernels_test" -lpthread 2>/dev/null

status=0
for bytes in 16 32; do
  qemu-aarch64-static -cpu max,sve-default-vector-length=$bytes "$build/kernels_test" --gtest_brief=1 \
    --gtest_output="xml:$results/aarch64-sve$bytes.xml" || status=1
done
exit $status
