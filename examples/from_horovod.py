"""Is a Horovod-style script moved to stalempi, the changed lines marked: mpirun -n 3 python from_horovod.py."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import stalempi as hvd  # changed 1: was horovod.torch
from stalempi.train.datasets import load_dataset
from stalempi.train.models import build_model

EPOCHS = 15


def main() -> None:
    hvd.init()
    torch.manual_seed(42)
    data = load_dataset("digits")
    model = build_model("cnn", num_classes=data.num_classes, input_shape=data.input_shape).to(hvd.device())
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model=model, policy=hvd.SSP(3))  # changed 2: model and policy
    # changed 3: no broadcast_parameters, no broadcast_optimizer_state: all ranks have rank 0's weights from here on
    if hvd.is_server():  # changed 4: rank 0 serves
        optimizer.serve()
    else:
        sampler = hvd.DistributedSampler(data.train)  # changed 5: finds its shard, and its epoch, by itself
        loader = hvd.DataLoader(data.train, batch_size=32, sampler=sampler)
        scheduler = StepLR(optimizer, step_size=10, gamma=0.1)
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x.to(hvd.device())), y.to(hvd.device()))
                loss.backward()
                optimizer.step()
            scheduler.step()
        optimizer.close()  # changed 6: nobody waits for this worker any more
    if hvd.rank() == 0:
        x, y = data.test.batch(range(len(data.test)))
        model.eval()
        accuracy = (model(x.to(hvd.device())).argmax(1).cpu() == y).float().mean().item()
        print(f"test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
