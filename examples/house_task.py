"""The items of house-task.yaml: a command for a house, and four JSON actions of which one is right."""

import json
from random import Random

from datasets import Dataset

from whet.data.synthetic.generators import generate


def items(**_):
    """Return the test split: 200 unseen commands, each with its action and three similar ones."""
    actions = [record["messages"][-1]["content"] for record in generate("synth:house:400")]
    rows = []
    for record in generate("synth:house-test:200"):
        *_, command, action = (message["content"] for message in record["messages"])
        random = Random(command)
        choices = [action, *random.sample(similar_actions(action, actions), 3)]
        random.shuffle(choices)
        rows.append({"command": command, "choices": choices, "answer": choices.index(action)})
    return {"test": Dataset.from_list(rows)}


def similar_actions(action, actions):
    """Return the six other actions that differ from this one in the fewest values."""
    values = json.loads(action)

    def differences(other):
        parsed = json.loads(other)
        return sum(parsed.get(key) != values.get(key) for key in parsed.keys() | values.keys())

    others = sorted(
        {other for other in actions if other != action}, key=lambda other: (differences(other), other)
    )
    return others[:6]
