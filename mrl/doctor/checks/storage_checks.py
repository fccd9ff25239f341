"""Checks of folders: free space and speed where a run writes, /dev/shm, and the model folder on every host."""

from collections.abc import Iterator

from mrl.doctor.findings import DoctorFinding, error, warning
from mrl.doctor.host_facts import GB, ClusterFacts, FolderFacts, HostFacts, outliers

MIN_FREE_BYTES = 5 * GB  # less free space gives a warning
MAX_USED_FRACTION = 0.95  # Ray creates no objects on a file system that is fuller than this
MIN_INODES = 10_000  # fewer free inodes give a warning; each new file takes one inode
MIN_BYTES_PER_S = 20e6  # a lower write speed gives a warning
OBJECT_STORE_BYTES = 512 * 2**20  # size of Ray's object store in a run on one machine
SHM_BYTES_PER_GPU = 2**30  # size of the buffers that NCCL and SGLang share between processes of a host
RESIZE_SHM = "mount -o remount,size=16g /dev/shm; in a container --shm-size=16g (or --ipc=host)"


def check_disk(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Check permission, free space, inodes and write speed of the folders that a run writes to."""
    for host in cluster.hosts:
        for folder in host.folders:
            yield from _check_folder(host, folder, cluster)


def _check_folder(host: HostFacts, folder: FolderFacts, cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    name, where = f"{folder.path} ({folder.purpose})", [host.host]
    if folder.error:
        yield error(
            where,
            f"{name} cannot be written: {folder.error}",
            "a run would fail, or hang, at its first write",
            f"df {folder.path}; mount | grep {folder.path}; choose another folder: {_choose_folder(folder)}",
        )
        return
    yield from _check_free_space(host, folder, cluster.requirements.checkpoint_bytes if cluster.requirements else 0)
    if folder.free_inodes is not None and folder.free_inodes < MIN_INODES:
        yield warning(
            where,
            f"{name} can hold {folder.free_inodes} more files",
            "a run fails with 'No space left on device' although there is free space",
            f"df -i {folder.path}; remove old files, or {_choose_folder(folder)}",
        )
    if folder.bytes_per_s is not None and folder.bytes_per_s < MIN_BYTES_PER_S:
        yield warning(
            where,
            f"{name} writes {folder.bytes_per_s / 1e6:.1f} MB/s",
            "writing checkpoints and logs takes long",
            f"use local or parallel storage: {_choose_folder(folder)}",
        )


def _check_free_space(host: HostFacts, folder: FolderFacts, checkpoint_bytes: int) -> Iterator[DoctorFinding]:
    where, name = [host.host], f"{folder.path} ({folder.purpose})"
    free, used = folder.free_bytes, 1 - folder.free_bytes / max(1, folder.total_bytes)
    if folder.purpose == "run" and checkpoint_bytes > free:
        needed = f"the checkpoints that the run will write need about {checkpoint_bytes / GB:.1f} GB"
        what = f"{name} has {free / GB:.1f} GB free; {needed}"
        fix = f"{_choose_folder(folder)}, or keep fewer checkpoints: checkpoint.keep_last=1"
        yield error(where, what, "the run would fail when it writes a checkpoint", fix)
    elif folder.purpose == "temporary" and used > MAX_USED_FRACTION:
        why = f"Ray creates no objects on a file system that is more than {MAX_USED_FRACTION:.0%} full"
        fix = f"remove old sessions (ls -d /tmp/mrl-ray-*), or {_choose_folder(folder)}"
        yield error(where, f"{name} is {used:.0%} full", why, fix)
    elif free < MIN_FREE_BYTES:
        why = "logs and checkpoints of a run would fill the file system"
        yield warning(
            where, f"{name} has {free / GB:.1f} GB free", why, f"remove old files, or {_choose_folder(folder)}"
        )


def _choose_folder(folder: FolderFacts) -> str:
    return "run.dir=FOLDER" if folder.purpose == "run" else "export TMPDIR=FOLDER RAY_TMPDIR=FOLDER"


def check_shared_memory(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Check the space in /dev/shm for Ray's objects and for the buffers of NCCL and SGLang."""
    for host in cluster.hosts:
        shm, where = host.shared_memory, [host.host]
        needed = OBJECT_STORE_BYTES + SHM_BYTES_PER_GPU * len(host.gpus.cards)
        if shm.error:
            why = "processes of one host exchange tensors there, so no run would start"
            fix = "mount -t tmpfs -o size=16g tmpfs /dev/shm"
            yield error(where, f"/dev/shm cannot be used: {shm.error}", why, fix)
        elif shm.total_bytes < needed:
            what = f"/dev/shm has {shm.total_bytes / GB:.2f} GB; {needed / GB:.1f} GB are needed"
            severity = error if shm.total_bytes < OBJECT_STORE_BYTES else warning
            yield severity(
                where, what, "a process that writes to a full /dev/shm is killed by SIGBUS (bus error)", RESIZE_SHM
            )
        elif shm.free_bytes < needed:
            free = f"{shm.free_bytes / GB:.2f} of {shm.total_bytes / GB:.1f} GB free"
            yield warning(
                where,
                f"/dev/shm has {free}; {needed / GB:.1f} GB are needed",
                "killed processes leave files there; a process that writes to a full /dev/shm is killed by SIGBUS",
                "ls -la /dev/shm; remove files that no process has open (lsof +D /dev/shm)",
            )


def check_model(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Report errors in the config, and find hosts on which the model folder is missing or different."""
    if not cluster.requirements:  # the command has no config keys, so there is no model folder to check
        return
    folder = cluster.requirements.model
    for mistake in cluster.requirements.mistakes:
        fix = "change the key that the message names; `mrl plan placement` then shows the resulting layout"
        yield error([], mistake, "`mrl train` rejects this config", fix)
    # None: the config names no model folder. "": the host does not have the folder.
    checksums = {host.host: host.model_checksum for host in cluster.hosts if host.model_checksum is not None}
    for host, checksum in checksums.items():
        if not checksum and any(checksums.values()):
            fix = "put the folder on storage that all hosts share, or copy it: rsync -a HOST:FOLDER/ FOLDER/"
            yield error(
                [host], f"the model folder {folder} is missing", "ranks and engines load the model from it", fix
            )
    existing = {host: checksum for host, checksum in checksums.items() if checksum}
    for host, checksum in outliers(existing).items():  # the hosts whose checksum is not the most common one
        what = f"the files of the model folder {folder} differ from those of the other hosts (checksum {checksum})"
        fix = "rsync -a --checksum HOST:FOLDER/ FOLDER/"
        yield error([host], what, "ranks would start from different model weights", fix)
