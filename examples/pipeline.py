"""Trains a network in blocks, one on each rank: mpirun -n 3 python examples/pipeline.py."""

import torch

import stalempi
from stalempi.train.datasets import load_dataset
from stalempi.train.loss import cross_entropy
from stalempi.train.models import build_model


def main() -> None:
    context = stalempi.init(pipeline=True)
    data = load_dataset("digits")
    torch.manual_seed(0)
    model = build_model("cnn", num_classes=data.num_classes, input_shape=data.input_shape)
    blocks = context.size
    method = stalempi.DSP(p=(1,) * (blocks - 1) + (0,), m=tuple(2 * (blocks - 1 - k) for k in range(blocks)))
    pipe = stalempi.Pipeline(
        model,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5),
        loss=cross_entropy,
        method=method,
    )
    draws = torch.Generator().manual_seed(0)  # the same batches on every rank
    with pipe:
        for _ in range(15):
            for rows in torch.randperm(len(data.train), generator=draws).split(32):
                pipe.step(*data.train.batch(rows.tolist()))
        accuracy = pipe.evaluate([data.test.batch(range(len(data.test)))])
    if context.rank == 0:
        print(f"test accuracy {accuracy:.4f} with {method} on {blocks} blocks")


if __name__ == "__main__":
    main()
