"""CTranslate2 on CPUs with 8-bit weights: the model is converted once into its folder (`_ctranslate2_export.py`).

Each row of a weight has a scale, and so has each token of an input while it is multiplied. Texts differ from those of
`eager` where two tokens are almost equally likely: `optimize` measures it on your prompts.
"""

from torchlake.runtimes import _ctranslate2, _ctranslate2_export

TOLERANCE = 0.06
CALIBRATED = False
tasks: tuple[str, ...] | None = _ctranslate2_export.TASKS
never: dict[str, str] = {}
TOKEN_TYPES = False
refusal = _ctranslate2_export.refusal
cannot_write = _ctranslate2.cannot_write
_conversion = _ctranslate2.Conversion(name="ctranslate2_int8", kind="int8")
prepare, load, load_log_probs = _conversion.prepare, _conversion.load, _conversion.load_log_probs
open_writer = _conversion.open_writer
