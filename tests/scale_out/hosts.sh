#!/bin/bash
# Make two hosts, node0 and node1, out of network namespaces joined by a cable, and run a command beside them.
# The command finds them in HOST_PIDS. To be started by `unshare --map-root-user --net --mount`, in which nothing
# that happens here is seen from outside.
set -euo pipefail
folder=$1
shift

printf '127.0.0.1 localhost\n10.213.0.1 node0\n10.213.0.2 node1\n' >"$folder/hosts"
: >"$folder/resolv.conf"
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf # no name server: a look-up fails at once

# Longer than any command may take: the hosts are ended below, and who is not there to be ended is an error.
unshare --net --uts sleep 300 >/dev/null 2>&1 & first=$!
unshare --net --uts sleep 300 >/dev/null 2>&1 & second=$!
trap 'kill $first $second' EXIT
here=$(readlink /proc/$$/ns/net)
until [ "$(readlink /proc/$first/ns/net)" != "$here" ] && [ "$(readlink /proc/$second/ns/net)" != "$here" ]; do
    sleep 0.05
done

ip link add cable0 type veth peer name cable1
for number in 0 1; do
    pids=("$first" "$second")
    pid=${pids[$number]}
    ip link set "cable$number" netns "$pid"
    inside=(nsenter --target "$pid" --net --uts)
    "${inside[@]}" hostname "node$number"
    "${inside[@]}" ip link set lo up
    "${inside[@]}" ip addr add "10.213.0.$((number + 1))/24" dev "cable$number"
    "${inside[@]}" ip link set "cable$number" up
done
HOST_PIDS="$first $second" "$@"
