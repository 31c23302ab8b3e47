"""The same function with `torchlake.launch`; one barrier stage of Spark runs the ranks.

python examples/migration/torch_distributor/after.py          (or spark-submit, or the cells of a notebook)
"""

import torch
import torch.distributed as dist
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchlake as tl


def train(learning_rate: float, epochs: int) -> list[float]:
    """Return the mean loss of each epoch, on every rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(loader) / dist.get_world_size())
    dist.destroy_process_group()
    return losses


def main() -> None:
    session = SparkSession.builder.getOrCreate()
    losses = tl.launch(train, 0.5, 3, engine=tl.Spark(session), processes=2)
    for epoch, loss in enumerate(losses, start=1):
        print(f"epoch {epoch}, loss {loss:.6f}")


if __name__ == "__main__":
    main()
