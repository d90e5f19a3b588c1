"""Curricula: from short to long, from easy to hard, deterministic and resumable at any position."""

import numpy as np
import pytest

import whet
from tiny import random_examples, run_config
from whet.data.curriculum import (
    EasyToHardStream,
    StagedStream,
    difficulty_curriculum,
    length_curriculum,
    stages_by_length,
)
from whet.data.packing import StepSettings
from whet.errors import CheckpointError, ConfigError, DataError


def origins(stream, steps):
    return [[origin for batch in next(stream) for origin in batch.origins] for _ in range(steps)]


def by_length(examples, settings):
    stages = stages_by_length(examples, settings, shortest=10, stages=3, steps=4)
    return StagedStream(stages, settings, seed=1)


def test_stages_go_from_short_to_long():
    examples = random_examples(60, shortest=4, longest=40)
    longest = max(len(example.tokens) for example in examples)
    settings = StepSettings(4, None, 512, pack=True)
    limits = np.linspace(10, longest, 3)
    sizes = {example.origin: len(example.tokens) for example in examples}
    steps = origins(by_length(examples, settings), 30)
    for number, step in enumerate(steps):
        assert max(sizes[origin] for origin in step) <= limits[min(number // 4, 2)]
    assert {origin for step in steps[8:] for origin in step} == set(sizes), "the last stage has them all"


def test_stage_without_a_complete_step_is_left_out():
    examples = random_examples(6, shortest=30, longest=40)
    stages = stages_by_length(examples, StepSettings(4, None, 512, pack=True), shortest=8, stages=4, steps=2)
    assert len(stages) < 4
    with pytest.raises(DataError, match="no stage"):
        StagedStream([], StepSettings(4, None, 512, pack=True), seed=0)


def easy_to_hard(settings, *, ramp=10, seed=3):
    easy = random_examples(9, seed=1)
    hard = [type(e)(e.tokens, e.supervised, f"hard {e.origin}") for e in random_examples(7, seed=2)]
    return EasyToHardStream(easy, hard, settings, seed=seed, ramp=ramp)


@pytest.mark.parametrize("pack", [True, False])
def test_hard_share_grows_linearly_to_one(pack):
    stream = easy_to_hard(StepSettings(10, None, 1024, pack=pack))
    shares = [sum(origin.startswith("hard") for origin in step) for step in origins(stream, 15)]
    assert shares == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10, 10]


def test_each_pool_is_exhausted_before_it_repeats():
    steps = origins(easy_to_hard(StepSettings(7, None, 1024, pack=True), ramp=0), 4)
    assert all(len(set(step)) == 7 for step in steps)  # seven hard examples, each once per step
    assert steps[0] != steps[1], "in a new order"


def test_token_budget_is_split_by_hard_share():
    stream = easy_to_hard(StepSettings(None, 200, 200, pack=True))
    for number in range(15):
        batches = next(stream)
        hard = sum(b.real_tokens for b in batches) if number >= 10 else 0
        assert 0 < sum(batch.real_tokens for batch in batches) <= 200
        if number == 0:
            assert not any(origin.startswith("hard") for batch in batches for origin in batch.origins)
        if hard:
            assert all(origin.startswith("hard") for batch in batches for origin in batch.origins)


@pytest.mark.parametrize("make", [easy_to_hard, lambda s: by_length(random_examples(60, shortest=4), s)])
@pytest.mark.parametrize("size", [(5, None), (None, 120)])
def test_curriculum_resumes_from_its_position(make, size):
    settings = StepSettings(*size, 512, pack=True)
    steps = origins(make(settings), 16)
    for position in range(16):
        first, second = make(settings), make(settings)
        origins(first, position)
        second.seek(first.state())
        assert origins(second, 16 - position) == steps[position:]


def test_position_is_valid_for_a_run_of_another_length():
    settings = StepSettings(10, None, 1024, pack=True)
    first, second = easy_to_hard(settings, ramp=10), easy_to_hard(settings, ramp=20)
    origins(first, 4)
    second.seek(first.state())
    assert [sum(o.startswith("hard") for o in step) for step in origins(second, 3)] == [2, 2, 3]
    examples = random_examples(60, shortest=4)
    longer, shorter = (
        StagedStream([(examples[:30], steps), (examples, steps)], settings, seed=3) for steps in (6, 2)
    )
    origins(longer, 4)
    shorter.seek(longer.state())
    next(shorter)
    assert shorter.stage == 1


def test_curricula_over_plain_tokens():
    tokens = np.arange(2000) % 250
    stream = length_curriculum(tokens, 4, min_seq_len=32, max_seq_len=128, n_stages=3, batches_per_stage=2)
    widths = [batch.targets.shape[1] for step in stream for batch in step]
    lengths = [32, 32, 80, 80, 128, 128]
    assert widths == [-(-length // 32) * 32 for length in lengths]
    # a stage is left out if the text is too short for it
    stream = length_curriculum(
        tokens[:600], 4, min_seq_len=32, max_seq_len=512, n_stages=2, batches_per_stage=2
    )
    assert [batch.targets.shape[1] for step in stream for batch in step] == [32] * 2
    stream = difficulty_curriculum(tokens[:700], tokens[700:] + 1000, batch_size=4, seq_len=50, n_batches=8)
    hard = [int((batch.tokens >= 1000).any(1).sum()) for step in stream for batch in step]
    assert hard == [0, 1, 2, 3, 4, 4, 4, 4]
    with pytest.raises(DataError):
        length_curriculum(tokens[:20], 4)


@pytest.mark.parametrize("batches", [1, 3, 50])  # 50: the windows of each stage repeat
def test_curriculum_over_plain_tokens_has_complete_steps_and_ends(batches):
    tokens = np.arange(5000) % 60
    windows = [len(range(0, len(tokens) - length, length)) for length in (32, 192, 352, 512)]
    assert min(windows) >= 4, "no stage is left out"
    for n_stages in (2, 4):
        steps = list(length_curriculum(tokens, 4, 32, 512, n_stages, batches))
        assert len(steps) == n_stages * batches
        assert {sum(len(batch.tokens) for batch in step) for step in steps} == {4}
    steps = list(difficulty_curriculum(tokens, tokens, 4, 50, n_batches=batches))
    assert len(steps) == batches
    assert {sum(len(batch.tokens) for batch in step) for step in steps} == {4}


def test_finished_curriculum_over_plain_tokens_resumes():
    for make in (
        lambda: length_curriculum(range(900), 4, 32, 128, 2, 5),
        lambda: difficulty_curriculum(range(900), range(900), 4, 50, n_batches=10),
    ):
        all_steps, other = list(make()), make()
        for done in range(11):
            resumed = make()
            resumed.seek(other.state())
            rest = [[batch.tokens.tolist() for batch in step] for step in resumed]
            assert rest == [[batch.tokens.tolist() for batch in step] for step in all_steps[done:]]
            next(other, None)


@pytest.mark.parametrize(
    "curriculum",
    [{"kind": "length", "stages": 2, "shortest": 100}, {"kind": "difficulty", "hard": "synth:house-valid:8"}],
)
def test_run_with_curriculum_resumes_exactly(tiny_directory, tmp_path, curriculum):
    from whet.training.callbacks import Callback, StopRun

    class StopAtThree(Callback):
        def on_step_end(self, step, metrics):
            return StopRun("enough", unfinished=True) if step == 3 else None

    def config(name):
        data = {"train": "synth:house:24", "valid": None, "max_length": 256, "curriculum": curriculum}
        return run_config(tiny_directory, tmp_path, data=data, run={"name": name, "steps": 6})

    uninterrupted = whet.train(config("whole"))
    stopped = whet.train(config("stopped"), [StopAtThree()])
    resumed = whet.resume(stopped.directory)
    losses = [row["loss"] for row in uninterrupted.history if "loss" in row]
    assert [row["loss"] for row in (*stopped.history, *resumed.history) if "loss" in row] == losses


def test_records_are_ranked_by_a_field(tiny_directory, tmp_path):
    import json

    path = tmp_path / "ranked.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"text {n}", "hardness": n % 10}) for n in range(40)))
    config = run_config(
        tiny_directory, tmp_path,
        data={
            "train": str(path),
            "valid": "synth:house-valid:4",  # without the score field, which valid does not need
            "curriculum": {"kind": "difficulty", "score": "hardness"},
        },
        run={"steps": 4, "batch_size": 4},
    )  # fmt: skip
    assert whet.train(config).steps == 4
    config["run"]["name"] = "again"
    config["data"]["curriculum"]["score"] = "missing"
    with pytest.raises(DataError, match=r"ranked.jsonl:1: missing must be a number, not None") as error:
        whet.train(config)
    assert "the record has the fields 'text', 'hardness'" in error.value.message
    path.write_text(json.dumps({"text": "text", "missing": 10**400}))
    with pytest.raises(DataError, match=r"ranked.jsonl:1: missing must be a number, not 10000"):
        whet.train(config)


def test_curriculum_needs_steps_and_a_difficulty(tiny_directory, tmp_path):
    config = run_config(tiny_directory, tmp_path, data={"curriculum": {"kind": "length"}})
    config["run"] = {**config["run"], "epochs": 1}
    del config["run"]["steps"]
    with pytest.raises(ConfigError, match="data.curriculum needs a number of steps"):
        whet.train(config)
    config["data"]["curriculum"] = {"kind": "difficulty"}
    with pytest.raises(ConfigError, match="needs either score or hard"):
        whet.train(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", -3),
        ("min_seq_len", 0),
        ("min_seq_len", 41),  # larger than max_seq_len
        ("max_seq_len", 0),
        ("n_stages", 0),
        ("batches_per_stage", 0),
    ],
)
def test_length_curriculum_rejects_invalid_arguments(name, value):
    given = {"batch_size": 2, "min_seq_len": 8, "max_seq_len": 40, name: value}
    with pytest.raises(ConfigError, match=f"^{name} "):
        length_curriculum(range(200), **given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", -1),
        ("seq_len", 0),
        ("n_batches", 0),
        ("warmup_fraction", -0.1),
        ("warmup_fraction", 1.5),
        ("warmup_fraction", float("nan")),
    ],
)
def test_difficulty_curriculum_rejects_invalid_arguments(name, value):
    given = {"batch_size": 2, "seq_len": 8, name: value}
    with pytest.raises(ConfigError, match=f"^{name} "):
        difficulty_curriculum(range(200), range(200), **given)


def test_single_stage_has_all_examples():
    examples = random_examples(20, shortest=4, longest=40)
    [(stage, _)] = stages_by_length(
        examples, StepSettings(4, None, 512, pack=True), shortest=8, stages=1, steps=3
    )
    assert len(stage) == len(examples)
    stream = length_curriculum(list(range(200)), 2, min_seq_len=8, max_seq_len=40, n_stages=1)
    assert next(stream)[0].supervised >= 2 * 39


def test_tokenizer_is_trained_on_hard_records_and_steps_are_planned(tmp_path):
    import json

    from whet.config.load_config import validate_config
    from whet.data.run_data import Needs, RunData
    from whet.planning.dataset_count import count_small_dataset

    for name, letters in (("easy", "abc"), ("hard", "xyz")):
        rows = [{"text": letters * (n + 1)} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curriculum = {"kind": "difficulty", "hard": f"{tmp_path}/hard.jsonl"}
    config = run_config("none", tmp_path, method={"kind": "full"})
    config["model"] = {"preset": "nano", "tokenizer": "chars"}
    config["data"] = {"train": f"{tmp_path}/easy.jsonl", "curriculum": curriculum}
    config["run"]["batch_size"] = 2
    assert set("".join(RunData(validate_config(config), Needs()).training_texts())) == set("abcxyz")
    counted = count_small_dataset(validate_config(config))
    assert counted is not None
    assert counted.steps == 4


@pytest.mark.parametrize("size", [(4, None), (None, 60)])
def test_sequential_order_keeps_file_order_of_easy_and_hard(size):
    stream = easy_to_hard(StepSettings(*size, 200, pack=True, order="sequential"), ramp=12)
    steps = origins(stream, 16)
    for kind, pool in zip(("example", "hard"), stream.pools, strict=True):
        drawn = 0
        for step in steps:
            numbers = [int(origin.split()[-1]) for origin in step if origin.startswith(kind)]
            following = [(drawn + offset) % len(pool.lengths) for offset in range(len(numbers))]
            assert sorted(numbers) == sorted(following)
            drawn += len(numbers)
        assert drawn > len(pool.lengths)


def test_position_of_another_order_is_rejected():
    settings = {
        order: StepSettings(4, None, 1024, pack=True, order=order) for order in ("shuffle", "sequential")
    }
    streams = {order: easy_to_hard(settings[order]) for order in settings}
    origins(streams["shuffle"], 2)
    with pytest.raises(CheckpointError, match="have changed since this position was saved"):
        streams["sequential"].seek(streams["shuffle"].state())


def test_mlx_order_rejects_difficulty_curriculum(tiny_directory, tmp_path):
    from whet.config.load_config import validate_config

    curriculum = {"kind": "difficulty", "hard": "synth:house-valid:8"}
    data = {"curriculum": curriculum, "order": "mlx", "pack": False}
    with pytest.raises(ConfigError, match="order: mlx cannot be combined with a curriculum by difficulty"):
        validate_config(run_config(tiny_directory, tmp_path, data=data))
    data["curriculum"] = {"kind": "length"}
    assert validate_config(run_config(tiny_directory, tmp_path, data=data)).data.order == "mlx"


def test_length_curriculum_ignores_difficulty_keys(tiny_directory, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(40)))
    curriculum = {"kind": "length", "shortest": 4, "score": "grade"}  # no record has this field
    data = {"train": str(path), "valid": None, "curriculum": curriculum}
    assert whet.train(run_config(tiny_directory, tmp_path, data=data, run={"steps": 2})).steps == 2
    curriculum["hard"] = str(path)
    with pytest.raises(ConfigError, match="hard requires kind: difficulty"):
        whet.train(run_config(tiny_directory, tmp_path, data=data, run={"name": "again", "steps": 2}))
