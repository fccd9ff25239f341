#!/usr/bin/env bash
# The Ray cluster of a job. Sourced by train.sbatch for start_ray, nodes and stop_ray; each node runs `ray_cluster.sh node`.
# Ports are a block of 200 that follows from the job's id, or a later one where another job's Ray listens there already.

listens() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# free_block ADDRESS: the first port of a block whose first two, those of a head and of a node, are free on this machine.
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
    else # not the loopback address that some systems give their own name
        { getent ahostsv4 "$(hostname)" | awk '{print $1}'; hostname -I | tr ' ' '\n'; } | grep -v '^127\.' | head -n 1
    fi
}

# everywhere COMMAND...: becomes a step with one process on each node; for the background, where signals then reach the step.
everywhere() {
    local group=()
    [ "${SLURM_HET_SIZE:-1}" = 1 ] || group=(--het-group=0-$((SLURM_HET_SIZE - 1)))
    exec "${step[@]}" "${group[@]}" --ntasks-per-node=1 "$@"
}

# start_ray: one step on all nodes, this one the head. Sets address; ray, the process to wait for; on_head, what runs a command on
# this node alone; joined, which with SECONDS NODE... tells whether these are in the cluster by then, and names those that are not.
start_ray() {
    local first=() port
    export MRL_JOB=$SLURM_JOB_ID MRL_HEAD=$SLURMD_NODENAME MRL_HEAD_IP MRL_HEAD_PORT run_dir
    MRL_HEAD_IP=$(own_address) && port=$(free_block "$MRL_HEAD_IP") || return 1
    MRL_HEAD_PORT=$port address=$MRL_HEAD_IP:$port
    [ "${SLURM_HET_SIZE:-1}" = 1 ] || first=(--het-group=0)
    on_head=("${step[@]}" "${first[@]}" --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME")
    joined=("${on_head[@]}" "${inside[@]}" "$python" -m mrl.placement.ray_cluster "$address")
    everywhere --no-kill --output="$run_dir/logs/ray_%N.log" bash "$MRL_CHECKOUT/slurm/ray_cluster.sh" node &
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

# unreachable: whether Slurm does not hear from a node of the job, which then is to blame.
unreachable() { sinfo --noheader --Node --nodes="$(nodes | paste -sd,)" --format=%T | grep -Eq '[*]|down|fail'; }

# stop_ray: nothing of the job is left on its nodes afterwards, whatever state it was in. srun passes USR1 on; of TERM it makes a
# kill, after which nodes could not tidy up.
stop_ray() {
    local end=$((SECONDS + MRL_STOP_S))
    while kill -USR1 "$ray" 2>/dev/null && ((SECONDS < end)); do sleep 1; done
    kill -TERM "$ray" 2>/dev/null && say "processes on some node did not end in $MRL_STOP_S s; Slurm kills them"
}

# What a node runs: Ray until it ends or is told to; then the logs are kept, and every process that Ray started is ended.
node() {
    local port tmp=/tmp/mrl-$MRL_JOB.$SLURM_PROCID gpus=${SLURM_GPUS_ON_NODE:-0} role told= end=$((SECONDS + MRL_JOIN_S))
    ray=
    trap heed USR1 TERM
    (setsid bash "$MRL_CHECKOUT/slurm/ray_cluster.sh" guard $$ "$tmp" </dev/null >/dev/null 2>&1 &)
    if [ "$SLURMD_NODENAME" = "$MRL_HEAD" ]; then
        port=$MRL_HEAD_PORT
        role=(--head --port="$port" --node-ip-address="$MRL_HEAD_IP" --include-dashboard=false --ray-client-server-port=$((port + 2)))
    else
        until listens "$MRL_HEAD_IP" "$MRL_HEAD_PORT"; do
            [ -z "$told" ] && ((SECONDS < end)) || { echo "nothing listens at $MRL_HEAD_IP:$MRL_HEAD_PORT"; return 1; }
            sleep 0.5
        done
        port=$(free_block localhost) || return 1
        role=(--address="$MRL_HEAD_IP:$MRL_HEAD_PORT")
    fi
    until [ "$told" ] || ray_node || [ "$told" ] || ((SECONDS > end)); do # Ray itself waits 30 s for a slow machine, then gives up
        echo "Ray ended on $SLURMD_NODENAME; it is started again"
        sleep 1
    done
}

heed() {
    told=1
    [ -z "$ray" ] || kill -TERM "$ray" 2>/dev/null
}

ray_node() {
    local status
    trap heed USR1 TERM
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
    trap '' USR1 # which srun gives to all processes of the step, those that tidy up among them
    end_leftovers
    mkdir -p "$run_dir/logs/ray_$SLURMD_NODENAME"
    cp -r "$tmp"/session_latest/logs/. "$run_dir/logs/ray_$SLURMD_NODENAME"
    rm -rf "$tmp"
    return $status
}

leftovers() { grep -lsz "^MRL_RAY_OF=$MRL_JOB\$" /proc/[0-9]*/environ | cut -d/ -f3; }

# They are known by their environment: Slurm loses sight of a process whose parent has ended, unless it counts by cgroups.
end_leftovers() {
    local end=$((SECONDS + 10)) signal=TERM pids
    # shellcheck disable=SC2086
    while pids=$(leftovers) && [ "$pids" ] && ((SECONDS < end + 10)); do
        kill -$signal $pids 2>/dev/null
        ((SECONDS < end)) || signal=KILL
        sleep 0.5
    done
}

# guard PID FOLDER: tidies up where Slurm kills the node's script before it can. It is a daemon: who overlooks Ray's overlooks this one.
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
