"""No message of the control plane grows with the model: what may be long goes in pages."""

import zlib

import grpc
import pytest
from tests.support.users import request

from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload._core.paging import pages
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
        assert answer.parameter_count == 1 and answer.bucket_count == 1 and not answer.groups
    full = connection.call("GetOptimizer", pb.GetOptimizerRequest(name="o", view=pb.OPTIMIZER_VIEW_FULL))
    assert [p.name for p in full.parameters] == ["w"] and len(full.layout.buckets) == 1
    assert len(full.groups) == 1 and not full.next_page_token


def test_validate_only_says_what_would_be_created_and_creates_nothing(connection):
    asked = request("o")
    asked.validate_only = True
    planned = connection.call("CreateOptimizer", asked)
    assert not connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
    asked.validate_only = False
    created = connection.call("CreateOptimizer", asked)
    assert planned.memory == created.memory and planned.memory.state_bytes > 0
    assert planned.memory_bytes == created.memory_bytes and planned.bucket_count == created.bucket_count
    asked.validate_only = True
    with pytest.raises(Error, match="exists"):
        connection.call("CreateOptimizer", asked)


def test_validate_only_says_what_the_budget_lacks(connection):
    asked = request("huge")
    asked.parameters[0].shape[:] = [1 << 36]
    asked.validate_only = True
    planned = connection.call("CreateOptimizer", asked)
    assert planned.memory.state_bytes > 12 << 36
    assert "of the daemon's budget of" in planned.state_reason


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


def wide(name, parameters=40_000):
    """Of so many parameters that their checksums take two pages, and all else more of them."""
    wanted = request(name)
    dtype = wanted.parameters[0].dtype
    del wanted.parameters[:]
    for index in range(parameters):
        wanted.parameters.add(name=f"model.layers.{index:06}.weight" + "_" * 40, shape=[1], dtype=dtype)
    return wanted


def test_an_optimizer_of_many_parameters_comes_and_goes_in_pages(connection):
    wanted = wide("wide")
    assert len(list(pages(wanted))) > 10
    connection.call("CreateOptimizer", wanted)
    get = pb.GetOptimizerRequest(name="wide", view=pb.OPTIMIZER_VIEW_FULL)
    sizes = []
    while not sizes or get.page_token:
        page = connection.call("GetOptimizer", get)
        sizes.append(page.ByteSize())
        get.page_token = page.next_page_token
    assert len(sizes) > 2 and max(sizes) < 2 << 20
    whole = connection.get_whole("wide")
    assert [p.name for p in whole.parameters] == [p.name for p in wanted.parameters]
    assert len(whole.layout.placements) == len(wanted.parameters)
    attach = pb.AttachOptimizerRequest(name="wide", sync=pb.SYNC_PUSH)
    stream, attached = connection.attach(attach)
    assert attached.optimizer.layout == whole.layout and attached.optimizer.parameters == whole.parameters
    connection.call("PushParameters", pb.PushParametersRequest(name="wide"))  # zeros
    connection.call("DetachOptimizer", pb.DetachOptimizerRequest(name="wide"))
    check = pb.AttachOptimizerRequest(name="wide", sync=pb.SYNC_CHECK)
    check.parameter_crc32.extend([zlib.crc32(bytes(2))] * len(wanted.parameters))
    assert len(list(pages(check))) > 1
    check.parameter_crc32[-1] ^= 1
    with pytest.raises(Error) as error:
        connection.attach(check)
    assert error.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert whole.parameters[-1].name in str(error.value)
    check.parameter_crc32[-1] ^= 1
    stream, _ = connection.attach(check)
    stream.cancel()


@pytest.mark.parametrize("method", ["CreateOptimizer", "AttachOptimizer"])
def test_a_request_that_ends_before_its_last_page_does_nothing(connection, method):
    connection.call("CreateOptimizer", request("there"))
    first = (
        request("new") if method == "CreateOptimizer" else pb.AttachOptimizerRequest(name="there", sync=pb.SYNC_PUSH)
    )
    first.more = True
    with pytest.raises(grpc.RpcError) as error:
        answer = getattr(connection._session.stub, method)(iter([first]), metadata=connection._session.metadata)
        list(answer)
    assert error.value.code() == grpc.StatusCode.CANCELLED
    listed = connection.call("ListOptimizers", pb.ListOptimizersRequest()).optimizers
    assert [(optimizer.name, optimizer.attached) for optimizer in listed] == [("there", False)]


def test_pages_at_once_are_few(connection):
    """Whoever asks for many is refused or served, and has a place again when they are there."""
    connection.call("CreateOptimizer", wide("wide", 10_000))
    full = pb.GetOptimizerRequest(name="wide", view=pb.OPTIMIZER_VIEW_FULL)
    calls = [
        connection._session.stub.GetOptimizer.future(full, metadata=connection._session.metadata) for _ in range(30)
    ]
    codes = {call.code() for call in calls}
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert grpc.StatusCode.OK in codes
    assert len(connection.get_whole("wide").parameters) == 10_000
