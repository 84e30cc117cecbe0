#!/bin/sh
# Slurm Prolog: a daemon for each Superchip of the job's node answers; one that does not drains the node, and the job is
# queued again. In slurm.conf: Prolog=/usr/share/superoffload/prolog.sh
# A node has as many Superchips as memory nodes with cores, unless /etc/default/superoffloadd has a line SUPERCHIPS=N:
# Slurm gives its scripts no variables of the node's.
set -eu
superchips=$(sed -n 's/^SUPERCHIPS=//p' /etc/default/superoffloadd 2>/dev/null | tail -n 1)
if [ -z "$superchips" ]; then
  superchips=$(cat /sys/devices/system/node/node*/cpulist 2>/dev/null | grep -c . || true)
  [ "$superchips" != 0 ] || superchips=1  # a kernel that knows no memory nodes
fi
# One that starts again brings its optimizers to their last committed step first.
export SUPEROFFLOAD_CONNECT_SECONDS=300
[ "$superchips" -gt 0 ] || exit 1
i=0
while [ "$i" -lt "$superchips" ]; do
  systemctl start "superoffloadd@$i.socket"
  superoffloadctl --endpoint="unix:/run/superoffloadd-$i/control.sock" info >/dev/null
  i=$((i + 1))
done
