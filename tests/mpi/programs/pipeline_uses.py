"""Uses a pipeline in every way but the plain one; prints one line per use, on rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

import stalempi
from stalempi.train.loss import cross_entropy
from stalempi.train.models import build_model

torch.set_num_threads(1)
context = stalempi.init(pipeline=True)
torch.set_num_threads(1)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]


def images(count: int, seed: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 32, 32, generator=draws), torch.randint(0, 10, (size,), generator=draws))
        for _ in range(count)
    ]


def tokens(count: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 256, (4, 17), generator=draws) for _ in range(count)]
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in drawn]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


def trained(data: list[tuple[Tensor, Tensor]], pipe: stalempi.Pipeline, path: str = "") -> dict[str, Tensor]:
    with pipe:
        for x, y in data:
            pipe.step(x, y)
        if path:
            pipe.save(path)
        return pipe.state_dict()


def largest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((float((a[key] - b[key]).abs().max()) for key in a), default=0.0)


def say(*words: object) -> None:
    if context.rank == 0:
        print(*words, flush=True)


def auto() -> None:
    """The model is cut by its measured times, the user says nothing."""
    data = images(4, 0)
    state = trained(data, stalempi.Pipeline(mlp(), optimizer=sgd, loss=cross_entropy), sys.argv[1])
    model, optimizer = mlp(), None
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if context.rank == 0:
        mlp().load_state_dict(torch.load(Path(sys.argv[1]), weights_only=True))
        say("auto", largest(state, model.state_dict()))


def exported() -> None:
    """A model that is not sequential is cut at modules by name."""

    def resnet() -> nn.Module:
        torch.manual_seed(0)
        return torchvision.models.resnet18(num_classes=10)  # type: ignore[no-any-return]

    pipe = stalempi.Pipeline(
        resnet(), optimizer=sgd, loss=cross_entropy, split=["layer2", "layer4"][: context.size - 1]
    )
    state = trained(images(2, 1, 4), pipe)
    if context.rank == 0:
        resnet().load_state_dict(state)
        say("exported", len(state), pipe.stats.updates)


def meta() -> None:
    """Each rank fills in its own block of a model that nobody holds."""
    with torch.device("meta"):
        model = build_model("resnet11", num_classes=10, input_shape=(3, 32, 32))
    pipe = stalempi.Pipeline(model, optimizer=sgd, loss=cross_entropy, method=stalempi.FR())
    state = trained(images(3, 2, 8), pipe)
    say("meta", all(value.device.type == "cpu" and bool(value.float().isfinite().all()) for value in state.values()))


def language() -> None:
    """A language model whose first and last block share the embedding; integers go in."""
    torch.manual_seed(0)
    model = build_model("transformer-tiny-tied", num_classes=256, input_shape=(16,))
    pipe = stalempi.Pipeline(model, optimizer=sgd, loss=cross_entropy, method=stalempi.FR(), send_labels=True)
    data = tokens(6)
    with pipe:
        for x, y in data:
            pipe.step(x, y)
        accuracy, loss = pipe.test(data[:2])
        state = pipe.state_dict()  # refuses copies that differ
    if context.rank == 0:
        model = build_model("transformer-tiny-tied", num_classes=256, input_shape=(16,))
        model.load_state_dict(state)
        with torch.no_grad():
            model.eval()
            alone = sum(float(cross_entropy(model(x), y)) for x, y in data[:2]) / 2
        say("language", f"{abs(alone - loss):.6f}", 0 <= accuracy <= 1)


def replicas() -> None:
    """Two copies on halves of each batch equal one pipeline on whole batches."""
    data = images(5, 3)
    blocks = context.size // 2
    half = slice(8) if context.rank < blocks else slice(8, 16)
    pipe = stalempi.Pipeline(mlp(), optimizer=sgd, loss=cross_entropy, replicas=2, split=[3][: blocks - 1])
    state = trained([(x[half], y[half]) for x, y in data], pipe)
    model = mlp()
    optimizer = sgd(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    if context.rank == 0:
        say("replicas", largest(state, model.state_dict()), pipe.stats.samples)


for use in sys.argv[2:]:
    {"auto": auto, "exported": exported, "meta": meta, "language": language, "replicas": replicas}[use]()
