#!/usr/bin/env bash
# Ray cluster of a job. train.sbatch sources it for start_ray, nodes and stop_ray; each node runs `ray_cluster.sh node`.
# The job uses a block of 200 ports, derived from its id; if Ray of another job listens there, the next free block.

listens() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# free_block ADDRESS: prints the first port of a block whose first two ports (head, node) are free on this machine.
free_block() {
    local n port
    for ((n = 0; n < 100; n++)); do
        port=$((12000 + (MRL_JOB + n) % 100 * 200))
        listens "$1" $port || listens "$1" $((port + 1)) || { echo $port; return; }
    done
    echo "no block of ports is free on $(hostname)" >&2
    return 1
}

own_address() {
    if [ "$MRL_INTERFACE" ]; then
        ip -4 -o address show dev "$MRL_INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}'
    else # without loopback addresses, to which some systems resolve their own name
        { getent ahostsv4 "$(hostname)" | awk '{print $1}'; hostname -I | tr ' ' '\n'; } | grep -v '^127\.' | head -n 1
    fi
}

# on_all_nodes COMMAND...: replaces the shell by a step with one process per node; run it in the background, so signals reach the step.
on_all_nodes() {
    local group=()
    [ "${SLURM_HET_SIZE:-1}" = 1 ] || group=(--het-group=0-$((SLURM_HET_SIZE - 1)))
    exec "${step[@]}" "${group[@]}" --ntasks-per-node=1 "$@"
}

# start_ray: starts Ray on all nodes, with the head on this node. Sets `address`; `ray`, the process id of the step; `on_head`, a
# command prefix that runs on this node only; `joined`, a command that with SECONDS NODE... waits for nodes and names missing ones.
start_ray() {
    local first=() port
    export MRL_JOB=$SLURM_JOB_ID MRL_HEAD=$SLURMD_NODENAME MRL_HEAD_IP MRL_HEAD_PORT run_dir
    MRL_HEAD_IP=$(own_address) && port=$(free_block "$MRL_HEAD_IP") || return 1
    MRL_HEAD_PORT=$port address=$MRL_HEAD_IP:$port
    [ "${SLURM_HET_SIZE:-1}" = 1 ] || first=(--het-group=0)
    on_head=("${step[@]}" "${first[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME")
    joined=("${on_head[@]}" "${inside[@]}" "$python" -m mrl.placement.ray_cluster "$address")
    on_all_nodes --no-kill --output="$run_dir/logs/ray_%N.log" bash "$MRL_CHECKOUT/slurm/ray_cluster.sh" node &
    ray=$!
}

nodes() {
    local part list lists=$SLURM_JOB_NODELIST
    for ((part = 1; part < ${SLURM_HET_SIZE:-1}; part++)); do
        list=SLURM_JOB_NODELIST_HET_GROUP_$part
        lists+=,${!list}
    done
    scontrol show hostnames "$lists"
}

# unreachable: succeeds if Slurm itself does not reach a node of the job.
unreachable() { sinfo --noheader --Node --nodes="$(nodes | paste -sd,)" --format=%T | grep -Eq '[*]|down|fail'; }

# stop_ray: ends all processes of the job on its nodes. srun forwards USR1, but turns TERM into a kill, after which nodes could
# not clean up.
stop_ray() {
    local end=$((SECONDS + MRL_STOP_S))
    while kill -USR1 "$ray" 2>/dev/null && ((SECONDS < end)); do sleep 1; done
    kill -TERM "$ray" 2>/dev/null && say "processes on some node did not end in $MRL_STOP_S s; Slurm kills them"
}

# node: runs Ray until it ends or gets a signal; then copies the logs and ends all processes that Ray started.
node() {
    local port tmp=/tmp/mrl-$MRL_JOB.$SLURM_PROCID gpus=${SLURM_GPUS_ON_NODE:-0} role stopping= end=$((SECONDS + MRL_JOIN_S))
    ray=
    trap on_signal USR1 TERM
    (setsid bash "$MRL_CHECKOUT/slurm/ray_cluster.sh" guard $$ "$tmp" </dev/null >/dev/null 2>&1 &)
    if [ "$SLURMD_NODENAME" = "$MRL_HEAD" ]; then
        port=$MRL_HEAD_PORT
        role=(--head --port="$port" --node-ip-address="$MRL_HEAD_IP" --include-dashboard=false --ray-client-server-port=$((port + 2)))
    else
        until listens "$MRL_HEAD_IP" "$MRL_HEAD_PORT"; do
            [ -z "$stopping" ] && ((SECONDS < end)) || { echo "nothing listens at $MRL_HEAD_IP:$MRL_HEAD_PORT"; return 1; }
            sleep 0.5
        done
        port=$(free_block localhost) || return 1
        role=(--address="$MRL_HEAD_IP:$MRL_HEAD_PORT")
    fi
    until [ "$stopping" ] || ray_node || [ "$stopping" ] || ((SECONDS > end)); do # Ray gives up after 30 s on a slow machine
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
    # shellcheck disable=SC2086
    MRL_RAY_OF=$MRL_JOB "${inside[@]}" "$python" -m ray.scripts.scripts start "${role[@]}" --block --temp-dir="$tmp" \
        --node-name="$SLURMD_NODENAME" --num-gpus="$gpus" --num-cpus=$((gpus ? gpus : SLURM_CPUS_ON_NODE)) \
        --node-manager-port=$((port + 1)) --object-manager-port=$((port + 3)) --runtime-env-agent-port=$((port + 4)) \
        --dashboard-agent-grpc-port=$((port + 5)) --dashboard-agent-listen-port=$((port + 6)) \
        --metrics-export-port=$((port + 7)) --min-worker-port=$((port + 10)) --max-worker-port=$((port + 199)) \
        --disable-usage-stats $MRL_RAY_OPTIONS &
    ray=$!
    wait "$ray"
    status=$?
    trap '' USR1 # srun sends it to all processes of the step, also during the cleanup
    end_leftovers
    mkdir -p "$run_dir/logs/ray_$SLURMD_NODENAME"
    cp -r "$tmp"/session_latest/logs/. "$run_dir/logs/ray_$SLURMD_NODENAME"
    rm -rf "$tmp"
    return $status
}

leftovers() { grep -lsz "^MRL_RAY_OF=$MRL_JOB\$" /proc/[0-9]*/environ | cut -d/ -f3; }

# end_leftovers: finds processes by their environment, because Slurm without cgroups loses processes whose parent has ended.
end_leftovers() {
    local end=$((SECONDS + 10)) signal=TERM pids
    # shellcheck disable=SC2086
    while pids=$(leftovers) && [ "$pids" ] && ((SECONDS < end + 10)); do
        kill -$signal $pids 2>/dev/null
        ((SECONDS < end)) || signal=KILL
        sleep 0.5
    done
}

# guard PID FOLDER: cleans up if Slurm kills the node's script before it does. It is a daemon, as Ray's processes are.
guard() {
    trap '' TERM USR1
    while kill -0 "$1" 2>/dev/null; do sleep 1; done
    end_leftovers
    rm -rf "$2"
}

case ${1:-} in
    node)
        # shellcheck source=env.sh
        source "$MRL_CHECKOUT/slurm/env.sh"
        node
        ;;
    guard) guard "$2" "$3" ;;
esac
