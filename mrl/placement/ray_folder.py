"""The private folder for the logs, sockets and other files of a Ray cluster that mrl starts.

Ray creates its own folders with mode 777, so other users of the machine could read the logs and replace the sockets. mrl puts
them below a folder that only its user can enter.
"""

import os
import stat
import tempfile
from pathlib import Path

MAX_PATH_BYTES = 41
"""Largest length of the folder's path. The path of a Unix socket has at most 107 bytes, and the names that Ray appends
(session_DATE_TIME_PID/sockets/plasma_store.N) have up to 66 bytes."""


def private_ray_folder() -> Path:
    """Return the folder mrl-ray-UID, and create it with mode 700 if it is missing.

    Its parent is RAY_TMPDIR or the folder of temporary files. If the path of the latter is too long for sockets, the parent is
    /tmp. Raises ValueError if RAY_TMPDIR is too long, or if another user could access or has created the folder.
    """
    name = f"mrl-ray-{os.getuid()}"
    chosen = os.environ.get("RAY_TMPDIR")
    folder = Path(chosen or tempfile.gettempdir()).absolute() / name
    if len(os.fsencode(folder)) > MAX_PATH_BYTES:
        if chosen:
            raise ValueError(
                f"RAY_TMPDIR={chosen}: the path of Ray's folder {folder} has {len(os.fsencode(folder))} bytes; it may have at "
                f"most {MAX_PATH_BYTES}, so that Ray can create sockets in it. Set RAY_TMPDIR to a shorter path."
            )
        folder = Path("/tmp") / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(
            f"{folder}, the folder for Ray's logs and sockets, has the mode {stat.filemode(found.st_mode)} and the owner "
            f"{found.st_uid}; expected a folder with the mode drwx------ and the owner {os.getuid()}. Remove it, or set "
            "RAY_TMPDIR to another folder."
        )
    return folder
