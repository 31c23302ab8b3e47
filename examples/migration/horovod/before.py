"""Horovod: a classifier of handwritten digits.

horovodrun -np 2 python examples/migration/horovod/before.py
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images of one step on one rank")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one rank")
    args = parser.parse_args()

    hvd.init()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)

    images, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(digits))
    sampler = DistributedSampler(rows, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = hvd.allreduce(total / len(loader), name="loss")
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks, epoch {epoch + 1}, loss {mean.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
