#!/bin/busybox sh
# The first process of the virtual machine: a daemon on its Superchip, a trainer, and a look at where everything is.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /tmp /run
mount -t tmpfs tmp /tmp
ip link set lo up
echo 64 >/proc/sys/vm/nr_hugepages
endpoint=--endpoint=unix:/run/so/control.sock

section() { echo "== $1"; }

section nodes
for node in /sys/devices/system/node/node*; do echo "${node##*/} cpus $(cat "$node/cpulist")"; done
superoffloadd --superchip=0 --runtime_directory=/run/so --metrics_address=127.0.0.1:9470 2>/tmp/log &
daemon=$!
until [ -S /run/so/control.sock ] || ! kill -0 "$daemon"; do sleep 0.1; done
section info
superoffloadctl "$endpoint" info
section topology
superoffloadctl "$endpoint" topology --json
train_bigram "$endpoint" --text=/text --steps=60 >/tmp/train 2>&1 &
trainer=$!
until superoffloadctl "$endpoint" list | grep -q bigram; do sleep 0.1; done
section pages
grep memfd:superoffload- "/proc/$daemon/numa_maps"
section workers
for task in /proc/"$daemon"/task/*; do
  [ "$(cat "$task/comm")" = so-worker ] && grep Cpus_allowed_list "$task/status"
done
section metrics
wget -q -O - http://127.0.0.1:9470/metrics | grep node_bytes
wait "$trainer"
section train
cat /tmp/train
section log
kill -TERM "$daemon"
wait "$daemon"
echo "exit $?"
cat /tmp/log
section end
poweroff -f
