"""Fine-tune a text classifier with DeepSpeed: ZeRO-2 shares gradients and optimizer state out over the ranks.

    torchrun --nproc-per-node 2 examples/deepspeed_loop.py MODEL TABLE OUTPUT
    torchlake launch examples/deepspeed_loop.py --processes 2 --engine spark -- MODEL TABLE OUTPUT

TABLE is Parquet with the columns text and label (strings). MODEL, TABLE and OUTPUT are paths that every rank reaches.
"""

import argparse

import deepspeed
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="model folder to start from")
    parser.add_argument("table", help="Parquet file or folder")
    parser.add_argument("output", help="folder for the trained model")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one step on one rank")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()
    torch.manual_seed(0)

    rows = pq.read_table(args.table, columns=["text", "label"]).to_pylist()
    labels = sorted({row["label"] for row in rows})
    numbers = {label: number for number, label in enumerate(labels)}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, id2label=dict(enumerate(labels)), label2id=numbers
    )

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        tokens = tokenizer([row["text"] for row in batch], truncation=True, padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor([numbers[row["label"]] for row in batch])}

    if not torch.cuda.is_available():
        # An operator for ranks of one machine, which DeepSpeed would compile first, for a minute; gloo does its work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()  # joins the other ranks: nccl on GPUs, gloo on CPUs
    sampler = DistributedSampler(rows)  # this rank's share of the rows
    loader = DataLoader(rows, batch_size=args.batch_size, sampler=sampler, collate_fn=collate)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": args.batch_size,
            "optimizer": {"type": "AdamW", "params": {"lr": args.learning_rate, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": torch.cuda.is_available() and torch.cuda.is_bf16_supported()},
        },
    )
    engine.train()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order of rows
        total = torch.zeros(1, device=engine.device)
        for batch in loader:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / (len(loader) * dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, epoch {epoch + 1}, loss {mean:.3f}")

    if dist.get_rank() == 0:  # under ZeRO-2 every rank holds all weights
        engine.module.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
