"""Labels to look at: planted errors in Rotten Tomatoes, found by `label_hints`, by cleanlab alone, and by loss alone.

5 % of the labels are flipped. Probabilities are of a logistic regression over TF-IDF that was not trained on their
rows (5 folds). Precision: listed rows whose label was flipped; recall: flipped labels that are listed. "first" are as
many rows as were flipped, those with the lowest quality of the label first.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import arguments, finish, reviews

LABELS = ("negative", "positive")


def chances_of(texts: list[str], labels: np.ndarray) -> np.ndarray:
    """The probability of each class for each text (N, 2), by models that did not see its label."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    model = make_pipeline(words, LogisticRegression(C=4, max_iter=300))
    return np.asarray(cross_val_predict(model, texts, labels, cv=5, method="predict_proba"), dtype=np.float32)


def hinted(chances: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that torchlake lists (N,), and the quality of each label (N,)."""
    from torchlake.config.task_spec import TaskSpec
    from torchlake.evaluation.sections.label_hints import label_hints

    spec = TaskSpec(
        task="text_classification", problem="single_label", labels=LABELS, text="text", label="label", max_length=512
    )
    predicted = pa.table({f"prob_{name}": chances[:, at] for at, name in enumerate(LABELS)})
    _, found = label_hints(predicted, pa.array(LABELS).take(pa.array(labels)), spec, "classes")
    return np.asarray(found["label_issue"]), np.asarray(found["label_quality"])


def main() -> None:
    """Measure."""
    options = arguments(__doc__ or "", percent=5)
    table = pq.read_table(reviews() / "train.parquet")
    true = np.unique(table["label"].to_pylist(), return_inverse=True)[1]
    flipped = np.random.default_rng(0).permutation(len(true)) < round(options.percent / 100 * len(true))
    given = np.where(flipped, 1 - true, true)
    chances = chances_of(table["text"].to_pylist(), given)

    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    exact, own = chances.astype(np.float64), chances[np.arange(len(given)), given].astype(np.float64)
    ways = {
        "label_hints": hinted(chances, given),
        "cleanlab alone": (find_label_issues(given, exact, n_jobs=1), get_label_quality_scores(given, exact)),
        "wrong rows": (exact.argmax(axis=1) != given, own),
    }
    rows: list[dict[str, Any]] = []
    for name, (listed, quality) in ways.items():
        first, right = flipped[np.argsort(quality, kind="stable")[: flipped.sum()]], (listed & flipped).sum()
        rows.append(
            {"way": name, "listed": int(listed.sum()), "precision": round(float(right / listed.sum()), 4)}
            | {
                "recall": round(float(right / flipped.sum()), 4),
                "precision of the first": round(float(first.mean()), 4),
            }
        )
    note = f"{len(true):,} rows, {flipped.sum():,} labels flipped, accuracy {(exact.argmax(axis=1) == true).mean():.3f}"
    finish("label_hints", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
