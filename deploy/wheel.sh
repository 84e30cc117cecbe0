#!/usr/bin/env bash
# Makes the wheels of superoffload for x86-64 and aarch64, and the sdist, on Debian 12 x86-64. On another machine, that of
# the machine alone.
# Usage: deploy/wheel.sh [--arch x86_64|aarch64] [--output DIRECTORY]    (from nothing 10 minutes on 2 cores, half an hour beside other work)
#   --arch    one of them only
#   --output  build/wheels unless told
# The same commit and the same versions of the toolchain's packages give the same bytes.
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}" here="$(uname -m)" output=build/wheels
archs=("$here") && [[ "$here" == x86_64 ]] && archs+=(aarch64)
while (($#)); do
  case "$1" in
    --arch) archs=("${2:?--arch ARCH}") ;;
    --output) output="${2:?--output DIRECTORY}" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2 ;;
  esac
  shift 2
done

quiet=(--quiet)
[[ -t 1 ]] && quiet=()
deploy/install-dependencies.sh --wheel
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CMakeLists.txt)"
export SOURCE_DATE_EPOCH
for arch in "${archs[@]}"; do
  printf '== [%2d:%02d] building for %s: up to 12 minutes on 2 cores, less where ccache knows the sources\n' $((SECONDS / 60)) $((SECONDS % 60)) "$arch"
  build="build/wheel-$arch" cross=() sysroot=() flags=""
  if [[ "$arch" != "$here" ]]; then
    deploy/arm64/sysroot.sh "$PWD/build/arm64-sysroot"
    cross=(--toolchain deploy/arm64/toolchain.cmake) sysroot=(--sysroot "$PWD/build/arm64-sysroot")
    flags="-ffile-prefix-map=../arm64-sysroot=build/arm64-sysroot"  # ccache may name the sysroot so
  fi
  CXXFLAGS="${CXXFLAGS:-} $flags" cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_TESTS=OFF \
    -DSUPEROFFLOAD_XLA_INCLUDE="$PWD/build/xla/include" "${cross[@]}" >/dev/null
  ninja -C "$build" "${quiet[@]}" superoffloadd superoffload-plan superoffloadctl superoffload_client
  "$venv/bin/python" deploy/wheel/make_wheel.py "$build" "$output" --arch "$arch" "${sysroot[@]}"
done
"$venv/bin/python" deploy/wheel/make_sdist.py "$output"
printf '== [%2d:%02d] done\n' $((SECONDS / 60)) $((SECONDS % 60))
