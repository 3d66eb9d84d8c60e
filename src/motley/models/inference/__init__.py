"""Facts about a model that splits and methods need, inferred from the model itself.

A user's module declares nothing. Its run on the meta device is recorded (`record.py`), and from the
recording come its head and repeated blocks (`blocks.py`), the stages at which it can be cut
(`stages.py`) and the channels that belong together (`rules.py`, `streams.py`). Everything is
computed when it is first asked for, and checked on real numbers (`check.py`). A fact that cannot be
inferred is refused with the reason; the model can still be trained in every way that does not need
it.

The rules are known from structured pruning: which rows and columns of which weights must be removed
together (Fang et al., "DepGraph: Towards Any Structural Pruning", CVPR 2023). Here they follow from
one analysis of dimensions, and the result is checked by permutations.
"""

from motley.models.inference.facts import Inference, inference_of
from motley.models.inference.record import InferenceError

__all__ = ["Inference", "InferenceError", "inference_of"]
