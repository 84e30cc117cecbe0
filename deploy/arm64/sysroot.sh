#!/usr/bin/env bash
# Makes the Debian 12 arm64 sysroot that toolchain.cmake compiles against, from the package registry; nothing of it runs.
# Usage: deploy/arm64/sysroot.sh DIRECTORY    (about half a minute, 400 MB; does nothing when it is there)
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
root="$1"
[[ -e "$root/.complete" ]] && exit 0

packages=libc6-dev,libstdc++-12-dev,libgrpc++-dev,libprotobuf-dev,libabsl-dev,libhwy-dev,zlib1g-dev
packages+=,prometheus-cpp-dev,libcurl4-openssl-dev,libsystemd-dev,nlohmann-json3-dev,libhwloc-dev,libnuma-dev,libgtest-dev,libgmock-dev,libbenchmark-dev
rm -rf "$root"
mmdebstrap --quiet --arch=arm64 --variant=extract --include="$packages" bookworm "$root"
# Links that begin with / would lead out of the sysroot.
find "$root" -lname '/*' -print0 | while IFS= read -r -d '' link; do
  ln -sfn "$(realpath -ms --relative-to="$(dirname "$link")" "$root$(readlink "$link")")" "$link"
done
# gRPC's CMake files look for the plugins of all languages; ours run on the host.
mkdir -p "$root/usr/bin"
touch "$root"/usr/bin/grpc_{cpp,csharp,node,objective_c,php,python,ruby}_plugin "$root/usr/bin/protoc"
touch "$root/.complete"
