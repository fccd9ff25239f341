"""Ray's token."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen, unlike

NAME = "token"
MAKE = (
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32), the same on all hosts and where mrl is called"
)


def check(seen: Seen) -> Iterator[Finding]:
    """A mode without a token, different tokens, one that others can read."""
    for host in seen.hosts:
        token, where = host.token, [host.host]
        if token.mode == "token" and not token.digest and (seen.several or (seen.wanted and seen.wanted.address)):
            source = f" in {token.source}" if token.source else ""
            what = f"RAY_AUTH_MODE=token, but there is no token{source}"
            yield error(NAME, where, what, "Ray refuses to start, or to be connected to", MAKE)
        if token.readable and (seen.several or (seen.wanted and seen.wanted.address)):
            why = "every user of this host can run code in your cluster with it"
            yield warning(
                NAME, where, f"Ray's token in {token.source} can be read by others", why, f"chmod 600 {token.source}"
            )
    if seen.several:
        for host in unlike({one.host: one.token.digest for one in seen.hosts}):
            what = "Ray's token here is another than on the other hosts"
            yield error(NAME, [host], what, "this host's Ray is refused by the head: 'AuthenticationError'", MAKE)
