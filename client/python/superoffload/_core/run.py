"""A run of several ranks: how its ranks agree before they train, and what all of them do or none. Steps: run_step.py.

Daemons never talk to each other; messages travel over the trainers' process group (``Group``). server/engine/README.md
has the protocol.
"""

import ctypes
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import grpc

from superoffload._core import library, structures
from superoffload._core.control import Connection
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2

_Result = TypeVar("_Result")

_INCOMPLETE = optimizer_pb2.OPTIMIZER_STATE_INCOMPLETE


class GroupFailed(Error):
    """Raised by gatherings for which not all ranks came; there is no use in another one."""


class Group(Protocol):
    """The ranks that train together, in the process group of now."""

    rank: int
    ranks: int

    def gather_objects(self, message: Any) -> list[Any]:
        """The messages of all ranks, in rank order."""

    def gather_doubles(self, values: list[float]) -> list[list[float]]:
        """The same for numbers, bit for bit."""


@dataclasses.dataclass
class _Message:
    """Of one rank, before it attaches."""

    name: str
    lineage: int  # for the run, if this is rank 0
    report: dict[str, Any] | None  # None: the daemon has no such optimizer, or one that was never filled
    error: str | None = None
    seed: int | None = None  # of stochastic rounding, as this rank was built


@dataclasses.dataclass
class Agreed:
    lineage: int
    found: bool  # all ranks go on with what their daemons have


@dataclasses.dataclass
class Member:
    """Which part of a run an optimizer is."""

    run: str
    rank: int
    ranks: int
    lineage: int

    def mark(self, request: optimizer_pb2.CreateOptimizerRequest) -> None:
        request.lineage = self.lineage
        request.member.run, request.member.rank, request.member.ranks = self.run, self.rank, self.ranks


def _terms(terms: optimizer_pb2.RunTerms) -> tuple[float, float, float]:
    return terms.sum_of_squares, terms.gradient_scale, terms.max_grad_norm


def _report(connection: Connection, name: str) -> dict[str, Any] | None:
    try:
        state = connection.call_again("GetOptimizer", optimizer_pb2.GetOptimizerRequest(name=name)).state
        report = connection.call_again("ReportRun", optimizer_pb2.ReportRunRequest(name=name))
    except Error as error:
        if error.code != grpc.StatusCode.NOT_FOUND:
            raise
        return None
    if state == _INCOMPLETE:
        return None
    prepared = report.prepared if report.HasField("prepared") else None
    return {
        "lineage": report.lineage,
        "committed": report.committed_steps,
        "last": _terms(report.last),
        "prepared": None if prepared is None else (prepared.step, prepared.attempt, _terms(prepared.terms)),
    }


def _to_c(report: dict[str, Any]) -> structures.RunReport:
    step, attempt, terms = report["prepared"] or (0, 0, (0.0, 0.0, 0.0))
    last = structures.RunTerms(*report["last"])
    return structures.RunReport(
        report["lineage"], report["committed"], last, step, attempt, structures.RunTerms(*terms)
    )


def agree(connection: Connection, name: str, group: Group, start_over: bool, seed: int | None = None) -> Agreed:
    """Has all ranks come to the same step, before any of them attaches.

    ``start_over``: where they cannot, they all begin anew, from a checkpoint or with parameters of their own.
    DATA_LOSS otherwise: the sentence names the rank and the remedy, on all ranks. ``seed``: of stochastic rounding;
    INVALID_ARGUMENT where ranks have different ones.
    """
    message = _Message(name, secrets.randbits(63) | 1, None, seed=seed)
    try:
        message.report = _report(connection, name)
    except Error as error:
        message.error = str(error)
    messages: list[_Message] = group.gather_objects(message)
    for rank, other in enumerate(messages):
        if other.error is not None:
            raise Error(grpc.StatusCode.FAILED_PRECONDITION, f"rank {rank} cannot join the run: {other.error}")
        if other.seed != messages[0].seed:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"rank {rank} is built with seed={other.seed} but rank 0 with seed={messages[0].seed}: what is rounded "
                "must not depend on who does it; give all ranks the same seed",
            )
    lineage = messages[0].lineage
    reports = [other.report for other in messages]
    known = [report for report in reports if report is not None]
    untrained = all(report["committed"] == 0 for report in known)
    if len(known) == len(reports):
        decision = structures.RunDecision()
        try:
            all_reports = (structures.RunReport * group.ranks)(*map(_to_c, known))
            library.call("agree", all_reports, group.ranks, group.rank, ctypes.byref(decision))
        except Error:
            if not start_over:
                raise
        else:
            _resolve(connection, name, decision)
            return Agreed(known[0]["lineage"], found=True)
    elif known and not start_over and not untrained:
        lost = reports.index(None)
        raise Error(
            grpc.StatusCode.DATA_LOSS,
            f"rank {lost} has no optimizer in its daemon while others are at step {known[0]['committed']}: its memory "
            "was lost; pass restore= with the checkpoints of all ranks, or delete the optimizers of the other ranks",
        )
    delete(connection, name)
    return Agreed(lineage, found=False)


def all_or_none(
    group: Group | None, what: str, action: Callable[[], _Result], undo: Callable[[_Result], Any] = lambda _: None
) -> _Result:
    """Does it on all ranks, none of which waits in it for another. Where it fails on one, all raise Error and name it.

    ``what`` it does, after "could not". ``undo``: of what a rank has done while another could not. ``group`` None: this
    process trains alone.
    """
    if group is None:
        return action()
    result, error = None, None
    try:
        result = action()
    except (Error, OSError) as own:
        error = own
    whys = group.gather_objects(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, why in enumerate(whys):
        if why is not None:
            undo(cast(_Result, result))
            raise Error(grpc.StatusCode.ABORTED, f"rank {rank} could not {what}: {why}")
    return cast(_Result, result)


def name_of_rank(name: str, group: Group) -> str:
    """Of the optimizer of this rank; ``name``: of the run."""
    return f"{name}.{group.rank}-of-{group.ranks}"


def join(
    connection: Connection, name: str, given: str | None, group: Group, start_over: bool, seed: int | None = None
) -> Member:
    """Agrees. ``name``: of this rank's optimizer; ``given``: of the run, by the user."""
    agreed = agree(connection, name, group, start_over, seed)
    run = given or group.gather_objects(name)[0].rsplit(".", 1)[0]
    return Member(run, group.rank, group.ranks, agreed.lineage)


def delete(connection: Connection, name: str) -> None:
    """Deletes an optimizer to which nobody comes back, whatever it has prepared."""
    request = optimizer_pb2.DeleteOptimizerRequest(name=name)
    try:
        connection.call("DeleteOptimizer", request)
    except Error as error:
        if error.code == grpc.StatusCode.NOT_FOUND:
            return
        if error.code != grpc.StatusCode.FAILED_PRECONDITION:
            raise
        report = connection.call("ReportRun", optimizer_pb2.ReportRunRequest(name=name))
        if not report.HasField("prepared"):
            raise
        abandon = optimizer_pb2.ResolveStepRequest(name=name, attempt=report.prepared.attempt)
        connection.call("ResolveStep", abandon)
        connection.call("DeleteOptimizer", request)


def _resolve(connection: Connection, name: str, decision: structures.RunDecision) -> None:
    if decision.action == 0:
        return
    request = optimizer_pb2.ResolveStepRequest(name=name, attempt=decision.attempt)
    if decision.action == 1:
        request.commit.sum_of_squares = decision.commit.sum_of_squares
        request.commit.gradient_scale = decision.commit.gradient_scale
        request.commit.max_grad_norm = decision.commit.max_grad_norm
    connection.call_again("ResolveStep", request)
