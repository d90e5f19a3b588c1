"""whet as a model of EleutherAI's lm-evaluation-harness, registered as "whet".

The harness owns tasks, prompts and metrics; this module owns log-likelihoods and generation. Run its command
with whet registered: `python -m whet.evaluation.harness run --model whet --model_args pretrained=RUN ...`
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from whet.data.templates.chat import render_chat
from whet.errors import ConfigError, DataError
from whet.evaluation.loglikelihood import TokenPair, score_continuations
from whet.generation.engine import complete, strip_stop_token
from whet.generation.sampling import Sampling, row_seeds
from whet.generation.stop_strings import decode, stop_watcher, truncate_at_stop
from whet.model_io.load import load
from whet.models.language_model import LanguageModel
from whet.models.stop_tokens import stop_tokens
from whet.parallel.fsdp import gathered_parameters
from whet.parallel.process_group import SINGLE_PROCESS, World

DEFAULT_MAX_TOKENS = 256  # of a generated answer, if the task sets no limit; that of the harness
_BATCH_SIZE = 64  # prompts decoded as one batch
# names that tasks use for the number of generated tokens, the first one wins
_TOKEN_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")
_IGNORED = {"until", "do_sample", "temperature", *_TOKEN_LIMITS, *_SAMPLING}

Requests = Sequence[Any]  # Any: instances of the harness, whose `args` hold the request


@register_model("whet")
class HarnessModel(TemplateLM):
    """A model of the harness that computes with whet's own models, log-likelihoods and generation.

    Args:
        pretrained: a run, a model name or directory, or a loaded model.
        tokenizer: the tokenizer of a loaded model.
        dtype: the dtype of the weights, such as "float32". Default: the one that suits the device.
        device: the device to load to. Default: the best available one.
        batch_size: the number of prompts that are decoded as one batch. Log-likelihoods do not use it.
        max_length: the context length. Default: the model's.
        seed: determines the samples of tasks that sample.
        progress: called with what is computed, the number of finished requests, and their total.
        world: the processes that share the requests.

    Raises:
        ConfigError: an argument is invalid.
        DataError: the model has no tokenizer.
    """

    def __init__(
        self,
        pretrained: str | LanguageModel,
        tokenizer: Any = None,  # Any: a transformers tokenizer
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        seed: int = 0,
        progress: Callable[[str, int, int], None] = lambda *_: None,
        world: World = SINGLE_PROCESS,
        **unknown: Any,  # Any: arguments that the harness adds
    ) -> None:
        super().__init__()
        if names := sorted(name for name, value in unknown.items() if value is not None and name != _AUTO):
            raise ConfigError(
                f"the model whet has no argument {names[0]!r}",
                hint="known: pretrained, dtype, device, batch_size, max_length and seed",
            )
        if isinstance(pretrained, str):
            pretrained, tokenizer = load(pretrained, dtype=_dtype(dtype), device=device)
        if tokenizer is None:
            raise DataError("the model has no tokenizer, so it cannot read the texts of tasks")
        self.model, self.tokenizer = pretrained, tokenizer
        self.max_length = max_length or pretrained.max_positions
        # "auto" is a value of the harness
        self.batch_size = int(batch_size) if batch_size and str(batch_size).isdigit() else _BATCH_SIZE
        self.seed, self.progress = seed, progress
        self.world = world

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, or EOS if there is no BOS."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else int(token)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, which identifies the harness's cached prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as a prompt; without a generation prompt, the last message is left open."""
        if add_generation_prompt:
            return render_chat(self.tokenizer, chat_history, add_generation_prompt=True)
        text: str = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, continue_final_message=True
        )
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, with special tokens unless it already starts with BOS."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        tokens: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return tokens

    def loglikelihood(self, requests: Requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Requests, **_: Any) -> list[tuple[float, bool]]:
        answers = self._scores([(context, continuation) for _, context, continuation in requests])
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: Requests, disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text, in windows as long as the model's context."""
        windows: list[TokenPair] = []
        owners: list[int] = []  # the request of each window
        for index, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += map(utils.make_disjoint_window, rolling)
            owners += [index] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._scores(windows), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _scores(self, pairs: Sequence[TokenPair]) -> list[tuple[float, bool]]:
        def score(part: Sequence[TokenPair]) -> list[tuple[float, bool]]:
            scores = score_continuations(
                self.model,
                part,
                max_length=self.max_length,
                progress=lambda done, total: self.progress("log-likelihoods", done, total),
            )
            return [(score.logprob, score.is_greedy) for score in scores]

        with gathered_parameters(self.model):
            return [(logprob, is_greedy) for logprob, is_greedy in self.world.map_items(pairs, score)]

    def generate_until(self, requests: Requests, disable_tqdm: bool = True) -> list[str]:
        """Return the generated text of each request, up to the first of its `until` strings."""
        groups: dict[str, list[int]] = defaultdict(list)  # requests with equal settings are one batch
        for index, request in enumerate(requests):
            groups[repr(request.args[1])].append(index)
        texts = [""] * len(requests)
        done = 0
        for group in groups.values():
            prompts = {index: self.tok_encode(requests[index].args[0]) for index in group}
            lengths = {index: len(prompt) for index, prompt in prompts.items()}
            by_length = sorted(group, key=lengths.__getitem__)
            settings = requests[group[0]].args[1]
            for start in range(0, len(by_length), self.batch_size):
                chunk = by_length[start : start + self.batch_size]
                answers = self._generate([prompts[index] for index in chunk], settings, seed=done)
                for index, answer in zip(chunk, answers, strict=True):
                    texts[index] = answer
                    self.cache_hook.add_partial("generate_until", requests[index].args, answer)
                done += len(chunk)
                self.progress("generated answers", done, len(requests))
        return texts

    def _generate(
        self, prompts: Sequence[list[int]], settings: Mapping[str, Any], *, seed: int
    ) -> list[str]:  # Any: values of a task's YAML
        until, max_tokens, sampling = _generation_settings(settings)
        room = self.max_length - max_tokens
        if room <= 0:
            raise ConfigError(
                f"the task generates up to {max_tokens} tokens, but the model's context is {self.max_length}",
                hint="set generation_kwargs.max_gen_toks in the task to a smaller number",
            )
        ends = stop_tokens(self.model, self.tokenizer)

        def generate(part: Sequence[tuple[list[int], int]]) -> list[str]:
            completions = complete(
                self.model,
                [prompt[-room:] for prompt, _ in part],
                max_tokens=max_tokens,
                stop_tokens=ends,
                sampling=sampling,
                seeds=[row_seed for _, row_seed in part],
                watch=stop_watcher(self.tokenizer, until) if until else None,
            )
            tokens = [strip_stop_token(completion, ends) for completion in completions]
            return [truncate_at_stop(decode(self.tokenizer, each), until) for each in tokens]

        rows = list(zip(prompts, row_seeds(len(prompts), seed=self.seed + seed), strict=True))
        with gathered_parameters(self.model):
            return self.world.map_items(rows, generate)

    def get_model_info(self) -> dict[str, Any]:  # Any: JSON values
        """Return facts for the harness's result files."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"model_num_parameters": parameters, "model_dtype": str(self.model.head().weight.dtype)}


_AUTO = "max_batch_size"  # an argument that the harness passes to every model


def _dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    if value in (None, "auto") or isinstance(value, torch.dtype):
        return None if value == "auto" else value  # type: ignore[return-value]  # mypy does not narrow `in`
    dtype = getattr(torch, str(value), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype {value!r} is unknown", hint="use float32, bfloat16 or float16")
    return dtype


def _generation_settings(settings: Mapping[str, Any]) -> tuple[list[str], int, Sampling]:
    """Return the stop strings, the number of tokens and the sampling of a task's generation_kwargs."""
    if unknown := sorted(settings.keys() - _IGNORED):
        raise ConfigError(
            f"generation_kwargs: whet does not support {unknown[0]!r}",
            hint=f"supported: {', '.join(sorted(_IGNORED))}",
        )
    until = settings.get("until") or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    limits = (settings[name] for name in _TOKEN_LIMITS if settings.get(name) is not None)
    temperature = float(settings.get("temperature") or 0.0)
    if settings.get("do_sample") is False:
        temperature = 0.0
    elif settings.get("do_sample") and "temperature" not in settings:
        temperature = 1.0
    chosen = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
    return stops, int(next(limits, DEFAULT_MAX_TOKENS)), Sampling(temperature=temperature, **chosen)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
