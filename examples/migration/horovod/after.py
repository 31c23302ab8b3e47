"""The same training with torch's DistributedDataParallel; `torchlake launch` starts the ranks.

    torchlake launch examples/migration/horovod/after.py --processes 2

It does not import torchlake: torchrun starts it too.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="images of one step on one rank")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one rank")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)

    images, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(digits))
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).to(device)
    model = DistributedDataParallel(model)  # broadcasts rank 0's weights, and averages gradients in backward
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate * size, momentum=0.5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean = total / len(loader)
        dist.all_reduce(mean)  # a sum
        if rank == 0:
            print(f"{size} ranks, epoch {epoch + 1}, loss {mean.item() / size:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
