"""Fine-tune a text classifier with Lightning's Trainer and its ddp strategy. Written for torchrun.

    torchrun --nproc-per-node 2 examples/lightning_classifier.py MODEL TABLE OUTPUT
    torchlake launch examples/lightning_classifier.py --processes 2 --engine spark -- MODEL TABLE OUTPUT

TABLE is Parquet with the columns text and label (strings). MODEL, TABLE and OUTPUT are paths that every rank reaches.
"""

import argparse
import os

import lightning
import pyarrow.parquet as pq
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Classifier(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch["labels"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="model folder to start from")
    parser.add_argument("table", help="Parquet file or folder")
    parser.add_argument("output", help="folder for the trained model")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one step on one rank")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()
    lightning.seed_everything(0)

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

    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=local_ranks,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local_ranks,
        # The processes are there already: Lightning shall start none, and read rank and address as torchrun sets them.
        plugins=[TorchElasticEnvironment()],
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        default_root_dir=args.output,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Under ddp the Trainer gives each rank its share of the rows.
    module = Classifier(model.train(), args.learning_rate)
    trainer.fit(module, DataLoader(rows, batch_size=args.batch_size, shuffle=True, collate_fn=collate))
    if trainer.is_global_zero:
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        loss = float(trainer.callback_metrics["loss"])
        print(f"{trainer.world_size} ranks, {trainer.global_step} steps, loss {loss:.3f}")


if __name__ == "__main__":
    main()
