#!/bin/sh
# Slurm Epilog: frees what the job has left in the node's daemons. Optimizers belong to a job when their name begins with
# "slurm-$SLURM_JOB_ID-"; others stay for the user's next job. In slurm.conf: Epilog=/usr/share/superoffload/epilog.sh
# It fails, and so drains the node, where memory of the job stays: a daemon does not answer, or a process has outlived
# its job.
set -eu
left=0
for socket in ${SUPEROFFLOAD_SOCKETS:-/run/superoffloadd-*/control.sock}; do
  [ -S "$socket" ] || continue
  tries=0
  while :; do
    optimizers=$(superoffloadctl --endpoint="unix:$socket" list) || { left=1 && break; }
    names=$(echo "$optimizers" | awk -v prefix="slurm-$SLURM_JOB_ID-" -v uid="$SLURM_JOB_UID" \
      'NR > 1 && index($1, prefix) == 1 && $2 == uid {print $1}')
    [ -n "$names" ] || break
    # The job's processes have just been killed, and the daemon may not know of it yet.
    [ "$tries" -lt "${TRIES:-30}" ] || { echo "superoffload: left at $socket: $names" >&2 && left=1 && break; }
    [ "$tries" = 0 ] || sleep 1
    tries=$((tries + 1))
    for name in $names; do
      # A rank that was killed at the end of a step may have left one prepared; its run is over.
      superoffloadctl --endpoint="unix:$socket" --uid="$SLURM_JOB_UID" resolve "$name" abandon >/dev/null 2>&1 || true
      superoffloadctl --endpoint="unix:$socket" --uid="$SLURM_JOB_UID" delete "$name" >/dev/null 2>&1 || true
    done
  done
done
exit "$left"
