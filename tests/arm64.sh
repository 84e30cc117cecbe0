#!/usr/bin/env bash
# Cross-compiles what runs there for Grace's architecture and runs it under emulation: the kernel tests with 128-bit SVE2, as
# Grace has, and with 256-bit and 2048-bit SVE2, which must not change a bit; and the arm64 daemon against this machine's C++ trainer
# and this machine's scalar reference, over the same shared memory; likewise with the fake GPU, whose memory both map.
# Usage: tests/arm64.sh HOST_BUILD_DIRECTORY RESULTS_DIRECTORY
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
host="$(realpath "$1")" results="$(realpath "$2")"
cd "$(dirname "$0")/.."
source tests/support/runners.sh
sysroot="$PWD/build/arm64-sysroot" build="$PWD/build/arm64"

deploy/arm64/sysroot.sh "$sysroot"
cmake --preset arm64 >/dev/null
ninja -C "$build" --quiet kernels_test algorithms_test superoffloadd superoffload-plan superoffloadctl train_bigram superoffload_fake_cuda superoffload_fake_nccl

# Nothing of a release depends on the folder it was built in.
for file in server/superoffloadd server/superoffload-plan client/superoffloadctl client/libsuperoffload.so.0; do
  ! grep --text --only-matching "$PWD[^[:cntrl:]]*" "$build/$file" || { echo "$file knows where it was built" >&2 && exit 1; }
done

run_arm64() { qemu-aarch64-static -cpu "max,sve-default-vector-length=$1" -L "$sysroot" "${@:2}"; }
# In shards, since tests that fork mostly wait for the emulator. The length of a vector is nothing to kernels without SVE, and
# Grace's is where they are killed. Death tests start their own file, which only the emulator can, and it lets nobody step
# through a process. No GPU is emulated twice, and nothing scalar is compared with itself.
# Usage: kernel_tests run_gtest|repeat_gtest PROGRAM BYTES SHARD
kernel_tests() (
  filter='-*DeathTest*:*EveryInstruction*:Cuda*:*SCALAR'
  (($3 == 16)) || filter+=':*NEON:*KilledAgainAndAgain*'
  export GTEST_TOTAL_SHARDS=4 GTEST_SHARD_INDEX="$4"
  "$1" "$results" "arm64-$2-sve$3-$4" "$filter" run_arm64 "$3" "$build/tests/unit/kernels/$2"
)
for bytes in 16 32 256; do
  for shard in 0 1 2 3; do
    for program in kernels_test algorithms_test; do kernel_tests run_gtest $program $bytes $shard & done
  done
done

daemon="$build/superoffloadd-emulated"
printf '#!/bin/sh\nexec qemu-aarch64-static -cpu max,sve-default-vector-length=16 -L %s -E LD_LIBRARY_PATH=%s %s "$@"\n' \
  "$sysroot" "$build/tests/support/fake-cuda" "$build/server/superoffloadd" >"$daemon"
chmod +x "$daemon"
export SUPEROFFLOAD_DAEMON="$daemon"
# Usage: daemon_tests run_gtest|repeat_gtest
daemon_tests() (
  "$1" "$results" arm64-daemon 'CppClientTest.*:WholePathTest.*:*_2_BFloat16:*_2_ScaledFloat16' \
    "$host/tests/integration/integration_test"
  export LD_LIBRARY_PATH="$host/tests/support/fake-cuda"
  "$1" "$results" arm64-gpu '*/DaemonDescriptor:*/DaemonResident:*/Trainer' "$host/tests/integration/gpu_test"
)
daemon_tests run_gtest
wait

for bytes in 16 32 256; do
  for shard in 0 1 2 3; do
    for program in kernels_test algorithms_test; do kernel_tests repeat_gtest $program $bytes $shard; done
  done
done
daemon_tests repeat_gtest
