"""Config keys of GRPO: reinforcement learning with verifiable rewards."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.placeholder import parse_placeholder
from whet.config.section import KeyInfo, ObjectiveSection, Positive, Section, Text, UsedWhen

BUILTIN_REWARDS = ("exact_match", "numeric_match", "regex", "json_schema", "length")
Advantage = Literal["group", "dr_grpo", "rloo", "reinforce"]
Aggregation = Literal["token", "sequence", "constant"]
_NOT_IN_THE_LOSS = KeyInfo(changes_loss=False)
_OPERATIONAL = KeyInfo(changes_loss=False, may_change_on_resume=True)


class Reward(Section):
    """A reward function, which scores a completion. User functions run as code (docs/grpo.md)."""

    function: Text = Field(
        description=f"reward function: {', '.join(BUILTIN_REWARDS)}, package.module:function, "
        "path/to/file.py:function, or python:NAME for a function passed from Python"
    )
    weight: float = Field(1.0, description="weight of this reward in the sum")
    name: str | None = Field(
        None, min_length=1, description="name in the metrics; null: the name of the function"
    )
    arguments: dict[str, Any] = Field(  # Any: JSON values, checked against the function's signature
        {}, description="keyword arguments of the function"
    )

    @property
    def label(self) -> str:
        """The name of this reward in the metrics."""
        placeholder = parse_placeholder(self.function)
        return self.name or (placeholder.name if placeholder else self.function.rpartition(":")[2])

    @field_validator("function")
    @classmethod
    def _check_function(cls, function: str) -> str:
        module, _, name = function.rpartition(":")
        if module == "__main__":
            raise ValueError(
                f"{function!r} cannot be imported: rewards run in separate processes, which cannot see the "
                f"functions of your script or notebook. Put it in a file and write 'rewards.py:{name}', "
                f"or pass it as an argument: whet.train(config, rewards={{{name!r}: {name}}})"
            )
        if function in BUILTIN_REWARDS or (module and name):
            return function
        near = difflib.get_close_matches(function, BUILTIN_REWARDS, n=1)
        suggestion = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{function!r} is not a reward: {suggestion}Built-in rewards: {', '.join(BUILTIN_REWARDS)}. "
            "Write your own as package.module:function or path/to/file.py:function"
        )


def _reject_callable(reward: Any) -> None:  # Any: YAML or Python values
    if callable(reward):
        name = getattr(reward, "__name__", type(reward).__name__)
        raise ValueError(
            f"{name} is a Python object, which a config cannot contain: pass it as an argument, "
            f"whet.train(config, rewards={{{name!r}: {name}}}), or put the function in a module or a file "
            "and write 'package.module:function' or 'path/to/file.py:function'"
        )


class GRPOObjective(ObjectiveSection):
    """GRPO: sample completions from the model and reinforce those with higher rewards (docs/grpo.md)."""

    sequence_level_kinds = ("grpo",)

    kind: Literal["grpo"] = Field(
        "grpo", description="GRPO: compare the rewards of a group of completions per prompt"
    )
    rewards: list[Reward] = Field(
        min_length=1, description="reward functions; a completion's reward is their weighted sum"
    )
    on_error: float | None = Field(
        None, description="reward if a function raises, hangs or returns no number; null: stop the run"
    )
    reward_timeout: Annotated[float, _OPERATIONAL] = Field(
        10.0, gt=0, description="maximum seconds per call of a reward function"
    )
    reward_workers: Annotated[Positive | None, _OPERATIONAL] = Field(
        None, description="worker processes for reward functions; null: one per core, at most 4"
    )
    reward_memory: Annotated[float | None, _OPERATIONAL] = Field(
        None,
        gt=0,
        description="maximum GiB of memory per reward worker; null: half of the machine's memory",
    )
    group_size: Positive = Field(8, description="completions per prompt")
    max_new_tokens: Positive = Field(256, description="maximum tokens per completion")
    temperature: float = Field(
        1.0, gt=0, description="sampling temperature; probability ratios use the same temperature"
    )
    generate_rows: Annotated[Positive, _NOT_IN_THE_LOSS] = Field(
        256, description="completions generated in one batch"
    )
    advantage: Advantage = Field(
        "group",
        description="group: (reward - group mean) / group std; dr_grpo: without the std; rloo: baseline is "
        "the mean of the group's other completions; reinforce: baseline is the mean of the rollout",
    )
    advantage_std: Literal["population", "sample"] = Field(
        "population",
        description="group: std with divisor n (population), or n - 1 (sample) as in TRL",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="token: mean over all tokens; sequence: mean over completions of their token means; "
        "constant: token sum / (completions * max_new_tokens); null: constant with dr_grpo, else token",
    )
    epsilon: float = Field(
        0.2, gt=0, lt=1, description="lower clipping of the probability ratio, at 1 - epsilon"
    )
    epsilon_high: float | None = Field(
        None, gt=0, description="upper clipping of the ratio, at 1 + epsilon_high; null: epsilon"
    )
    beta: float = Field(
        0.0, ge=0, description="weight of the KL to the reference model; 0: no reference model is loaded"
    )
    reference_model: Annotated[Text | None, KeyInfo(used_when=UsedWhen("beta"))] = Field(
        None,
        description="name or path of the reference model; null: the model before the first step",
    )
    inner_epochs: Positive = Field(1, description="training passes over each rollout")
    minibatches: Positive = Field(
        1, description="optimizer steps per pass; a rollout has minibatches * run.batch_size prompts"
    )
    mask_truncated: bool = Field(
        False, description="exclude completions that were truncated at max_new_tokens from the loss"
    )
    mismatch_tolerance: Annotated[float | None, _NOT_IN_THE_LOSS] = Field(
        None,
        gt=0,
        description="maximum mean difference between the log-probabilities of trainer and sampler; "
        "null: 0.001 in fp32, 0.1 in bf16 and fp16",
    )
    samples_every: Annotated[Positive, _OPERATIONAL] = Field(
        10, description="steps between entries in samples.jsonl"
    )
    samples: Annotated[Annotated[int, Field(ge=0)], _NOT_IN_THE_LOSS] = Field(
        4, description="completions logged each time; 0: none"
    )

    @property
    def resolved_aggregation(self) -> Aggregation:
        """`aggregation`, or its default for `advantage`."""
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")

    @field_validator("rewards", mode="before")
    @classmethod
    def _expand_names(cls, rewards: Any) -> Any:  # Any: YAML values
        """Expand a reward given by name alone into a section."""
        if not isinstance(rewards, list):
            return rewards
        for reward in rewards:
            _reject_callable(reward.get("function") if isinstance(reward, dict) else reward)
        return [{"function": reward} if isinstance(reward, str) else reward for reward in rewards]

    @model_validator(mode="after")
    def _check_group_size(self) -> "GRPOObjective":
        if self.group_size == 1 and self.advantage != "reinforce":
            raise ValueError(
                "group_size: a group of 1 has no other completion to compare with: set it to 2 or more "
                "(only advantage: reinforce supports 1)"
            )
        return self

    @model_validator(mode="after")
    def _check_unique_names(self) -> "GRPOObjective":
        labels = [reward.label for reward in self.rewards]
        if duplicates := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two rewards are named {duplicates[0]!r}: give one of them another name")
        return self
