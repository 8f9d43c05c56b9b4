"""Pushes one tensor of more than 2^31 elements, and more than 2 GiB, to a server: large.py."""

import time

import torch

import stalempi
from stalempi.flat import Flat
from stalempi.transport.base import Packet, Parts
from stalempi.transport.message import HEADER_BYTES, Header, Kind

ELEMENTS = (1 << 31) + (1 << 20)
MARKS = (0, (1 << 31) - 1, 1 << 31, ELEMENTS - 1)


def main() -> None:
    context = stalempi.init(device="cpu")
    if context.is_server:
        here = Flat([torch.empty(ELEMENTS, dtype=torch.uint8)])
        small = Parts([torch.zeros(8, dtype=torch.uint8)])
        push = Packet(HEADER_BYTES, Parts(here.buckets(1 << 40)))
        answer = bytearray(HEADER_BYTES)
        Header(Kind.RELEASE, sender=0, layout=0, step=1, nbytes=small.nbytes).pack_into(answer)
        end = context.transport.server_end([push], [answer])
        until = time.monotonic() + 200
        kinds: list[Kind] = []
        while Kind.LEAVE not in kinds:
            assert time.monotonic() < until
            for _ in end.receive(1.0):
                header = Header.unpack(push.header)
                kinds.append(header.kind)
                if header.kind is Kind.PUSH:
                    assert header.nbytes == ELEMENTS
                    assert [int(here.views[0][mark]) for mark in MARKS] == [1, 2, 3, 4]
                    end.release(0, small)
        end.close(60)
        print(len(push.parts.wire), "parts", flush=True)
        return
    here = Flat([torch.empty(ELEMENTS, dtype=torch.uint8)])  # zeros that take no memory until they are written
    for number, mark in enumerate(MARKS, start=1):
        here.views[0][mark] = number
    push = Packet(HEADER_BYTES, Parts(here.buckets(1 << 40)))
    released = Packet(HEADER_BYTES, Parts([torch.zeros(8, dtype=torch.uint8)]))
    worker = context.transport.worker_end(push, released)
    Header(Kind.PUSH, sender=1, layout=0, step=1, nbytes=ELEMENTS).pack_into(push.header)
    worker.push()
    assert worker.receive(200)
    Header(Kind.LEAVE, sender=1, layout=0, step=1).pack_into(push.header)
    assert worker.leave(200)
    worker.close()


main()
