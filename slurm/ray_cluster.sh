#!/usr/bin/env bash
# The Ray cluster of a job. train.sbatch sources this file and calls start_ray and stop_ray; each node runs `ray_cluster.sh node`.
# The job id selects a block of 200 ports. If another job's Ray uses this block on a node, the next free block is used there.

# listens HOST PORT: succeeds if a process listens at this port.
listens() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# free_block ADDRESS: prints the first port of a block in which the ports of Ray's head and of Ray's node manager are free.
free_block() {
    local n port
    for ((n = 0; n < 100; n++)); do
        port=$((12000 + (MRL_JOB + n) % 100 * 200))
        listens "$1" $port || listens "$1" $((port + 1)) || { echo $port; return; }
    done
    echo "no block of ports is free on $(hostname)" >&2
    return 1
}

# own_address: prints the IPv4 address under which other nodes reach this node.
own_address() {
    if [ "$MRL_INTERFACE" ]; then
        ip -4 -o address show dev "$MRL_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}'
    else # loopback addresses are left out, because on some systems the host's own name resolves to one
        { getent ahostsv4 "$(hostname)" | awk '{print $1}'; hostname -I | tr ' ' '\n'; } | grep -v '^127\.' | head -n 1
    fi
}

# on_all_nodes COMMAND...: replaces this shell by a Slurm step that runs COMMAND once on each node. Callers run it in the background, so
# that `$!` is the process id of the step and signals reach the step.
on_all_nodes() {
    local group=()
    [ "${SLURM_HET_SIZE:-1}" = 1 ] || group=(--het-group=0-$((SLURM_HET_SIZE - 1)))
    exec "${step[@]}" "${group[@]}" --ntasks-per-node=1 "$@"
}

# start_ray: starts Ray on all nodes, with the head on this node. It sets these variables:
#   address   address of Ray's head
#   ray       process id of the step
#   on_head   prefix that runs a command on this node only
#   joined    command that takes SECONDS NODE..., waits until the nodes have joined, and names those that have not
start_ray() {
    local first=() port
    export MRL_JOB=$SLURM_JOB_ID MRL_HEAD=$SLURMD_NODENAME MRL_HEAD_IP MRL_HEAD_PORT run_dir
    MRL_HEAD_IP=$(own_address) && port=$(free_block "$MRL_HEAD_IP") || return 1
    MRL_HEAD_PORT=$port address=$MRL_HEAD_IP:$port
    [ "${SLURM_HET_SIZE:-1}" = 1 ] || first=(--het-group=0)
    on_head=("${step[@]}" "${first[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME")
    joined=("${on_head[@]}" "${inside[@]}" "$python" -P -m mrl.placement.ray_cluster "$address")
    on_all_nodes --no-kill --output="$run_dir/logs/ray_%N.log" bash "$MRL_SCRIPTS/ray_cluster.sh" node &
    ray=$!
}

# nodes: prints the names of the job's nodes, one on each line.
nodes() {
    local part list lists=$SLURM_JOB_NODELIST
    for ((part = 1; part < ${SLURM_HET_SIZE:-1}; part++)); do
        list=SLURM_JOB_NODELIST_HET_GROUP_$part
        lists+=,${!list}
    done
    scontrol show hostnames "$lists"
}

# unreachable: succeeds if Slurm itself cannot reach some node of the job.
unreachable() { sinfo --noheader --Node --nodes="$(nodes | paste -sd,)" --format=%T | grep -Eq '[*]|down|fail'; }

# stop_ray: ends all processes of the job on its nodes. It sends USR1, which srun forwards. srun would turn TERM into KILL, and then the
# nodes could not clean up.
stop_ray() {
    local end=$((SECONDS + MRL_STOP_S))
    while kill -USR1 "$ray" 2>/dev/null && ((SECONDS < end)); do sleep 1; done
    kill -TERM "$ray" 2>/dev/null && say "processes on a node did not end within $MRL_STOP_S s; Slurm kills them"
}

# node: runs Ray on this node until it ends or this script gets a signal. Then it copies Ray's logs and ends all processes that Ray started.
node() {
    local port tmp=/tmp/mrl-$MRL_JOB.$SLURM_PROCID gpus=${SLURM_GPUS_ON_NODE:-0} role stopping= end=$((SECONDS + MRL_JOIN_S))
    ray=
    trap on_signal USR1 TERM
    (setsid bash "$MRL_SCRIPTS/ray_cluster.sh" guard $$ "$tmp" </dev/null >/dev/null 2>&1 &)
    if [ "$SLURMD_NODENAME" = "$MRL_HEAD" ]; then
        port=$MRL_HEAD_PORT
        role=(--head --port="$port" --node-ip-address="$MRL_HEAD_IP" --include-dashboard=false --ray-client-server-port=$((port + 2)))
    else
        until listens "$MRL_HEAD_IP" "$MRL_HEAD_PORT"; do
            [ -z "$stopping" ] && ((SECONDS < end)) || { echo "the head of Ray does not listen at $MRL_HEAD_IP:$MRL_HEAD_PORT"; return 1; }
            sleep 0.5
        done
        port=$(free_block localhost) || return 1
        role=(--address="$MRL_HEAD_IP:$MRL_HEAD_PORT")
    fi
    until [ "$stopping" ] || ray_node || [ "$stopping" ] || ((SECONDS > end)); do # on a slow machine, Ray gives up its start after 30 s
        echo "Ray ended on $SLURMD_NODENAME; restarting it"
        sleep 1
    done
}

on_signal() {
    stopping=1
    [ -z "$ray" ] || kill -TERM "$ray" 2>/dev/null
}

ray_node() {
    local status
    trap on_signal USR1 TERM
    rm -rf "$tmp"
    # Other users must not read the logs, or use the sockets. Ray gives its own folder the mode 777, so that is a folder in this one.
    mkdir -m 700 "$tmp" || return 1
    # shellcheck disable=SC2086
    MRL_RAY_OF=$MRL_JOB "${inside[@]}" "$python" -P -m ray.scripts.scripts start "${role[@]}" --block --temp-dir="$tmp/ray" \
        --node-name="$SLURMD_NODENAME" --num-gpus="$gpus" --num-cpus=$((gpus ? gpus : SLURM_CPUS_ON_NODE)) \
        --node-manager-port=$((port + 1)) --object-manager-port=$((port + 3)) --runtime-env-agent-port=$((port + 4)) \
        --dashboard-agent-grpc-port=$((port + 5)) --dashboard-agent-listen-port=$((port + 6)) \
        --metrics-export-port=$((port + 7)) --min-worker-port=$((port + 10)) --max-worker-port=$((port + 199)) \
        --disable-usage-stats $MRL_RAY_OPTIONS &
    ray=$!
    wait "$ray"
    status=$?
    trap '' USR1 # srun sends USR1 to all processes of the step, also during the cleanup
    end_leftovers
    mkdir -p "$run_dir/logs/ray_$SLURMD_NODENAME"
    cp -r "$tmp"/ray/session_latest/logs/. "$run_dir/logs/ray_$SLURMD_NODENAME"
    rm -rf "$tmp"
    return $status
}

# leftovers: prints the process ids of the processes that Ray has started on this node. They are found by their environment, because
# without cgroups Slurm does not know processes whose parent has ended.
leftovers() { grep -lsz "^MRL_RAY_OF=$MRL_JOB\$" /proc/[0-9]*/environ | cut -d/ -f3; }

# end_leftovers: ends the processes that Ray has started on this node.
end_leftovers() {
    local end=$((SECONDS + 10)) signal=TERM pids
    # shellcheck disable=SC2086
    while pids=$(leftovers) && [ "$pids" ] && ((SECONDS < end + 10)); do
        kill -$signal $pids 2>/dev/null
        ((SECONDS < end)) || signal=KILL
        sleep 0.5
    done
}

# guard PID FOLDER: waits until the node's script (PID) has ended, and then cleans up, in case Slurm killed the script before it did so. It
# is a daemon, as Ray's processes are, so it survives the script whenever they do.
guard() {
    trap '' TERM USR1
    while kill -0 "$1" 2>/dev/null; do sleep 1; done
    end_leftovers
    rm -rf "$2"
}

case ${1:-} in
    node)
        # shellcheck source=env.sh
        source "$MRL_SCRIPTS/env.sh"
        node
        ;;
    guard) guard "$2" "$3" ;;
esac
