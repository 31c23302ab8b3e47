"""What the settings of other training tools are called here, for error messages and for the migration page.

The names are those of transformers' `TrainingArguments`, of its example scripts, and of PyTorch. A value completes the
sentence "here it is ..."; one that begins with a setting's dotted name is that setting. Names that are the same here
are not listed.
"""

TRAINER_NAMES = {
    "per_device_train_batch_size": "train.batch_size, the rows of a step over all ranks",
    "train_batch_size": "train.batch_size, the rows of a step over all ranks",
    "per_device_eval_batch_size": "train.micro_batch_tokens, the padded tokens that a rank processes at once",
    "gradient_accumulation_steps": "train.micro_batch_tokens, from which the number of micro-batches follows",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "lr": "train.learning_rate",
    "max_grad_norm": "train.clip_norm",
    "label_smoothing_factor": "train.label_smoothing",
    "optim": "train.optimizer",
    "adam_beta1": "train.betas, such as [0.9, 0.999]",
    "adam_beta2": "train.betas, such as [0.9, 0.999]",
    "lr_scheduler_type": "train.schedule",
    "warmup_ratio": "train.warmup, a share of all steps",
    "bf16": "train.precision: bf16",
    "fp16": "train.precision: fp16",
    "gradient_checkpointing": "train.activation_checkpointing",
    "torch_compile": "train.compile",
    "save_strategy": 'train.checkpoint_every, such as "10min", "200steps" or "epoch"',
    "save_steps": 'train.checkpoint_every, such as "200steps"',
    "save_total_limit": "train.keep_checkpoints",
    "eval_strategy": 'train.validate_every, "epoch" or such as "200steps"',
    "evaluation_strategy": 'train.validate_every, "epoch" or such as "200steps"',
    "eval_steps": 'train.validate_every, such as "200steps"',
    "load_best_model_at_end": "always so, if there is a validation",
    "metric_for_best_model": "train.metric",
    "early_stopping_patience": "train.patience",
    "group_by_length": "always so",
    "logging_steps": "always 1: metrics.jsonl in the run folder has every step",
    "output_dir": "the run folder (--run FOLDER, in Python run=)",
    "resume_from_checkpoint": "the same command again, which continues",
    "report_to": "track.mlflow, track.wandb or track.tensorboard",
    "max_seq_length": "model.max_length",
    "model_name_or_path": "model.base",
    "peft_config": "model.lora",
    "train_file": "data.train",
    "validation_file": "data.validation",
}
