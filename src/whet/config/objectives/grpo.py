"""The keys of reinforcement from verifiable rewards."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from whet.config.placeholder import parse_placeholder
from whet.config.section import KeyInfo, ObjectiveSection, Positive, ReadBy, Section, Text

BUILTIN_REWARDS = ("exact_match", "numeric_match", "regex", "json_schema", "length")
Advantage = Literal["group", "dr_grpo", "rloo", "reinforce"]
Aggregation = Literal["token", "sequence", "constant"]
_NOT_IN_THE_LOSS = KeyInfo(changes_loss=False)
_BESIDE_THE_RUN = KeyInfo(changes_loss=False, may_change_on_resume=True)


class Reward(Section):
    """One of the functions that judge a completion: code that runs, see docs/grpo.md."""

    function: Text = Field(
        description=f"{', '.join(BUILTIN_REWARDS)}, package.module:function, path/to/file.py:function, or "
        "python:NAME for a function passed from Python"
    )
    weight: float = Field(1.0, description="what its value is multiplied by in the sum")
    name: str | None = Field(None, min_length=1, description="its name in the metrics; null: the function's")
    arguments: dict[str, Any] = Field(  # Any: JSON values, checked against the function's signature
        {}, description="passed to the function by name"
    )

    @property
    def label(self) -> str:
        """What it is called in the metrics."""
        given = parse_placeholder(self.function)
        return self.name or (given.name if given else self.function.rpartition(":")[2])

    @field_validator("function")
    @classmethod
    def _is_known(cls, function: str) -> str:
        module, _, name = function.rpartition(":")
        if module == "__main__":
            raise ValueError(
                f"{function!r} cannot be imported: rewards run in processes of their own, which do not have "
                f"the functions of your script or notebook. Put it in a file and write 'rewards.py:{name}', "
                f"or pass it: whet.train(config, rewards={{{name!r}: {name}}})"
            )
        if function in BUILTIN_REWARDS or (module and name):
            return function
        near = difflib.get_close_matches(function, BUILTIN_REWARDS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"{function!r} is no reward: {meant}built in are {', '.join(BUILTIN_REWARDS)}; "
            "your own is package.module:function or path/to/file.py:function"
        )


def _refuse_callable(reward: Any) -> None:  # Any: what a caller gave
    if callable(reward):
        name = getattr(reward, "__name__", type(reward).__name__)
        raise ValueError(
            f"{name} is a Python object, which a config cannot hold: pass it beside the config, "
            f"whet.train(config, rewards={{{name!r}: {name}}}), or put the function in a module or a file "
            "and write 'package.module:function' or 'path/to/file.py:function'"
        )


class GRPOObjective(ObjectiveSection):
    """Reinforcement: completions of the model's own, judged by functions, see docs/grpo.md."""

    answer_level_kinds = ("grpo",)

    kind: Literal["grpo"] = Field("grpo", description="groups of completions to each prompt are compared")
    rewards: list[Reward] = Field(
        min_length=1, description="what completions are judged by: the weighted sum of these"
    )
    on_error: float | None = Field(
        None, description="value of a reward that raises, hangs or gives no number; null: the run stops"
    )
    reward_timeout: Annotated[float, _BESIDE_THE_RUN] = Field(
        10.0, gt=0, description="seconds that one call of a reward may take"
    )
    reward_workers: Annotated[Positive | None, _BESIDE_THE_RUN] = Field(
        None, description="processes that rewards run in; null: one a core, at most 4"
    )
    reward_memory: Annotated[float | None, _BESIDE_THE_RUN] = Field(
        None,
        gt=0,
        description="GiB of memory that a process of the rewards may allocate; null: half of the machine's",
    )
    group_size: Positive = Field(8, description="completions to each prompt")
    max_new_tokens: Positive = Field(256, description="longest completion")
    temperature: float = Field(
        1.0, gt=0, description="of sampling; ratios are those of the distribution that was sampled from"
    )
    generate_rows: Annotated[Positive, _NOT_IN_THE_LOSS] = Field(
        256, description="completions decoded at once"
    )
    advantage: Advantage = Field(
        "group",
        description="(reward - mean) / std of its group; dr_grpo: without the std; rloo: against the mean of "
        "the others; reinforce: against the mean of the whole rollout",
    )
    advantage_std: Literal["population", "sample"] = Field(
        "population",
        description="group: the std divides by n, or by n - 1 as in TRL",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="mean over tokens, over sequences of means over tokens, or sum over tokens / "
        "(sequences * max_new_tokens); null: constant with dr_grpo, else token",
    )
    epsilon: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = Field(
        None, gt=0, description="and above 1 + epsilon_high; null: as much as epsilon"
    )
    beta: float = Field(
        0.0, ge=0, description="weight of the KL to the reference; 0 needs and keeps no such model"
    )
    reference_model: Annotated[Text | None, KeyInfo(read_by=ReadBy("beta"))] = Field(
        None,
        description="the reference's name or path; null: the model as it is before the first step",
    )
    inner_epochs: Positive = Field(1, description="passes over the completions of a rollout")
    minibatches: Positive = Field(
        1, description="steps in such a pass: a rollout has minibatches * run.batch_size prompts"
    )
    mask_truncated: bool = Field(
        False, description="completions that did not end in max_new_tokens are not learned from"
    )
    mismatch_tolerance: Annotated[float | None, _NOT_IN_THE_LOSS] = Field(
        None,
        gt=0,
        description="largest mean distance of the trainer's log-probabilities from the sampler's; "
        "null: 0.001 in fp32, 0.1 in bf16 and fp16",
    )
    samples_every: Annotated[Positive, _BESIDE_THE_RUN] = Field(
        10, description="steps between rows of samples.jsonl"
    )
    samples: Annotated[Annotated[int, Field(ge=0)], _NOT_IN_THE_LOSS] = Field(
        4, description="completions shown each time"
    )

    @property
    def aggregated_by(self) -> Aggregation:
        """`aggregation`, or what goes with `advantage`."""
        return self.aggregation or ("constant" if self.advantage == "dr_grpo" else "token")

    @field_validator("rewards", mode="before")
    @classmethod
    def _names_alone(cls, rewards: Any) -> Any:  # Any: YAML values
        """A reward without settings may be written as its name."""
        if not isinstance(rewards, list):
            return rewards
        for reward in rewards:
            _refuse_callable(reward.get("function") if isinstance(reward, dict) else reward)
        return [{"function": reward} if isinstance(reward, str) else reward for reward in rewards]

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> "GRPOObjective":
        if self.group_size == 1 and self.advantage != "reinforce":
            raise ValueError(
                "group_size: a group of 1 has nothing to compare with: set it to 2 or more "
                "(only advantage: reinforce takes 1)"
            )
        return self

    @model_validator(mode="after")
    def _rewards_can_be_told_apart(self) -> "GRPOObjective":
        labels = [reward.label for reward in self.rewards]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two rewards are called {twice[0]!r}: give one of them a name")
        return self
