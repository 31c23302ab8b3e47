"""Fine-tune a text classifier in your own loop under accelerate. Written for torchrun or accelerate launch.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py MODEL TABLE OUTPUT
    torchlake launch examples/accelerate_loop.py --processes 2 --engine spark -- MODEL TABLE OUTPUT

TABLE is Parquet with the columns text and label (strings). MODEL, TABLE and OUTPUT are paths that every rank reaches.
"""

import argparse

import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
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

    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # joins the other ranks
    set_seed(0)

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

    loader = DataLoader(rows, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # From here on the loader gives each rank other batches, and backward averages gradients over the ranks.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        mean = accelerator.gather(torch.stack(losses)).mean().item()
        accelerator.print(f"{accelerator.num_processes} ranks, epoch {epoch + 1}, loss {mean:.3f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
