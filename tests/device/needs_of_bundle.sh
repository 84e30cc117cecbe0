#!/usr/bin/env bash
# Refuses a bundle whose programs or libraries ask for more than a machine with glibc 2.34 and GCC 12's libstdc++ has, for a
# library that neither it nor the machine has, or whose libsuperoffload.so would share the C++ runtime of the Python that
# loads it. Says of each which symbols need it.
# Usage: tests/device/needs_of_bundle.sh FOLDER   with lib/ in it, where the bundle's libraries are
set -uo pipefail
[[ " $* " != *" --help "* ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
folder="${1:?FOLDER}"
declare -A newest=([GLIBC]=2.34 [GLIBCXX]=3.4.30 [CXXABI]=1.3.13)
readonly machines='^(ld-linux-.*|lib(c|m|dl|rt|pthread|util|resolv|anl)|libstdc\+\+|libgcc_s)\.so'
readonly pytorchs='^lib(torch|c10|cudart)[^/]*\.so'  # loaded already where a Python extension asks for them
refused=0
refuse() { echo "refused: $*" >&2 && refused=1; }
newer() { [[ "$1" != "$2" && "$(printf '%s\n' "$1" "$2" | sort -V | tail -n 1)" == "$1" ]]; }

while read -r binary; do
  name="${binary#"$folder/"}"
  needs="$(readelf --version-info --dynamic --wide "$binary")" || { refuse "$name is no program or library" && continue; }
  while read -r version; do
    limit="${newest[${version%%_*}]:-}"
    [[ -n "$limit" && "${version#*_}" =~ ^[0-9.]+$ ]] && newer "${version#*_}" "$limit" &&
      refuse "$name needs $version, the newest allowed is $limit, for" "$(objdump -T "$binary" |
        awk -v version="$version" '/\*UND\*/ && ($0 ~ "[( ]" version "[) ]") { print $NF }' | sort -u | paste -sd' ')"
  done < <(sed -n '/\.gnu\.version_r/,$s/.*Name: \(\S*\) .*/\1/p' <<<"$needs" | sort -u)
  while read -r library; do
    [[ "$name" == python/* && "$library" =~ $pytorchs ]] && continue
    [[ "$library" =~ $machines || -e "$folder/lib/$library" ]] || refuse "$name needs $library, which is not in the bundle"
    [[ "$name" == *libsuperoffload.so* && "$library" == libstdc++* ]] && refuse "$name shares the C++ runtime of its process"
  done < <(sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' <<<"$needs")
done < <(find "$folder" -type f \( -path '*/bin/*' -o -name '*.so*' \))
exit "$refused"
