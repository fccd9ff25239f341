"""A trainer that loads a checkpoint first validates the pickles in the checkpoint."""

import os
import pickle

import pytest

from parallel.dims import ParallelDims


class Harm:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def refused(rank: int, folder: str) -> str:
    from parallel import checkpoint

    with pytest.raises(ValueError) as refusal:
        checkpoint.load_weights(folder, [])
    return str(refusal.value)


def test_no_rank_executes_a_pickle_of_a_foreign_checkpoint(run_ranks, tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harm(str(tmp_path / "harm"))))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    said = run_ranks(ParallelDims(dp=2), refused, str(tmp_path))
    assert all("its pickle names posix.mkdir" in each for each in said)
    assert not (tmp_path / "harm").exists()
