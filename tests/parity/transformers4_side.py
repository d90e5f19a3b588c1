"""Load directories written by whet in an environment with transformers 4.

Reads a JSON list of jobs from stdin, and writes their logits and token ids as JSON to stdout. Does not import whet.
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

assert transformers.__version__.startswith("4."), transformers.__version__


def model_of(job):
    settings = {"local_files_only": True, "torch_dtype": torch.float32}
    if job["kind"] == "adapter":
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(job["path"], **settings)
    return AutoModelForCausalLM.from_pretrained(job["path"], attn_implementation="eager", **settings)


@torch.no_grad()
def answer(job):
    given = {}
    if "tokens" in job:
        model = model_of(job).eval()
        given["logits"] = model(input_ids=torch.tensor(job["tokens"])).logits.tolist()
    if "texts" in job:
        tokenizer = AutoTokenizer.from_pretrained(job["path"], local_files_only=True)
        given["encoded"] = [dict(tokenizer(text)) for text in job["texts"]]
        given["special"] = sorted(tokenizer.all_special_tokens)
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": "a sharp knife"}]
            given["chat"] = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return given


if __name__ == "__main__":
    json.dump([answer(job) for job in json.load(sys.stdin)], sys.stdout)
