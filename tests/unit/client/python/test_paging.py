"""Requests are cut into pages that are small, and together the request."""

import pytest

from superoffload._core.paging import pages
from superoffload.v1 import optimizer_pb2 as pb

MAX_MESSAGE_BYTES = 256 * 1024


def create(parameters, groups=1):
    request = pb.CreateOptimizerRequest(name="o", algorithm="adamw", bucket_bytes=4096)
    request.groups.extend([pb.ParameterGroup(scalars=[pb.Scalar(name="lr", value=1)])] * groups)
    for index in range(parameters):
        request.parameters.add(name=f"{index:0100}", shape=[2, 3], dtype=pb.DATA_TYPE_BFLOAT16)
    return request


def together(parts):
    """As the daemon puts them together."""
    whole = type(parts[0])()
    for part in parts:
        whole.MergeFrom(part)
    whole.ClearField("more")
    return whole


@pytest.mark.parametrize(
    "request_",
    [
        create(0),
        create(1),
        create(5000),
        create(5000, groups=65536),
        pb.AttachOptimizerRequest(name="o", sync=pb.SYNC_CHECK),
        pb.AttachOptimizerRequest(name="o", sync=pb.SYNC_CHECK, parameter_crc32=range(100_000)),
    ],
    ids=["empty", "one", "parameters", "groups", "attach", "checksums"],
)
def test_pages_are_small_and_together_the_request(request_):
    parts = list(pages(request_))
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(part.ByteSize() <= MAX_MESSAGE_BYTES for part in parts)
    assert (len(parts) > 1) == (request_.ByteSize() > MAX_MESSAGE_BYTES)
    assert together(parts) == request_
