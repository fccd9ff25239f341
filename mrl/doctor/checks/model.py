"""The configuration: the model folder against its layout, and the folder on every host."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, error
from mrl.doctor.seen import Seen, unlike

NAME = "model"


def check(seen: Seen) -> Iterator[Finding]:
    """Mistakes of the configuration; a model folder that a host does not have, or has otherwise."""
    if not seen.wanted:
        return
    for mistake in seen.wanted.mistakes:
        yield error(
            NAME,
            [],
            mistake,
            "`mrl train` refuses this configuration",
            "change the key that is named; mrl plan placement explains the rest",
        )
    prints = {host.host: host.model for host in seen.hosts if host.model is not None}
    why = "ranks and engines there load the model from it"
    for host, found in prints.items():
        if not found and any(prints.values()):
            what = f"the model folder {seen.wanted.model} is not here"
            yield error(
                NAME,
                [host],
                what,
                why,
                "keep it on storage that all hosts share, or copy it: rsync -a HOST:FOLDER/ FOLDER/",
            )
    for host, found in unlike({host: found for host, found in prints.items() if found}).items():
        what = f"the model folder {seen.wanted.model} has other files here than on the other hosts (checksum {found})"
        yield error(
            NAME, [host], what, "ranks would start from different weights", "rsync -a --checksum HOST:FOLDER/ FOLDER/"
        )
