# Settings of a job, sourced by train.sbatch and on every node. Export a variable before submission to change it.
# Lines of your site (module load, NCCL_*, proxies) belong here too: all processes of the job inherit them.
: "${MRL_CHECKOUT:=$SLURM_SUBMIT_DIR}" # on a file system that all nodes share
: "${MRL_CONTAINER:=}"   # image with the packages: a .sif runs in Apptainer, anything else in Pyxis; empty: no container
: "${MRL_MOUNTS:=}"      # mounts in addition to checkout, working directory, run.dir and /tmp: A,B or A:B,...
: "${MRL_PYTHON:=}"      # default: the checkout's .venv; in a container its python3
: "${MRL_INTERFACE:=}"   # network interface of Ray, gloo and NCCL's bootstrap, such as ib0; default: that of the host name
: "${MRL_RAY_OPTIONS:=}" # additional options of `ray start`, such as --object-store-memory=8000000000
: "${MRL_DOCTOR_S:=120}" # deadline (s) of `mrl doctor`, whose errors end the job before Ray starts; 0: skip it
: "${MRL_JOIN_S:=300}"   # deadline (s) for all nodes to join Ray; then the job ends and names the missing ones
: "${MRL_STOP_S:=60}"    # deadline (s) for processes on the nodes to end; then they are killed
: "${MRL_REQUEUES:=5}"   # limit of requeues after lost nodes; requeues after a preemption do not count

# The token gives access to Ray. It reaches the nodes in the environment, not in a file, a log or a command line.
: "${RAY_AUTH_TOKEN:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export MRL_CHECKOUT RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_agent_register_timeout_ms=$((MRL_JOIN_S * 1000)) # a slow file system delays Ray's agents
export PYTHONPATH=$MRL_CHECKOUT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if [ "$MRL_INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$MRL_INTERFACE NCCL_SOCKET_IFNAME=$MRL_INTERFACE
fi
[ -z "${NCCL_DEBUG:-}" ] || export NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$run_dir/logs/nccl_%h_%p.log}

python=${MRL_PYTHON:-$MRL_CHECKOUT/.venv/bin/python}
step=(srun --overlap --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --open-mode=append)
inside=() # command prefix in Apptainer
if [ "$MRL_CONTAINER" ]; then
    python=${MRL_PYTHON:-python3}
    binds=
    for folder in ${MRL_CHECKOUT} "$PWD" "${MRL_SWEEP:-$run_dir}" /tmp ${MRL_MOUNTS//,/ }; do
        [[ $folder == *:* ]] && binds+=,$folder || binds+=,$folder:$folder
    done
    case $MRL_CONTAINER in
        *.sif) inside=(apptainer exec --nv --bind "${binds#,}" "$MRL_CONTAINER") ;;
        *) step+=(--container-image="$MRL_CONTAINER" --container-mounts="${binds#,}" --container-workdir="$PWD") ;;
    esac
fi
