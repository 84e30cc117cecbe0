"""Memory that the daemon lends a trainer for uses of its own."""

import gc
import re
import urllib.request

import grpc
import pytest
import torch

import superoffload.torch
from superoffload._core.control import Connection
from superoffload.v1 import optimizer_pb2


def optimizer_of(daemon, **options):
    return superoffload.torch.AdamW(torch.nn.Linear(4, 4).parameters(), endpoint=daemon.endpoint, **options)


def lent_bytes(daemon):
    with urllib.request.urlopen(f"http://{daemon.info.metrics_address}/metrics") as answer:
        return float(re.search(r'superoffload_memory_bytes{use="lent"} (\S+)', answer.read().decode())[1])


def test_it_is_zeros_and_outlives_the_optimizer(metered_daemon):
    optimizer = optimizer_of(metered_daemon)
    first, second = optimizer.lend_memory(100_000), optimizer.lend_memory(4096)
    assert len(first) == 100_000
    assert bytes(first) == bytes(100_000)
    first[-1], second[0] = 7, 9
    assert lent_bytes(metered_daemon) == 104_096
    optimizer.close()
    assert lent_bytes(metered_daemon) == 0
    gc.collect()
    assert (first[-1], second[0]) == (7, 9)


def test_what_cannot_be_lent(daemon):
    optimizer = optimizer_of(daemon, name="kept")
    with pytest.raises(superoffload.Error, match="ask for at least one") as error:
        optimizer.lend_memory(0)
    assert error.value.code == grpc.StatusCode.INVALID_ARGUMENT
    for size in (1 << 62, 2**64 - 1):
        with pytest.raises(superoffload.Error, match="memory for the trainer of optimizer.*needs") as error:
            optimizer.lend_memory(size)
        assert error.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    optimizer.close()
    connection = Connection(daemon.endpoint)
    with pytest.raises(superoffload.Error, match="attach first") as error:
        connection.call("LendMemory", optimizer_pb2.LendMemoryRequest(name="kept", bytes=1))
    assert error.value.code == grpc.StatusCode.FAILED_PRECONDITION
    connection.close()
