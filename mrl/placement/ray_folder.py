"""The private folder for the logs, sockets and other files of a Ray cluster that mrl starts.

Ray gives its folders the mode 777, so other users of the machine could read the logs and replace the sockets. Therefore mrl puts
Ray's folder into a folder that only the user of the run can enter.
"""

import os
import stat
import tempfile
from pathlib import Path

MAX_PATH_BYTES = 41
"""Largest length of the path of Ray's folder. The path of a Unix socket has at most 107 bytes, and the names that Ray appends
(session_DATE_TIME_PID/sockets/plasma_store.N) have up to 66 bytes."""

RAY = "r"
"""Name of Ray's folder. It is short, because it is a part of the path of each socket."""


def private_ray_folder() -> Path:
    """Return the path of Ray's folder, whose parent has the mode 700. Create the parent if it is missing.

    The parent is RAY_TMPDIR itself if only this user can enter it. Otherwise the parent is mrl-ray-UID in RAY_TMPDIR. If
    RAY_TMPDIR is not set, the parent is mrl-ray-UID in the folder of temporary files, or in /tmp if the path would be too long
    for sockets. Raises ValueError if RAY_TMPDIR is too long, or if another user could access or has created mrl-ray-UID.
    """
    chosen, name = os.environ.get("RAY_TMPDIR"), f"mrl-ray-{os.getuid()}"
    base = Path(chosen or tempfile.gettempdir()).absolute()
    path = base / RAY if chosen and _is_private(base) else base / name / RAY
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        if chosen:
            raise ValueError(
                f"RAY_TMPDIR={chosen}: the path of Ray's folder {path} has {len(os.fsencode(path))} bytes; it may have at "
                f"most {MAX_PATH_BYTES}, so that Ray can create sockets in it. Set RAY_TMPDIR to a shorter path, or, if you own "
                "this folder, run `chmod 700` on it; the path is then shorter."
            )
        path = Path("/tmp") / name / RAY
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        found = folder.lstat()
        raise ValueError(
            f"{folder}, the folder for Ray's logs and sockets, has the mode {stat.filemode(found.st_mode)} and the owner "
            f"{found.st_uid}; expected a folder with the mode drwx------ and the owner {os.getuid()}. Remove it, or set "
            "RAY_TMPDIR to another folder."
        )
    return path  # Ray creates this folder with the mode 777; the parent keeps other users out


def _is_private(folder: Path) -> bool:
    """Return whether `folder` is a folder and not a link, belongs to this user, and gives other users no permission."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
