#!/bin/sh
# Slurm Epilog: frees what the job has left in the node's daemons. Optimizers belong to a job when their name begins with
# "slurm-$SLURM_JOB_ID-"; others stay for the user's next job. In slurm.conf: Epilog=/usr/share/superoffload/epilog.sh
set -eu
for socket in ${SUPEROFFLOAD_SOCKETS:-/run/superoffloadd-*/control.sock}; do
  [ -S "$socket" ] || continue
  superoffloadctl --endpoint="unix:$socket" list |
    awk -v prefix="slurm-$SLURM_JOB_ID-" -v uid="$SLURM_JOB_UID" \
      'NR > 1 && index($1, prefix) == 1 && $2 == uid && $NF == "none" {print $1}' |
    while read -r name; do
      superoffloadctl --endpoint="unix:$socket" --uid="$SLURM_JOB_UID" delete "$name" || true
    done
done
