"""The status-first conversation: ranks end together, tell why, and never mix two streams."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.comm.communicator import Abandoned, Communicator, SoloCommunicator
from evenstep.comm.gather_bytes import gather_bytes
from evenstep.comm.header import CLOSING, EXHAUSTED, FAILED, OK, Header
from evenstep.comm.plane import DataPlane
from evenstep.comm.remote_errors import describe_error, remote_error
from evenstep.comm.rounds import Rounds
from evenstep.errors import RemoteRankError, SampleError
from evenstep.testing import SimulatedWorld

LEFT = (
    "rank {} left the loader before the end of the epoch (a break, close() or an exit); the remaining batches of this "
    "epoch cannot be built without it. Leave the loop on the same step on every rank."
)
ANOTHER = (
    "rank {} has begun another stream (a new epoch or a loaded state) that this rank has not begun: its data cannot "
    "arrive. Call iter(), load_state_dict() and set_epoch() on every rank."
)


def rounds_of(plane: DataPlane) -> Rounds:
    assert plane.rounds is not None
    return plane.rounds


def outcomes(work: Callable[[DataPlane], Any], ranks: int = 2) -> list[Any]:
    return SimulatedWorld(ranks, timeout=10).outcomes(work)


@dataclass
class Token:
    """An exchange that gathers one number, so that ranks which exchange in another order are found out."""

    group: Communicator | None
    number: int

    def run(self) -> int:
        assert self.group is not None
        row = torch.tensor([self.number], dtype=torch.int64).view(torch.uint8)
        numbers = self.group.all_gather(row).view(torch.int64).flatten().tolist()
        assert numbers == [self.number] * len(numbers), f"ranks met in different exchanges: {numbers}"
        return self.number


SIGNED = st.integers(-(1 << 63), (1 << 63) - 1)


@given(values=st.tuples(*[SIGNED] * 14))
def test_a_header_arrives_as_it_was_sent(values: tuple[int, ...]) -> None:
    header = Header(*values)
    assert Header.unpack(header.pack(), rank=3) == header


def test_a_digest_uses_all_64_bits() -> None:
    packed = Header(OK, plan=(1 << 64) - 1).pack()
    assert Header.unpack(packed, 0).plan == -1


def test_a_row_of_another_program_is_refused() -> None:
    with pytest.raises(
        RemoteRankError, match=r"^rank 3 sent no evenstep header: its program does other collectives here$"
    ) as caught:
        Header.unpack(torch.zeros(120, dtype=torch.uint8), rank=3)
    assert caught.value.rank == 3


@given(parts=st.lists(st.binary(max_size=40), min_size=2, max_size=4))
@settings(max_examples=20)
def test_bytes_of_any_size_are_gathered(parts: list[bytes]) -> None:
    def work(plane: DataPlane) -> list[bytes]:
        assert plane.balance is not None
        return gather_bytes(plane.balance, parts[plane.topology.rank])

    assert SimulatedWorld(len(parts)).run(work) == [parts] * len(parts)


def test_everybody_knows_every_header() -> None:
    def work(plane: DataPlane) -> Any:
        return rounds_of(plane).begin(Header(OK, samples=plane.topology.rank + 5))

    for headers in outcomes(work, 3):
        assert {rank: h.samples for rank, h in headers.items()} == {0: 5, 1: 6, 2: 7}


def test_a_failure_is_told_to_all_and_ends_the_stream() -> None:
    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        error = SampleError("sample 7: ...", 7) if plane.topology.rank == 1 else None
        if error is not None:
            error.__cause__ = OSError("disk on fire")
        with pytest.raises(RemoteRankError) as caught:
            rounds.begin(Header(OK if error is None else FAILED), error)
        rounds.leave()  # posts nothing: the stream has ended
        assert not rounds.is_open
        return caught.value

    for error in outcomes(work, 3):
        assert isinstance(error, RemoteRankError)
        told = (error.rank, error.error_type, error.error_message, error.sample)
        assert told == (1, "OSError", "disk on fire", 7)
        assert str(error) == (
            "rank 1 failed at sample 7: OSError: disk on fire (every rank stops here; the traceback is on rank 1)"
        )


def test_a_failure_that_was_told_keeps_its_origin() -> None:
    first = remote_error(describe_error(OSError("disk on fire"), 3))
    again = remote_error(describe_error(first, 1))
    assert (again.rank, again.error_type, str(again)) == (3, "OSError", str(first))


def test_a_broken_connection_is_told_by_the_rank_that_saw_it() -> None:
    broken = RemoteRankError(
        "the connection to a rank of (0, 1) broke",
        error_type="RuntimeError",
        error_message="connection closed by peer",
    )
    told = remote_error(describe_error(broken, 2))
    assert (told.rank, told.error_type) == (2, "RemoteRankError")
    assert str(told) == (
        "rank 2 failed: RemoteRankError: the connection to a rank of (0, 1) broke (every rank stops here; the "
        "traceback is on rank 2)"
    )


@given(message=st.text(max_size=3000))
def test_an_error_of_any_text_fits(message: str) -> None:
    text = describe_error(ValueError(message * 3), 0)
    assert len(text) <= 4096
    assert json.loads(text)["type"] == "ValueError"


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"3", b"[]", b"{}", b'{"rank": 1}', b"null"])
def test_garbage_instead_of_an_error_names_its_sender(garbage: bytes) -> None:
    error = remote_error(garbage, 5)
    assert str(error) == "rank 5 failed and could not say why; its own error is in its output"
    assert error.rank == 5


def test_leaving_is_heard_at_the_next_header() -> None:
    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        rounds.begin(Header(OK))
        if plane.topology.rank == 1:
            rounds.leave()
            rounds.leave()
            return None
        return rounds.begin(Header(OK))

    first, second, third = outcomes(work, 3)
    assert second is None
    for error in (first, third):
        assert isinstance(error, RemoteRankError)
        assert (str(error), error.rank) == (LEFT.format(1), 1)


def test_what_is_owed_is_paid_before_leaving_whatever_it_brings() -> None:
    class Failing(Token):
        def run(self) -> int:
            super().run()
            raise ValueError("not decodable")

    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        rounds.begin(Header(OK))
        tokens = [Token(plane.payload, 0), Failing(plane.payload, 1), Token(plane.payload, 2)]
        if plane.topology.rank == 1:
            tokens[1] = Token(plane.payload, 1)
        rounds.owe(tokens)
        assert rounds.pay(tokens[0]) == 0
        if plane.topology.rank == 0:
            rounds.leave()
            return None
        assert rounds.pay(tokens[1]) == 1
        assert rounds.pay(tokens[2]) == 2
        return rounds.begin(Header(OK))

    left, other = outcomes(work)
    assert left is None
    assert str(other) == LEFT.format(0)


def test_why_a_rank_leaves_is_told() -> None:
    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        rounds.begin(Header(OK))
        if plane.topology.rank == 0:
            rounds.fail(ZeroDivisionError("pack"))
            rounds.fail(ValueError("a consequence"))
            rounds.leave()
        return rounds.begin(Header(OK))

    error = outcomes(work)[1]
    assert (error.rank, error.error_type, error.error_message) == (0, "ZeroDivisionError", "pack")


@pytest.mark.parametrize("uneven", ["error", "stop"])
def test_streams_of_different_lengths(uneven: str) -> None:
    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        headers = rounds.begin(Header(EXHAUSTED if plane.topology.rank == 2 else OK), uneven=uneven)
        assert not rounds.is_open
        return [h.status for h in headers.values()]

    for outcome in outcomes(work, 3):
        if uneven == "stop":
            assert outcome == [OK, OK, EXHAUSTED]
        else:
            assert str(outcome) == (
                "the stream of rank 2 has ended while rank 0 still has data: the ranks would take different numbers "
                "of steps. Give every rank the same number of steps, or choose uneven='stop'."
            )


def test_an_end_on_all_ranks_closes_the_stream() -> None:
    def work(plane: DataPlane) -> bool:
        rounds_of(plane).begin(Header(EXHAUSTED))
        return rounds_of(plane).is_open

    assert outcomes(work) == [False, False]


def test_leaving_after_the_last_window_is_an_end() -> None:
    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        rounds.begin(Header(OK))
        if plane.topology.rank == 1:
            rounds.leave()
            return None
        return [h.status for h in rounds.begin(Header(EXHAUSTED)).values()]

    assert outcomes(work, 3) == [[EXHAUSTED, CLOSING, EXHAUSTED], None, [EXHAUSTED, CLOSING, EXHAUSTED]]


def test_windows_of_different_places_are_refused() -> None:
    def work(plane: DataPlane) -> Any:
        return rounds_of(plane).begin(Header(OK, epoch=1, step=plane.topology.rank * 5, schema=16))

    for error in outcomes(work):
        assert str(error) == (
            "rank 1 is at (epoch, step, consumed samples, micro-batch, count) (1, 5, 0, 0, 0) with columns 0x10, rank "
            "0 at (1, 0, 0, 0, 0) with 0x10: their windows do not belong together. Load the same state on every rank."
        )


def test_a_rank_that_never_began_posts_nothing_and_joins_the_next_stream() -> None:
    """Rank 0 asks for a window of the first stream, rank 1 does not; both go on to the second."""

    def work(plane: DataPlane) -> Any:
        rounds = rounds_of(plane)
        rounds.restart()
        if plane.topology.rank == 0:
            with pytest.raises(RemoteRankError) as caught:
                rounds.begin(Header(OK, samples=1))
            assert (str(caught.value), caught.value.rank) == (ANOTHER.format(1), 1)
        rounds.restart()
        return {rank: h.samples for rank, h in rounds.begin(Header(OK, samples=2)).items()}

    assert outcomes(work) == [{0: 2, 1: 2}] * 2


@settings(max_examples=30)
@given(data=st.data(), ranks=st.integers(2, 3))
def test_windows_of_two_streams_never_meet(data: st.DataObject, ranks: int) -> None:
    """All ranks leave each stream, each after another number of its windows and exchanges."""
    streams = data.draw(st.integers(1, 6))
    depth = data.draw(st.integers(0, 2))
    at_least = data.draw(st.lists(st.integers(0, 4), min_size=streams, max_size=streams))
    stops = [[at_least[s] + data.draw(st.integers(0, depth)) for s in range(streams)] for _ in range(ranks)]
    delays = data.draw(st.lists(st.floats(0, 0.003), min_size=ranks, max_size=ranks))

    def work(plane: DataPlane) -> int:
        rounds, rank = rounds_of(plane), plane.topology.rank
        met = 0
        for stream, stop in enumerate(stops[rank]):
            rounds.restart()
            for window in range(stop):
                place = Header(OK, epoch=stream, step=window)
                try:
                    headers = rounds.begin(place)
                except RemoteRankError as error:
                    reasons.append(str(error))
                    break
                assert {h.place for h in headers.values()} == {place.place}
                tokens = [Token(plane.payload, 1000 * stream + 10 * window + k) for k in range(2)]
                rounds.owe(tokens)
                for token in tokens[: 1 + (window + rank) % 2]:
                    rounds.pay(token)
                for token in tokens[1 + (window + rank) % 2 :]:
                    rounds.pay(token)
                met += 1
                threading.Event().wait(delays[rank])
        rounds.restart()
        rounds.begin(Header(EXHAUSTED))
        return met

    reasons: list[str] = []
    met = SimulatedWorld(ranks, timeout=5).run(work)
    assert len(set(met)) == 1
    allowed = {said.format(rank) for said in (LEFT, ANOTHER) for rank in range(ranks)}
    assert set(reasons) <= allowed


def test_one_rank_alone_talks_to_itself() -> None:
    rounds = Rounds(SoloCommunicator(4))
    assert rounds.begin(Header(OK, samples=3))[4].samples == 3
    rounds.leave()
    assert not rounds.is_open
    with pytest.raises(RemoteRankError, match="OSError: broken"):
        rounds.begin(Header(FAILED), OSError("broken"))


def test_a_closing_rank_hears_nothing_of_the_others_errors() -> None:
    def work(plane: DataPlane) -> str:
        rounds = rounds_of(plane)
        rounds.begin(Header(OK))
        if plane.topology.rank == 0:
            rounds.leave()
            return "left"
        with pytest.raises(RemoteRankError, match="ValueError: mine"):
            rounds.begin(Header(FAILED), ValueError("mine"))
        return "failed"

    assert outcomes(work) == ["left", "failed"]
    assert CLOSING not in (OK, EXHAUSTED, FAILED)


def test_another_stream_of_one_process_may_begin_while_this_one_talks() -> None:
    class Overtaken(SoloCommunicator):
        """Meanwhile a second graph on the same plane is reset in its own thread."""

        calls = 0

        def all_gather(self, row: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            assert self.calls < 9, "the conversation never ends"
            if self.calls == 1:
                rounds.restart()
            return super().all_gather(row)

    rounds = Rounds(Overtaken())
    assert rounds.begin(Header(OK))[0].status == OK


def test_who_shuts_the_conversation_waits_for_the_thread_inside_and_lets_none_in() -> None:
    def work(plane: DataPlane) -> tuple[bool, bool, str]:
        rounds, inside, may_end = rounds_of(plane), threading.Event(), threading.Event()
        ended: list[bool] = []

        def makes_a_window() -> None:
            rounds.enter()
            inside.set()
            assert may_end.wait(10)
            rounds.enter()  # who is inside goes on
            rounds.exit()
            ended.append(True)
            rounds.exit()

        thread = threading.Thread(target=makes_a_window)
        thread.start()
        assert inside.wait(10)
        threading.Timer(0.1, may_end.set).start()
        alone = rounds.shut()
        with pytest.raises(Abandoned) as caught:
            rounds.enter()
        thread.join(10)
        return alone, bool(ended), str(caught.value)

    told = "this rank has left the others, and makes no more windows with them"
    assert outcomes(work) == [(True, True, told)] * 2


def test_who_gives_up_does_not_wait_for_a_thread_that_hangs() -> None:
    rounds, inside, may_end = Rounds(SoloCommunicator()), threading.Event(), threading.Event()

    def hangs() -> None:
        rounds.enter()
        inside.set()
        assert may_end.wait(10)
        rounds.exit()

    thread = threading.Thread(target=hangs)
    thread.start()
    assert inside.wait(10)
    rounds.give_up()
    assert rounds.shut(60.0) is False
    may_end.set()
    thread.join(10)
    assert rounds.shut() is True
    rounds.enter()  # alone, there is nobody to leave: another loader may use the plane
    rounds.exit()
