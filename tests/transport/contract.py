"""What every transport carries, as clauses that each of three ranks runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from stalempi.transport.base import Parts, PartwiseEnd, Transport
from stalempi.transport.message import Header

from .ends import LONG, RANKS, Server, Worker, contents, parameters, payload


def everybody_gets_what_everybody_gave(transport: Transport) -> None:
    given = [b"", b"one", b"x" * 100_000]
    assert transport.allgather(given[transport.rank], LONG) == given


def a_broadcast_brings_the_servers_bytes_to_all(transport: Transport) -> None:
    for staged in (False, True):
        tensors = payload((5, 1_000_000))
        if transport.rank == 0:
            for number, tensor in enumerate(tensors):
                tensor.fill_(number + 3)
        transport.broadcast(Parts(tensors, staged=staged), LONG)
        assert [tensor.unique().tolist() for tensor in tensors] == [[3], [4]]


def pushes_and_releases_carry_what_was_put_in(transport: Transport, *, staged: bool = False) -> None:
    steps = 20
    if transport.rank == 0:
        server, parts = Server(transport, staged=staged), parameters(0, staged=staged)
        for step in range(1, steps + 1):
            for worker in server.await_messages(RANKS - 1):
                big, small = server.pushes[worker].parts.tensors
                assert big.unique().tolist() == [step]
                assert small.unique().tolist() == [worker]
                assert server.pushes[worker].header[-1] == step
            assert server.end.settle(parts, LONG)
            for tensor in parts.tensors:
                tensor.fill_(100 + step)
            for worker in range(RANKS - 1):
                server.release(worker, parts, step=step)
        server.await_leaves()
        return
    worker_end = Worker(transport, staged=staged)
    for step in range(1, steps + 1):
        worker_end.pushed.parts.tensors[0].fill_(step)
        worker_end.pushed.parts.tensors[1].fill_(transport.rank - 1)
        worker_end.pushed.header[-1] = step
        worker_end.push(step)
        assert worker_end.end.receive(LONG)
        assert Header.unpack(worker_end.released.header).step == step
        assert contents(worker_end.released) == {100 + step}
    worker_end.leave(steps)


def staged_parts_travel_as_direct_ones_do(transport: Transport) -> None:
    pushes_and_releases_carry_what_was_put_in(transport, staged=True)


def a_worker_is_answered_while_another_is_silent(transport: Transport) -> None:
    if transport.rank == 0:
        server, parts = Server(transport), parameters(1)
        for step in range(1, 4):
            assert server.await_messages(1) == [0]
            server.release(0, parts, step=step)
        transport.allgather(b"", LONG)
        server.await_leaves()
        return
    worker = Worker(transport)
    if transport.rank == 1:
        for step in range(1, 4):
            worker.push(step)
            assert worker.end.receive(LONG)
    transport.allgather(b"", LONG)  # until then rank 2 is silent
    worker.leave(3)


def workers_are_released_in_any_order_and_with_versions_of_their_own(transport: Transport) -> None:
    if transport.rank == 0:
        server, versions = Server(transport), [parameters(70), parameters(80)]
        for step in range(1, 5):
            server.await_messages(RANKS - 1)
            for worker in (1, 0):
                server.release(worker, versions[(step + worker) % 2], step=step)
        server.await_leaves()
        return
    worker_end = Worker(transport)
    for step in range(1, 5):
        worker_end.push(step)
        assert worker_end.end.receive(LONG)
        assert contents(worker_end.released) == {(70, 80)[(step + transport.rank - 1) % 2]}
    worker_end.leave(4)


def what_has_settled_may_be_overwritten(transport: Transport, *, staged: bool = False) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, staged=staged), parameters(6, staged=staged)
        server.await_messages(RANKS - 1)
        for worker in range(RANKS - 1):
            server.release(worker, parts, step=1)
        assert server.end.settle(parts, LONG)
        for tensor in (*parts.tensors, *parts.wire):
            tensor.fill_(200)
        server.await_leaves()
        return
    worker_end = Worker(transport, staged=staged)
    worker_end.push(1)
    time.sleep(0.2 * (transport.rank - 1))
    assert worker_end.end.receive(LONG)
    assert contents(worker_end.released) == {6}
    worker_end.leave(1)


def staged_parts_settle_as_direct_ones_do(transport: Transport) -> None:
    what_has_settled_may_be_overwritten(transport, staged=True)


def a_release_may_be_sent_part_by_part_each_as_it_is_then(transport: Transport, *, staged: bool = False) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, staged=staged), parameters(0, staged=staged)
        for step in range(1, 5):
            server.await_messages(RANKS - 1)
            assert server.end.settle(parts, LONG)
            for worker in range(RANKS - 1):
                server.announce(worker, parts, step=step)
            for place, tensor in enumerate(parts.tensors):
                tensor.fill_(10 * step + place)
                for worker in range(RANKS - 1):
                    server.end.send(worker, parts, place)
        server.await_leaves()
        return
    worker_end = Worker(transport, staged=staged)
    for step in range(1, 5):
        worker_end.push(step)
        assert worker_end.end.receive(LONG)
        assert [part.unique().tolist() for part in worker_end.released.parts.tensors] == [[10 * step], [10 * step + 1]]
    worker_end.leave(4)


def parts_of_a_release_may_be_taken_as_they_come(transport: Transport, *, staged: bool = False) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, staged=staged), parameters(0, staged=staged)
        for step in range(1, 5):
            server.await_messages(RANKS - 1)
            assert server.end.settle(parts, LONG)
            for tensor in parts.tensors:
                tensor.fill_(step)
            for worker in range(RANKS - 1):
                server.release(worker, parts, step=step, empty=step == 3)
        server.await_leaves()
        return
    worker_end = Worker(transport, staged=staged)
    end, (first, second) = worker_end.end, worker_end.released.parts.tensors
    assert isinstance(end, PartwiseEnd)
    for step in range(1, 5):
        worker_end.push(step)
        assert end.receive_header(LONG)
        assert Header.unpack(worker_end.released.header).step == step
        if step != 3:
            for place in range(step % 3):  # two, one, none
                assert end.receive_part(place, LONG)
                assert (first, second)[place].unique().tolist() == [step]
        assert end.receive(LONG)
        assert contents(worker_end.released) == {2 if step == 3 else step}
    worker_end.leave(4)


def staged_parts_of_a_release_may_be_taken_as_they_come(transport: Transport) -> None:
    parts_of_a_release_may_be_taken_as_they_come(transport, staged=True)


def a_staged_release_may_be_sent_part_by_part(transport: Transport) -> None:
    a_release_may_be_sent_part_by_part_each_as_it_is_then(transport, staged=True)


def an_empty_release_changes_no_parameter(transport: Transport, *, staged: bool = False) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, staged=staged), parameters(5, staged=staged)
        for step in range(1, 5):
            for worker in server.await_messages(RANKS - 1):
                server.release(worker, parts, step=step, empty=step % 2 == 1)
        server.await_leaves()
        return
    worker_end = Worker(transport, staged=staged)
    for step in range(1, 5):
        for tensor in worker_end.released.parts.tensors:
            tensor.fill_(9)
        worker_end.push(step)
        assert worker_end.end.receive(LONG)
        assert contents(worker_end.released) == {9 if step % 2 == 1 else 5}
    worker_end.leave(4)


def an_empty_release_changes_no_staged_parameter(transport: Transport) -> None:
    an_empty_release_changes_no_parameter(transport, staged=True)


def an_empty_push_brings_no_gradient_and_is_answered(transport: Transport) -> None:
    if transport.rank == 0:
        server, parts = Server(transport), parameters(5)
        for step in range(1, 5):
            for worker in server.await_messages(RANKS - 1):
                header = Header.unpack(server.pushes[worker].header)
                assert (header.step, header.nbytes > 0) == (step, step % 2 == 0)
                assert contents(server.pushes[worker]) == {step - step % 2}
                server.release(worker, parts, step=step)
        server.await_leaves()
        return
    worker_end = Worker(transport)
    for step in range(1, 5):
        for tensor in worker_end.pushed.parts.tensors:
            tensor.fill_(step)
        (worker_end.push_empty if step % 2 == 1 else worker_end.push)(step)
        assert worker_end.end.receive(LONG)
        assert contents(worker_end.released) == {5}
    worker_end.leave(4)


def a_leave_brings_no_gradient(transport: Transport, *, staged: bool = False) -> None:
    if transport.rank == 0:
        server = Server(transport, staged=staged)
        for packet in server.pushes:
            for tensor in packet.parts.tensors:
                tensor.fill_(3)
        server.await_leaves()
        assert [contents(packet) for packet in server.pushes] == [{3}, {3}]
        return
    worker_end = Worker(transport, staged=staged)
    for tensor in worker_end.pushed.parts.tensors:
        tensor.fill_(4)
    worker_end.leave(0)


def a_leave_brings_no_staged_gradient(transport: Transport) -> None:
    a_leave_brings_no_gradient(transport, staged=True)


def sums_and_tickets_are_those_of_all_ranks(transport: Transport) -> None:
    sums = [torch.empty(5), torch.empty(300_000, dtype=torch.float64)]
    ticket, tickets = bytearray(2), bytearray(2 * RANKS)
    end = transport.peer_end(ticket, tickets, sums)
    for step in range(3):
        for place, total in enumerate(sums):
            total.fill_(2**transport.rank + step)
            end.sum(place)
            end.progress()
            time.sleep(0.01 * ((transport.rank + step) % RANKS))  # the ranks come in another order each time
        ticket[:] = bytes((transport.rank, step))
        end.exchange()
        assert end.receive(LONG)
        assert [total.unique().tolist() for total in sums] == [[7 + 3 * step]] * 2
        assert tickets == bytes((0, step, 1, step, 2, step))
    end.close()


def a_broadcast_comes_from_any_rank(transport: Transport) -> None:
    for root in range(RANKS):
        tensors = payload((5, 1_000_000), fill=root + 3 if transport.rank == root else 0)
        transport.broadcast(Parts(tensors), LONG, root)
        assert {value for tensor in tensors for value in tensor.unique().tolist()} == {root + 3}


def what_all_ranks_have_is_added_up_for_each(transport: Transport) -> None:
    for dtype in (np.float32, np.float64, np.int64):
        for op, expected in (("sum", 6), ("min", 1), ("max", 3)):
            values = np.full((100, 3), transport.rank + 1, dtype=dtype)
            transport.allreduce(values, op, LONG)
            assert values.dtype == dtype
            assert np.unique(values).tolist() == [expected]


def a_rank_between_a_server_and_its_own_workers_hands_on(transport: Transport) -> None:
    if transport.rank == 0:
        server, parts = Server(transport, workers=[1]), parameters(40)
        for step in range(1, 4):
            assert server.await_messages(1) == [0]
            assert contents(server.pushes[0]) == {10 + step}
            server.release(0, parts, step=step)
        server.await_leaves()
    elif transport.rank == 1:
        above, below = Worker(transport), Server(transport, workers=[2])
        for step in range(1, 4):
            assert below.await_messages(1) == [0]
            for mine, theirs in zip(above.pushed.parts.tensors, below.pushes[0].parts.tensors, strict=True):
                mine.copy_(theirs)
            above.push(step)
            assert above.end.receive(LONG)
            below.release(0, above.released.parts, step=step)
        below.await_leaves()
        above.leave(3)
    else:
        worker = Worker(transport, server=1)
        for step in range(1, 4):
            for tensor in worker.pushed.parts.tensors:
                tensor.fill_(10 + step)
            worker.push(step)
            assert worker.end.receive(LONG)
            assert contents(worker.released) == {40}
        worker.leave(3)


CARRIED: list[Callable[[Transport], None]] = [
    everybody_gets_what_everybody_gave,
    a_broadcast_brings_the_servers_bytes_to_all,
    pushes_and_releases_carry_what_was_put_in,
    staged_parts_travel_as_direct_ones_do,
    a_worker_is_answered_while_another_is_silent,
    workers_are_released_in_any_order_and_with_versions_of_their_own,
    what_has_settled_may_be_overwritten,
    staged_parts_settle_as_direct_ones_do,
    a_release_may_be_sent_part_by_part_each_as_it_is_then,
    a_staged_release_may_be_sent_part_by_part,
    parts_of_a_release_may_be_taken_as_they_come,
    staged_parts_of_a_release_may_be_taken_as_they_come,
    an_empty_release_changes_no_parameter,
    an_empty_release_changes_no_staged_parameter,
    an_empty_push_brings_no_gradient_and_is_answered,
    a_leave_brings_no_gradient,
    a_leave_brings_no_staged_gradient,
    a_broadcast_comes_from_any_rank,
    what_all_ranks_have_is_added_up_for_each,
    a_rank_between_a_server_and_its_own_workers_hands_on,
    sums_and_tickets_are_those_of_all_ranks,
]
