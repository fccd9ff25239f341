# Settings of a job. The batch script and the script on every node source this file. To change a setting, export the variable before
# you submit the job. Add commands that your cluster needs (module load, NCCL_*, proxies) to this file, so that all processes of the job
# inherit them.
: "${MRL_CHECKOUT=$SLURM_SUBMIT_DIR}" # the checkout, on a file system that all nodes share; empty: mrl is an installed package
: "${MRL_SCRIPTS:=$MRL_CHECKOUT/slurm}" # folder with these scripts, such as a changed copy, on a file system that all nodes share
: "${MRL_CONTAINER:=}"   # image with the packages; Apptainer runs a .sif file, Pyxis any other image; empty: no container
: "${MRL_MOUNTS:=}"      # mounts in addition to checkout, working directory, run.dir and /tmp: FOLDER,FOLDER or FOLDER:TARGET,...
: "${MRL_PYTHON:=}"      # Python interpreter; default: that of the checkout's .venv, or python3 in a container
: "${MRL_INTERFACE:=}"   # network interface for Ray, gloo and the first contact of NCCL's ranks, such as ib0; default: that of the host name's address
: "${MRL_RAY_OPTIONS:=}" # additional options of `ray start`, such as --object-store-memory=8000000000
: "${MRL_DOCTOR_S:=120}" # deadline (s) for `mrl doctor`, whose errors end the job before Ray starts; 0: do not run it
: "${MRL_JOIN_S:=300}"   # deadline (s) for all nodes to join Ray; after it the job ends and names the missing nodes
: "${MRL_STOP_S:=60}"    # deadline (s) for the processes on the nodes to end; after it they are killed
: "${MRL_REQUEUES:=5}"   # largest number of requeues after a lost node; requeues after a preemption are not limited

# Everyone who has this token can use the job's Ray cluster. It reaches the nodes in the environment and is in no file, log or command line.
: "${RAY_AUTH_TOKEN:=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export MRL_CHECKOUT MRL_SCRIPTS RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_agent_register_timeout_ms=$((MRL_JOIN_S * 1000)) # Ray's agents start late on a slow file system
[ -z "$MRL_CHECKOUT" ] || export PYTHONPATH=$MRL_CHECKOUT${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if [ "$MRL_INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$MRL_INTERFACE NCCL_SOCKET_IFNAME=$MRL_INTERFACE
fi
[ -z "${NCCL_DEBUG:-}" ] || export NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$run_dir/logs/nccl_%h_%p.log}

python=${MRL_PYTHON:-${MRL_CHECKOUT:+$MRL_CHECKOUT/.venv/bin/}python}
step=(srun --overlap --cpu-bind=none --kill-on-bad-exit=0 --wait=0 --open-mode=append)
inside=() # prefix that runs a command in Apptainer
if [ "$MRL_CONTAINER" ]; then
    python=${MRL_PYTHON:-python3}
    binds=
    for folder in ${MRL_CHECKOUT:+"$MRL_CHECKOUT"} "$MRL_SCRIPTS" "$PWD" "${MRL_SWEEP:-$run_dir}" /tmp ${MRL_MOUNTS//,/ }; do
        [[ $folder == *:* ]] && binds+=,$folder || binds+=,$folder:$folder
    done
    case $MRL_CONTAINER in
        *.sif) inside=(apptainer exec --nv --bind "${binds#,}" "$MRL_CONTAINER") ;;
        *) step+=(--container-image="$MRL_CONTAINER" --container-mounts="${binds#,}" --container-workdir="$PWD") ;;
    esac
fi
