"""Text classification and regression: text or a pair of texts in; one class, several classes or a number out."""

from torchlake.tasks import Task


class TextClassification(Task):
    """A transformers model with a head for classes; everything else is inherited from `Task`."""

    auto_class = "AutoModelForSequenceClassification"
    hub_task = "text-classification"


task = TextClassification()
