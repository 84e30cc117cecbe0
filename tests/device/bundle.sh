#!/usr/bin/env bash
# Puts what tests/device/run.sh needs on a machine without compilers or network into one archive of at most 30 MiB. The
# machine brings its glibc (2.34 or newer), libstdc++ (GCC 12's or newer: Ubuntu 22.04, Debian 12), Python, PyTorch (2.11 or
# newer) and NVIDIA's driver (580 or newer: the kernels are CUDA 13's; smoke says so where it is older). Everything else that
# the programs link is in the archive, found relative to them. An archive is refused when something in it asks for more
# than that, for a library that neither it nor the machine has, or for a Python module that is not in it.
# Usage: tests/device/bundle.sh [--python VERSION|INTERPRETER] [--with PACKAGE[==VERSION]]... ARCHIVE.tar.gz
#   --python  the machine's Python, 3.12 unless told: grpcio's wheels are one Python's. An interpreter of that version tries
#             the imports here; uv finds or downloads one for a version, and without one they are tried on the machine only
#   --with    another package from PyPI, without what it depends on: a peer to measure, like torchao
# There: tests/device/run.sh smoke --bundle ARCHIVE.tar.gz --output FOLDER, in a checkout
# Or: mkdir bundle && tar -C bundle -xzf ARCHIVE.tar.gz && bundle/tests/device/run.sh smoke --output FOLDER
set -euo pipefail
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; }
python=3.12 packages=() archive=""
while (($#)); do
  case "$1" in
    --python) python="$2" && shift ;;
    --with) packages+=("$2") && shift ;;
    --help) usage && exit ;;
    -*) usage && exit 2 ;;
    *) archive="$(realpath -m -- "$1")" ;;
  esac
  shift
done
[[ -n "$archive" ]] || { usage && exit 2; }
cd "$(dirname "$0")/../.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"
build=build/bundle
readonly most_bytes=$((30 << 20))
staging="$(mktemp -d)"
trap 'rm -rf "$staging" "$staging.bare"' EXIT

# With nothing in it but what every Python has.
bare="$staging.bare/bin/python"
if [[ -x "$(command -v -- "$python")" ]]; then
  "$python" -m venv --without-pip "$staging.bare"
  python="$("$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
else
  { [[ -x "$venv/bin/uv" ]] || "$venv/bin/pip" install -q uv; } && "$venv/bin/uv" venv --quiet --python "$python" "$staging.bare" ||
    { bare="" && echo "There is no Python $python here, and none could be downloaded: nothing tries the bundle's imports." >&2; }
fi

# RPATH rather than RUNPATH: it counts for libraries of libraries.
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSUPEROFFLOAD_WITH_CUDA=ON -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON \
  '-DCMAKE_INSTALL_RPATH=$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags >/dev/null
export LD_LIBRARY_PATH="$PWD/$build/client${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"  # of programs that the build runs
grep -q '^SUPEROFFLOAD_XLA_INCLUDE:PATH=/' "$build/CMakeCache.txt" ||
  { echo "there are no headers of XLA here, so JAX's checks would fail: install jax in $venv" >&2 && exit 1; }
ninja -C "$build" --quiet kernel_check pack_alone gpu_test superoffloadd superoffload_client superoffload_fake_cuda superoffload_fake_xla_gpu

mkdir -p "$staging"/{bin,lib,tests/device,tests/support/fake-cuda,python,dry}
cp "$build"/tests/device/kernel_check "$build"/tests/integration/gpu_test "$build"/server/superoffloadd "$staging/bin"
cp -L "$build"/client/libsuperoffload.so.0 "$build"/tests/device/libpack_alone.so "$staging/lib"
ldd "$staging"/bin/* | sed -n 's/^\s*\(\S*\) => \(\/\S*\) .*/\1 \2/p' | sort -u | while read -r name path; do
  # The C and C++ runtimes are the machine's: a copy of Debian's would need Debian's glibc.
  [[ "$name" =~ ^(ld-linux-.*|lib(c|m|dl|rt|pthread|util|resolv|anl)|libstdc\+\+|libgcc_s)\.so || -e "$staging/lib/$name" ]] ||
    cp -L "$path" "$staging/lib/$name"
done

cp -r client/python/superoffload "$staging/python"
"$venv/bin/python" -c 'import pathlib, sys; sys.path.insert(0, "client/python"); from generate import generate
generate(pathlib.Path("proto"), pathlib.Path(sys.argv[1]))' "$staging/python"
cp tests/device/*.{sh,py} "$staging/tests/device"
rm "$staging"/tests/device/{{,needs_of_}bundle.sh,*_of_bundle.py,test_*.py}
touch "$staging"/tests/{device,support}/__init__.py  # ahead of whatever else is called tests there
cp tests/device/first_of_bundle.py "$staging/tests/__init__.py"
# For dry runs.
cp tests/support/{fake_cuda_graphs,fake_torch_gpu,fake_jax_gpu,late_torch}.py "$staging/tests/support"
cp -L "$build"/tests/support/fake-cuda/libcuda.so.1 "$staging/tests/support/fake-cuda"
cp -L "$build"/tests/support/libsuperoffload_fake_xla_gpu.so "$staging/tests/support"
echo "$python" >"$staging/python/VERSION"
# The runtimes that the generated messages were made for.
versions="$("$venv/bin/python" -c 'import google.protobuf, grpc; print("protobuf==" + google.protobuf.__version__, "grpcio==" + grpc.__version__)')"
platforms=()
for glibc in 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_$(uname -m)"); done
install() {
  "$venv/bin/pip" install -q --no-deps --only-binary=:all: --implementation cp --python-version "$python" "${platforms[@]}" \
    --platform "manylinux2014_$(uname -m)" --target "$staging/$1" "${@:2}"
  rm -rf "$staging/$1"/{bin,test}  # torchao's wheel has a package named test
}
# shellcheck disable=SC2086
install python $versions typing_extensions "${packages[@]}"
install dry pytest pluggy iniconfig packaging pygments
cp tests/device/google_of_bundle.py "$staging/python/google/__init__.py"
find "$staging" -name __pycache__ -prune -exec rm -r {} +
find "$staging" -type f \( -path '*/bin/*' -o -name '*.so*' \) -exec strip --strip-unneeded {} +

tests/device/needs_of_bundle.sh "$staging"
# It runs from where it is unpacked.
env -u LD_LIBRARY_PATH "$staging/bin/gpu_test" --gtest_list_tests >/dev/null
env -u LD_LIBRARY_PATH "$staging/bin/superoffloadd" --version >/dev/null
[[ -z "$bare" ]] || env -u LD_LIBRARY_PATH -u PYTHONPATH "$bare" -B tests/device/imports_of_bundle.py "$staging"

tar -C "$staging" -cf - . | gzip -9 >"$archive"
bytes=$(stat -c %s "$archive")
echo "$archive: $((bytes >> 10)) KiB, for Python $python"
((bytes <= most_bytes)) || { echo "refused: more than $((most_bytes >> 20)) MiB" >&2 && rm "$archive" && exit 1; }
