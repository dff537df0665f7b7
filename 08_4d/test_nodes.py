"""One layout on two hosts, started by the page's Slurm script; a rank that is killed, and torchrun starts again."""

import contextlib
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import compare
import pytest
from equivalence import ROOT_RECIPE, SHAPE, TOLERANCE, TRAINING, documents, mesh, reference, shared, start
from launch import ROOT, free_port, launch

RECIPE = "08_4d/checkpoint.py"
# Two hosts on one machine: network namespaces, joined by a virtual Ethernet cable. What is started here is node0; node1
# is where $ON_NODE1 takes a command. Gloo and torchrun tell other ranks the address of their host's name, so hosts have
# names of their own (UTS namespaces), and an /etc/hosts that knows both. Names and addresses exist in the namespaces
# alone: nothing collides with other tests, and all is gone with the last process.
HOSTS = """
set -e
printf '127.0.0.1 localhost\\n10.0.0.1 node0\\n10.0.0.2 node1\\n' > $FOLDER/hosts
mount --bind $FOLDER/hosts /etc/hosts
unshare --net --uts sleep 600 & node1=$!
trap "kill $node1" EXIT
until [ $(readlink /proc/$node1/ns/net) != $(readlink /proc/$$/ns/net) ]; do sleep 0.01; done
export ON_NODE1="nsenter --target $node1 --net --uts"
ip link add eth0 type veth peer name eth0 netns $node1
up() {
    hostname $1
    ip address add $2/24 dev eth0
    ip link set eth0 up
    ip link set lo up
}
up node0 10.0.0.1
$ON_NODE1 sh -ec "$(declare -f up); up node1 10.0.0.2"
code=0
"$@" || code=$?
grep eth0 /proc/net/dev > $FOLDER/received0
$ON_NODE1 grep eth0 /proc/net/dev > $FOLDER/received1
exit $code
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames $SLURM_JOB_NODELIST" ] && printf 'node0\\nnode1\\n'
"""
# The command, without srun's own options, once per node.
SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
SLURM_NODEID=0 "$@" & node0=$!
SLURM_NODEID=1 $ON_NODE1 "$@" & node1=$!
wait $node0; code0=$?
wait $node1; code1=$?
echo $code0 $code1 > $FOLDER/codes
exit $((code0 | code1))
"""
