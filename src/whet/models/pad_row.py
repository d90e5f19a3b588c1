"""Freezing of the pad token's embedding row, as in transformers."""

from whet.errors import ConfigError
from whet.lazy_import import is_instance_of
from whet.models.decoder import Decoder
from whet.models.language_model import Trainable

_WITHOUT_PADDING_IDX = ("gpt2",)  # families whose embedding has no padding_idx in transformers


def freeze_pad_row(model: Trainable) -> None:
    """Stop gradients from the model's inputs to the embedding row of the pad token.

    transformers passes `pad_token_id` to the embedding as padding_idx. The row then gets no gradient from
    inputs, but still gets the gradient of a tied head. Models behind the bridge already behave this way.

    Raises:
        ConfigError: The model has no pad token whose row transformers would freeze.
    """
    if is_instance_of(model, "whet.models.transformers_bridge:Bridge"):
        return
    pad = _pad_id(model) if isinstance(model, Decoder) else None
    if pad is None or not isinstance(model, Decoder):
        raise ConfigError(
            "optim.freeze_pad_row: this model has no pad token whose row transformers would freeze",
            hint="remove optim.freeze_pad_row: it would not change the training of this model",
        )
    embedding = model.embed_tokens
    # an embedding that is trained together with adapters is wrapped
    getattr(embedding, "base", embedding).padding_idx = pad


def _pad_id(model: Decoder) -> int | None:
    """Return the padding_idx that transformers would use, including the default of its config class."""
    config = model.hf_config()
    if model.spec.family in _WITHOUT_PADDING_IDX:
        return None
    if "pad_token_id" not in config:
        from transformers import AutoConfig

        config = AutoConfig.for_model(str(config["model_type"])).to_dict()
    pad = config["pad_token_id"]
    return pad % model.vocab_size if isinstance(pad, int) and pad < model.vocab_size else None
