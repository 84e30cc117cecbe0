#!/usr/bin/env bash
# Installs the wheel in roots of other distributions, without compilers or our build dependencies (with libstdc++6, which
# grpcio and PyTorch need). There it trains, is killed, and is upgraded to a wheel with another version number. By hand: it
# needs root, the network and 6 GB a root.
# Usage: tests/packaging/roots.sh [ubuntu-22.04|ubuntu-24.04|debian-12|debian-13]...
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/../.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}" roots="$PWD/build/wheel-roots" shared="$PWD/build/wheel-roots/shared"
ubuntu="http://archive.ubuntu.com/ubuntu" debian="http://deb.debian.org/debian"
declare -A suites=(
  [ubuntu-22.04]="jammy|deb [trusted=yes] $ubuntu jammy main universe"
  [ubuntu-24.04]="noble|deb [trusted=yes] $ubuntu noble main universe"
  [debian-12]="bookworm|deb $debian bookworm main"
  [debian-13]="trixie|deb [trusted=yes] $debian trixie main"
)
wheel="$(find build/wheels -name "superoffload-*_$(uname -m).whl" | sort | tail -n 1)"
[[ -n "$wheel" ]] || { echo "there is no wheel in build/wheels: deploy/wheel.sh makes one" >&2 && exit 1; }
rm -rf "$shared" && mkdir -p "$shared"
cp "$wheel" tests/packaging/in_root.py "$shared"
tests/packaging/newer.sh "$venv/bin/python" "$wheel" "$shared/newer"

for name in "${@:-ubuntu-22.04}"; do
  root="$roots/$name"
  echo "== $name"
  if [[ ! -e "$root/complete" ]]; then
    rm -rf "$root"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates,libstdc++6 "${suites[$name]%%|*}" "$root" "${suites[$name]#*|}"
    touch "$root/complete"
  fi
  systemd-nspawn -q -D "$root" --register=no --keep-unit --console=pipe --resolv-conf=bind-host --bind-ro="$shared:/shared" \
    --bind-ro=/etc/ssl/certs/ca-certificates.crt -E PIP_CERT=/etc/ssl/certs/ca-certificates.crt -E PIP_NO_CACHE_DIR=1 \
    -E TMPDIR=/var/tmp /bin/sh -ec '
      ! command -v cc gcc protoc
      [ -x /venv/bin/python ] || python3 -m venv /venv
      /venv/bin/python -c "import torch" 2>/dev/null || /venv/bin/pip install -q torch safetensors numpy
      /venv/bin/pip install -q --force-reinstall --no-deps /shared/superoffload-*.whl
      /venv/bin/pip install -q grpcio protobuf
      /venv/bin/python --version
      ldd --version | head -n 1
      /venv/bin/python /shared/in_root.py /shared/newer/superoffload-*.whl' </dev/null
done
