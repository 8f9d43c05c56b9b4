"""Trains a small network on handwritten digits: mpirun -n 3 python examples/digits.py."""

import torch
from torch import nn

import stalempi
from stalempi.train.datasets import load_dataset
from stalempi.train.evaluate import evaluate
from stalempi.train.models import build_model


def main() -> None:
    stalempi.init()
    data = load_dataset("digits")
    model = build_model("cnn", num_classes=data.num_classes, input_shape=data.input_shape).to(stalempi.device())
    optimizer = stalempi.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5),
        model=model,
        policy=stalempi.DSSP(lower=3, upper=15),
    )
    if stalempi.is_server():
        stats = optimizer.serve()  # until every worker has left
        accuracy, _ = evaluate(model, data.test, device=stalempi.device())
        print(f"test accuracy {accuracy:.4f} after {stats.updates} updates in {stats.seconds:.1f} s")
        return
    sampler = stalempi.DistributedSampler(len(data.train))
    loader = stalempi.DataLoader(data.train, 32, sampler=sampler)
    with optimizer:
        for _ in range(15):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.to(stalempi.device())), y.to(stalempi.device())).backward()
                optimizer.step()


if __name__ == "__main__":
    main()
