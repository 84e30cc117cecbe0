#!/usr/bin/env bash
# Installs the aarch64 wheel of build/wheels in an aarch64 root with a Python and a PyTorch of that architecture. There
# trainers train, are killed, the daemon is killed, and pip upgrades both (in_root.py), all under qemu-user. By hand: it
# needs root, the network, 1 GB, a kernel whose binfmt_misc is of a user namespace (6.7), and a quarter of an hour.
# Usage: tests/packaging/aarch64.sh
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/../.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}" root="$PWD/build/wheel-roots/aarch64-root"
wheel="$(find build/wheels -name 'superoffload-*_aarch64.whl' | sort | tail -n 1)"
[[ -n "$wheel" ]] || { echo "there is no aarch64 wheel in build/wheels: deploy/wheel.sh makes one" >&2 && exit 1; }
if [[ ! -e "$root/complete" ]]; then
  rm -rf "$root" && mkdir -p "${root%/*}"
  mmdebstrap --quiet --arch=arm64 --variant=extract --include=python3.11-venv,libstdc++6,libgomp1,dash bookworm "$root"
  # pip takes the markers of dependencies to be of this machine, so the dependencies are spelled out.
  "$venv/bin/python" -m pip install -q --no-deps --only-binary=:all: --target "$root/packages" --python-version 3.11 \
    --platform={manylinux_2_{34,28,17},manylinux2014}_aarch64 grpcio protobuf safetensors numpy \
    torch==2.6.0 typing_extensions filelock sympy==1.13.1 mpmath networkx jinja2 markupsafe fsspec
  touch "$root/complete"
fi
rm -rf "$root/shared" && mkdir -p "$root"/{shared,proc,sys,dev,tmp}
cp "$wheel" tests/packaging/in_root.py "$root/shared"
tests/packaging/newer.sh "$venv/bin/python" "$wheel" "$root/shared/newer"

# The kernel hands aarch64 programs to the emulator, in this namespace alone.
export root emulator="$(command -v qemu-aarch64-static)" QEMU_CPU=max,sve-default-vector-length=16
unshare --user --map-root-user --mount --pid --fork --kill-child bash -euc '
  mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
  magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
  mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
  echo ":aarch64:M::$magic:$mask:$emulator:F" >/proc/sys/fs/binfmt_misc/register
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount --rbind /sys "$root/sys"
  exec env -i PATH=/usr/sbin:/usr/bin:/bin TMPDIR=/tmp OMP_NUM_THREADS=1 PYTHONPATH=/packages QEMU_CPU="$QEMU_CPU" \
    chroot "$root" /bin/sh -ec "
      [ -x /venv/bin/python ] || python3.11 -m venv /venv
      /venv/bin/python -m pip install -q --force-reinstall --no-deps --no-index /shared/superoffload-*.whl
      /venv/bin/python -c \"import platform; print(platform.machine(), platform.python_version())\"
      exec /venv/bin/python /shared/in_root.py /shared/newer/superoffload-*.whl"'
