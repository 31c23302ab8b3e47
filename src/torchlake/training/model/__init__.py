"""The model that a rank trains: loaded or empty, tested on a few rows, adapted, wrapped, with its optimizer.

In: a base model's folder. Out: a `TrainState`: the model as a strategy wrapped it, its optimizer, its progress.
Read `setup.py` first, then `traits.py` (what one rank detects for all); `strategy.py` chooses how ranks share a model.
"""
