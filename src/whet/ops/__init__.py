"""Performance-critical operations: attention, and losses that never materialize the full logits."""

from typing import TYPE_CHECKING

from whet.lazy_import import lazy_getattr

if TYPE_CHECKING:
    from whet.ops.attention import Layout as Layout
    from whet.ops.attention import attend as attend
    from whet.ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from whet.ops.kl_divergence import linear_kl as linear_kl
    from whet.ops.kl_divergence import linear_topk_kl as linear_topk_kl
    from whet.ops.lm_head import Head as Head
    from whet.ops.logprobs import token_logprobs as token_logprobs

_MODULE_OF = {
    "Layout": "ops.attention",
    "attend": "ops.attention",
    "linear_cross_entropy": "ops.cross_entropy",
    "linear_kl": "ops.kl_divergence",
    "linear_topk_kl": "ops.kl_divergence",
    "Head": "ops.lm_head",
    "token_logprobs": "ops.logprobs",
}
__all__ = list(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
