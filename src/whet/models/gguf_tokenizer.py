"""The tokenizer inside a GGUF file, rebuilt as a Hugging Face one."""

from collections.abc import Mapping

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def build_tokenizer(metadata: Mapping[str, object], *, where: str, vocab_size: int):
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in metadata["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([t for t, k in zip(tokens, metadata["tokenizer.ggml.token_type"]) if k == 3])
    g = lambda k: tokens[metadata[f"tokenizer.ggml.{k}_token_id"]]
    return tok, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": g("bos"),
        "eos_token": g("eos"),
        "unk_token": g("unknown"),
        "pad_token": g("padding"),
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
