#!/bin/sh
# Slurm Prolog: the job's node has a daemon for each Superchip. In slurm.conf: Prolog=/usr/share/superoffload/prolog.sh
# SUPERCHIPS (default 1) is how many the node has.
set -eu
i=0
while [ "$i" -lt "${SUPERCHIPS:-1}" ]; do
  systemctl start "superoffloadd@$i.socket"
  i=$((i + 1))
done
