"""The embedding's row of the pad token, trained as transformers does."""

from whet.errors import ConfigError
from whet.lazy_import import is_instance_of
from whet.models.decoder import Decoder
from whet.models.language_model import Trainable

_WITHOUT = ("gpt2",)  # families whose embedding has no padding_idx in transformers


def freeze_pad_row(model: Trainable) -> None:
    """Let no gradient reach the row of the pad token from the model's inputs.

    transformers gives `pad_token_id` to the embedding as its padding_idx: the row gets no gradient where the
    token is an input, and a tied head's gradient all the same. Models behind the bridge have that already.
    """
    if is_instance_of(model, "whet.models.transformers_bridge:Bridge"):
        return
    pad = _pad_id(model) if isinstance(model, Decoder) else None
    if pad is None or not isinstance(model, Decoder):
        raise ConfigError(
            "optim.freeze_pad_row: this model has no pad token whose row transformers would freeze",
            hint="leave it out: training is the same without it",
        )
    table = model.embed_tokens
    getattr(table, "base", table).padding_idx = pad  # a table that is trained beside adapters has a base


def _pad_id(model: Decoder) -> int | None:
    """The row that transformers gives its embedding; its config classes have defaults."""
    config = model.hf_config()
    if model.spec.family in _WITHOUT:
        return None
    if "pad_token_id" not in config:
        from transformers import AutoConfig

        config = AutoConfig.for_model(str(config["model_type"])).to_dict()
    pad = config["pad_token_id"]
    return pad % model.vocab_size if isinstance(pad, int) and pad < model.vocab_size else None
