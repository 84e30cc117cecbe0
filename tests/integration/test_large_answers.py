"""Answers of the control plane stay small unless the caller asks for more."""

import grpc
import pytest
from tests.support.users import request

from superoffload._control import Connection
from superoffload._error import Error
from superoffload.v1 import optimizer_pb2 as pb


@pytest.fixture
def connection(daemon):
    opened = Connection(daemon.endpoint)
    yield opened
    opened.close()


def test_an_optimizer_is_described_with_its_parameters_when_asked(connection):
    created = connection.call("CreateOptimizer", request("o"))
    basic = connection.call("GetOptimizer", pb.GetOptimizerRequest(name="o"))
    for answer in (created, basic):
        assert not answer.parameters and not answer.HasField("layout")
        assert answer.parameter_count == 1 and answer.bucket_count == 1 and len(answer.groups) == 1
    full = connection.call("GetOptimizer", pb.GetOptimizerRequest(name="o", view=pb.OPTIMIZER_VIEW_FULL))
    assert [p.name for p in full.parameters] == ["w"] and len(full.layout.buckets) == 1


def test_optimizers_are_listed_page_by_page(connection):
    names = [f"o{index}" for index in range(5)]
    for name in names:
        connection.call("CreateOptimizer", request(name))
    pages, token = [], ""
    while not pages or token:
        page = connection.call("ListOptimizers", pb.ListOptimizersRequest(page_size=2, page_token=token))
        assert not any(optimizer.groups for optimizer in page.optimizers)
        pages.append([optimizer.name for optimizer in page.optimizers])
        token = page.next_page_token
        if len(pages) == 1:  # what vanishes between two pages does not shift them
            connection.call("DeleteOptimizer", pb.DeleteOptimizerRequest(name="o1"))
    assert pages == [names[:2], names[2:4], names[4:]]
    whole = connection.call("ListOptimizers", pb.ListOptimizersRequest())
    assert len(whole.optimizers) == 4 and not whole.next_page_token


@pytest.mark.parametrize("token", ["o", "x/o", "/"])
def test_what_is_no_page_token_is_refused(connection, token):
    with pytest.raises(Error) as error:
        connection.call("ListOptimizers", pb.ListOptimizersRequest(page_token=token))
    assert error.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_large_answers_at_once_are_few(connection):
    """Whoever asks for many is refused or served, and has a place again when the answers are there."""
    wanted = request("wide")
    dtype = wanted.parameters[0].dtype
    for index in range(20_000):
        wanted.parameters.add(name=f"layer.{index}.weight", shape=[1], dtype=dtype)
    connection.call("CreateOptimizer", wanted)
    full = pb.GetOptimizerRequest(name="wide", view=pb.OPTIMIZER_VIEW_FULL)
    calls = [connection._stub.GetOptimizer.future(full, metadata=connection._metadata) for _ in range(30)]
    codes = {call.code() for call in calls}
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grpc.StatusCode.OK in codes
    assert len(connection.get_whole("wide").parameters) == 20_001
