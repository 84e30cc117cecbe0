#!/usr/bin/env bash
# Makes a wheel of the same programs with the version number 0.2.0, to upgrade to.
# Usage: tests/packaging/newer.sh PYTHON WHEEL DIRECTORY
set -euo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
unpacked="$(mktemp -d)"
trap 'rm -rf "$unpacked"' EXIT
"$1" -m wheel unpack --dest "$unpacked" "$2" >/dev/null
tree=("$unpacked"/*) information=("$unpacked"/*/*.dist-info)
sed -i 's/^Version: .*/Version: 0.2.0/' "${information[0]}/METADATA"
mv "${information[0]}" "${tree[0]}/superoffload-0.2.0.dist-info"
mkdir -p "$3"
"$1" -m wheel pack --dest-dir "$3" "${tree[0]}" >/dev/null
