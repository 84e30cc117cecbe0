"""What ranks agree on travels between CPUs, whatever their process group is made for."""

import datetime

import pytest
import torch

from superoffload.torch.ranks.gathering import host_group
from superoffload.torch.ranks.sharding import TorchGroup

TIMEOUT = datetime.timedelta(seconds=77)


@pytest.fixture
def world(tmp_path, request):
    """A process group of this process."""
    where = f"file://{tmp_path}/store"
    torch.distributed.init_process_group(request.param, init_method=where, rank=0, world_size=1, timeout=TIMEOUT)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("world", "makes"), [("gloo", 0), ("cuda:gloo", 1)], indirect=["world"])
def test_ranks_whose_group_is_the_gpus_agree_beside_it(world, makes):
    """Where "cuda:gloo" stands for NCCL: it takes no tensor of the CPU."""
    for _ in range(2):
        group = TorchGroup(0, 1, world)
        assert group.group is world and group.gather_objects({"a": 1}) == [{"a": 1}]
        assert group.gather_doubles([0.1, 2.0]) == [[0.1, 2.0]]
    beside = host_group(world)
    assert (beside is world) == (makes == 0)
    assert beside._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    assert len(torch.distributed.distributed_c10d._world.pg_map) == 1 + makes, "it is made once"
