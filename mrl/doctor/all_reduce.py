"""`python -m mrl.doctor.all_reduce SPEC`: one rank of the all-reduces; a line of JSON for each thing that happens."""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spec:
    """One rank's part."""

    rank: int
    world: int
    address: str  # of rank 0
    port: int
    device: int  # of this host's GPUs
    timeout_s: float
    groups: dict[str, list[int]]  # those that are tried besides world, in this order on all ranks
    num_bytes: int = 16 * 2**20


def _say(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def run(spec: Spec) -> None:
    """All groups, one after another; ends at the first that fails."""
    import torch  # seconds, and only here
    import torch.distributed as dist

    from parallel import device

    group = "world"
    try:
        if device.has_cuda():
            torch.cuda.set_device(spec.device)
        _say(began=group, backend=device.backend())
        device.init_process_group(spec.rank, spec.world, spec.address, spec.port, spec.timeout_s)
        made = {name: dist.new_group(ranks) for name, ranks in spec.groups.items()}
        values = torch.ones(spec.num_bytes // 4, device=device.device())
        for group, ranks in {"world": list(range(spec.world)), **spec.groups}.items():
            if spec.rank in ranks:
                _say(began=group, backend=device.backend())
                _say(done=group, seconds=_timed(values, made.get(group), len(ranks)))
    except (RuntimeError, ValueError, OSError) as error:  # torch's own are RuntimeErrors
        _say(failed=group, problem=str(error).strip().splitlines()[0][:300])


def _timed(values, group, size: int) -> float:
    """Seconds of the second of two all-reduces; raises ValueError where the sum is wrong."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        values.fill_(1)
        begun = time.perf_counter()
        dist.all_reduce(values, group=group)
        if values.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    if not bool((values == size).all()):
        raise ValueError(f"the sum over {size} ranks is wrong: {values.min().item()} to {values.max().item()}")
    return seconds


def written(spec: Spec) -> str:
    """A spec as an argument."""
    return json.dumps(asdict(spec))


if __name__ == "__main__":
    run(Spec(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # a communicator that hangs would keep the interpreter from ending
