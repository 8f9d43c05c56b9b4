"""Whether MPI takes GPU memory is asked, overridden and tried; copies go on while what has been copied is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stalempi.errors import ConfigError
from stalempi.transport.base import Parts
from stalempi.transport.cuda_aware import ask
from stalempi.transport.staging import Copied, Copier, CudaCopier
from tests.launch import mpirun

OPEN, CRAY = "Open MPI v5.0.11", "MPI VERSION    : CRAY MPICH version 8.1.28"


@pytest.mark.parametrize(
    ("environment", "library", "said", "aware", "reason"),
    [
        ({}, OPEN, True, True, "MPIX_Query_cuda_support says yes"),
        ({}, OPEN, False, False, "MPIX_Query_cuda_support says no"),
        ({}, OPEN, None, False, "has no MPIX_Query_cuda_support"),
        ({"STALEMPI_CUDA_AWARE": "1"}, OPEN, False, True, "STALEMPI_CUDA_AWARE=1"),
        ({"STALEMPI_CUDA_AWARE": "0"}, OPEN, True, False, "STALEMPI_CUDA_AWARE=0"),
        ({"UCX_TLS": "rc,sm"}, OPEN, True, False, "UCX_TLS=rc,sm"),
        ({"UCX_TLS": "rc,sm,cuda_copy"}, OPEN, True, True, "says yes"),
        ({"UCX_TLS": "all"}, OPEN, True, True, "says yes"),
        ({"UCX_TLS": "^cuda_ipc,cuda_copy"}, OPEN, True, False, "UCX_TLS="),
        ({"UCX_TLS": "^ud"}, OPEN, True, True, "says yes"),
        ({"MPIR_CVAR_ENABLE_GPU": "0"}, "MPICH Version: 5.0.2", True, False, "MPIR_CVAR_ENABLE_GPU=0"),
        ({}, CRAY, None, False, "MPICH_GPU_SUPPORT_ENABLED is not set"),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, CRAY, None, True, "MPICH_GPU_SUPPORT_ENABLED=1"),
        ({"MV2_USE_CUDA": "0"}, "MVAPICH2 2.3.7", None, False, "MV2_USE_CUDA is not set"),
        ({"MVP_USE_CUDA": "1"}, "MVAPICH 3.0", None, True, "MVP_USE_CUDA=1"),
    ],
)
def test_the_answer_names_who_gave_it(
    environment: dict[str, str], library: str, said: bool | None, aware: bool, reason: str
) -> None:
    answer = ask(environment, library, lambda: said)
    assert answer.aware is aware
    assert reason in answer.reason


def test_an_override_is_0_or_1() -> None:
    with pytest.raises(ConfigError, match="STALEMPI_CUDA_AWARE must be 0 or 1, got 'yes'"):
        ask({"STALEMPI_CUDA_AWARE": "yes"}, OPEN, lambda: True)


class Late:
    """A copy that is there when somebody waits for it."""

    def __init__(self, log: list[str], number: int, target: Tensor, source: Tensor) -> None:
        self.log, self.number, self.target, self.source = log, number, target, source

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.log.append(f"copied {self.number}")
        self.target.copy_(self.source)


class Device(Copier):
    """Stands in for a GPU; writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def mirror(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def mark(self) -> Copied:
        return Late(self.log, -1, torch.zeros(0), torch.zeros(0))

    def _begin(self, target: Tensor, source: Tensor) -> Copied:
        number = len([word for word in self.log if word.startswith("begun")])
        self.log.append(f"begun {number}")
        return Late(self.log, number, target, source)

    def copy_out(self, host: Tensor, device: Tensor) -> Copied:
        return self._begin(host, device)

    def copy_in(self, device: Tensor, host: Tensor) -> Copied:
        return self._begin(device, host)


def parts(device: Device, *, staged: bool) -> Parts:
    return Parts([torch.full((4,), n, dtype=torch.uint8) for n in (1, 2, 3)], staged=staged, copier=device)


def test_a_staged_part_is_sent_while_the_next_is_still_being_copied() -> None:
    device = Device()
    staged = parts(device, staged=True)
    for place in staged.outgoing():
        assert torch.equal(staged.wire[place], staged.tensors[place])
        device.log.append(f"sent {place}")
    assert device.log == "begun 0,begun 1,begun 2,copied 0,sent 0,copied 1,sent 1,copied 2,sent 2".split(",")


def test_what_arrived_is_on_the_device_when_staging_returns() -> None:
    staged = parts(Device(), staged=True)
    for wire in staged.wire:
        wire.fill_(9)
    staged.stage_in()
    assert torch.cat(staged.tensors).unique().tolist() == [9]


def test_memory_that_goes_as_it_is_waits_for_its_stream_before_every_send_and_every_receive() -> None:
    device = Device()
    direct = parts(device, staged=False)
    assert direct.wire is direct.tensors
    direct.make_room()
    assert list(direct.outgoing()) == [0, 1, 2]
    assert device.log == ["copied -1", "copied -1"]


@pytest.mark.mpi
def test_a_probe_goes_round_all_ranks_and_a_silent_neighbour_is_noticed() -> None:
    done = mpirun(Path(__file__).with_name("probing.py"), 2)
    assert done.out.splitlines()[:2] == ["query says no", "kept by all"], done.err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_on_a_stream_of_its_own() -> None:
    copier = CudaCopier(torch.device("cuda"))
    here = torch.arange(1 << 20, device="cuda")
    host = copier.mirror(here)
    assert host.is_pinned()
    copier.copy_out(host, here + 1).synchronize()
    assert torch.equal(host, torch.arange(1, (1 << 20) + 1))
    copier.copy_in(here, host)
    assert torch.equal((here - 1).cpu(), torch.arange(1 << 20))
