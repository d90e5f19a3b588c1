"""Benchmark tasks: results equal those of the harness's own Hugging Face model, and are stored in the run."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

import whet
from test_docs import MODEL, ROOT, fences
from tiny import run_config
from whet.cli.app import main
from whet.data.synthetic.generators import generate
from whet.errors import ConfigError, WhetError
from whet.evaluation.task_result import read_results
from whet.runs.run_files import read_run

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow  # make test-slow installs lm-eval

WORDS = ["lamp", "door", "garden", "kitchen", "hall", "window", "heater", "fan", "music", "light", "garage"]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
metadata: {{version: 1}}
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
num_fewshot: 2
fewshot_config: {split: test}
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "answer": """
output_type: generate_until
doc_to_text: "{{question}} {{text}}"
doc_to_target: number
generation_kwargs: {until: ["\\n", "a"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


def write_tasks(directory, *, items=12, seed=0):
    """Write one task file of each kind and their data; return the paths by name."""
    rng = random.Random(seed)
    rows = [
        {
            "question": f"Which one is last? {' '.join(rng.sample(WORDS, 6))}",
            "choices": [" ".join(rng.sample(WORDS, rng.randint(1, 4))) for _ in range(4)],
            "answer": rng.randrange(4),
            "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 120))),  # some exceed the context
            "number": str(rng.randrange(9)),
        }
        for _ in range(items)
    ]
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {}
    for name, text in TASKS.items():
        path = directory / f"{name}.yaml"
        path.write_text(f"task: local_{name}{COMMON.format(data=data)}{text}")
        paths[name] = str(path)
    return paths


def evaluate_with(model, directory, tasks):
    import lm_eval.models  # registers the harness's own models
    from lm_eval.tasks import TaskManager

    import whet.evaluation.harness  # noqa: F401  # registers whet

    arguments = {"pretrained": str(directory), "dtype": "float32", "device": "cpu"}
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(tasks.values()),
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )


def numbers(responses):
    """Return the log-likelihoods and greedy flags of a sample's responses as a flat list."""
    flat = []
    for response in responses:
        flat += numbers(response) if isinstance(response, list | tuple) else [float(response)]
    return flat


def check_equal_to_hf(directory, tasks):
    ours, theirs = (evaluate_with(model, directory, tasks) for model in ("whet", "hf"))
    assert (
        ours["samples"].keys() == theirs["samples"].keys() == {"local_choice", "local_answer", "local_text"}
    )
    for task, samples in theirs["samples"].items():
        for sample, expected in zip(ours["samples"][task], samples, strict=True):
            assert sample["arguments"] == expected["arguments"]
            if task == "local_answer":
                assert sample["resps"] == expected["resps"]
            else:
                torch.testing.assert_close(
                    numbers(sample["resps"]), numbers(expected["resps"]), atol=1e-3, rtol=0
                )
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["local_choice"][metric] == theirs["results"]["local_choice"][metric]
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        expected = theirs["results"]["local_text"][metric]
        assert ours["results"]["local_text"][metric] == pytest.approx(expected, rel=1e-4)
    exact = [results["results"]["local_answer"]["exact_match,none"] for results in (ours, theirs)]
    assert exact[0] == exact[1]


def test_results_equal_those_of_transformers(tiny_directory, tmp_path):
    check_equal_to_hf(tiny_directory, write_tasks(tmp_path))


def test_results_of_an_exported_run_equal_those_of_transformers(run, tmp_path):
    exported = whet.export(run, "hf", tmp_path / "exported")
    tasks = write_tasks(tmp_path)
    check_equal_to_hf(exported, tasks)
    direct, through_export = (evaluate_with("whet", path, tasks) for path in (run, exported))
    for task in direct["samples"]:
        for sample, expected in zip(direct["samples"][task], through_export["samples"][task], strict=True):
            if task != "local_answer":
                torch.testing.assert_close(
                    numbers(sample["resps"]), numbers(expected["resps"]), atol=1e-3, rtol=0
                )


def test_results_of_smollm2_equal_those_of_transformers(smollm2_directory, tmp_path):
    check_equal_to_hf(smollm2_directory, write_tasks(tmp_path))


@pytest.fixture(scope="module")
def run(tiny_directory, tmp_path_factory):
    """A finished run of a few steps."""
    config = run_config(tiny_directory, tmp_path_factory.mktemp("harness"))
    return whet.train(config, verbose=0).directory


def test_results_are_stored_with_the_run_and_reused(run, tmp_path):
    tasks = write_tasks(tmp_path)
    before = len(read_results(run))  # of other tests
    calls = []
    progress = lambda *counts: calls.append(counts)  # noqa: E731
    [first] = whet.benchmark(run, [tasks["choice"]], progress=progress)
    assert calls
    assert first.scores["acc"].stderr > 0
    assert first.items == len(first.item_ids) == len(first.item_scores["acc"]) == 12
    assert sum(first.item_scores["acc"]) / 12 == pytest.approx(first.scores["acc"].value)
    assert read_results(run)[-1] == first

    calls.clear()
    assert whet.benchmark(run, [tasks["choice"]], progress=progress) == [first]
    assert not calls  # nothing was computed
    assert len(read_results(run)) == before + 1

    [fewer] = whet.benchmark(run, [tasks["choice"]], limit=5)
    assert fewer.items == 5
    write_tasks(tmp_path, seed=1)  # the same task with other items
    [other] = whet.benchmark(run, [tasks["choice"]])
    assert len({first.key, fewer.key, other.key}) == 3
    assert len(read_results(run)) == before + 3


GROUP = """
group: local_group
task: [local_choice, local_other]
aggregate_metric_list:
  - {{metric: acc, aggregation: mean, weight_by_size: {weighted}}}
  - {{metric: acc_norm, aggregation: mean, weight_by_size: true}}
metadata: {{version: 3}}
"""


def write_group(directory, *, weighted):
    """Write a group of two multiple-choice tasks of different sizes; return its path."""
    write_tasks(directory)
    text = (directory / "choice.yaml").read_text().replace("local_choice", "local_other")
    (directory / "other.yaml").write_text(text.replace("data.jsonl", "fewer.jsonl"))
    lines = (directory / "data.jsonl").read_text().splitlines(keepends=True)
    (directory / "fewer.jsonl").write_text("".join(reversed(lines[:5])))
    path = directory / "group.yaml"
    path.write_text(GROUP.format(weighted=str(weighted).lower()))
    return str(path)


@pytest.mark.parametrize("weighted", [True, False])
def test_group_totals_equal_those_of_the_harness(tiny, tmp_path, weighted):
    from lm_eval.tasks import TaskManager

    from whet.evaluation.harness import HarnessModel

    path = write_group(tmp_path, weighted=weighted)
    choice, other, group = whet.benchmark(tiny, [path])
    theirs = lm_eval.simple_evaluate(
        model=HarnessModel(*tiny),
        tasks=["local_group"],
        task_manager=TaskManager(include_defaults=False, include_path=str(tmp_path)),
    )["groups"]["local_group"]
    assert (group.task, group.version, group.items, group.shots) == ("local_group", "3", 17, 2)
    assert group.tasks == ["local_choice", "local_other"]
    for metric in ("acc", "acc_norm"):
        assert group.scores[metric].value == theirs[f"{metric},none"]
        assert group.scores[metric].stderr == theirs[f"{metric}_stderr,none"]
    pooled = choice.item_scores["acc_norm"] + other.item_scores["acc_norm"]
    assert group.scores["acc_norm"].value == pytest.approx(np.mean(pooled))  # weighted by size
    assert group.item_scores["acc_norm"] == pooled
    assert ("acc" in group.item_scores) == weighted  # otherwise not a mean over the items
    if not weighted:
        means = [np.mean(task.item_scores["acc"]) for task in (choice, other)]
        assert group.scores["acc"].value == pytest.approx(np.mean(means))


def test_group_totals_are_stored_and_compared(run, tiny_directory, tmp_path):
    from whet.studies.compare_benchmarks import compare_benchmarks

    path = write_group(tmp_path, weighted=True)
    *_, group = whet.benchmark(run, [path])
    count = len(read_results(run))
    assert read_results(run)[-1] == group
    assert whet.benchmark(run, [path], contamination=True)[-1] == group
    assert whet.benchmark(run, [path])[-1] == group
    assert sum(result.task == "local_group" for result in read_results(run)[count:]) == 0
    other = whet.train(run_config(tiny_directory, tmp_path / "other", optim={"lr": 0.1}), verbose=0).directory
    whet.benchmark(other, [path])
    comparisons = compare_benchmarks([[read_run(run)], [read_run(other)]])
    [row] = [each for each in comparisons if (each.task, each.metric) == ("local_group (2-shot)", "acc")]
    assert row.paired[1].items == 17
    assert row.values[0] == group.scores["acc"].value


def test_contamination_counts_items_of_the_training_data(run, tmp_path):
    train = [record["messages"] for record in generate("synth:house:24")]  # the data of the run
    questions = [f"{messages[-2]['content']} {messages[-1]['content']}" for messages in train[:3]]
    tasks = write_tasks(tmp_path, items=5)
    rows = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    rows += [{**row, "question": text} for row, text in zip(rows, questions, strict=False)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [plain] = whet.benchmark(run, [tasks["choice"]])
    [result] = whet.benchmark(run, [tasks["choice"]], contamination=True)
    assert (result.contamination.overlapping, result.contamination.items) == (3, 8)
    assert result.contamination.clean_scores["acc"] == pytest.approx(sum(plain.item_scores["acc"][:5]) / 5)
    assert read_results(run)[-1] == result


def test_the_key_depends_on_the_weights(tiny, tmp_path):
    model, tokenizer = tiny
    tasks = write_tasks(tmp_path)
    [before] = whet.benchmark((model, tokenizer), [tasks["choice"]], limit=2)
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight[0, 0] += 0.5
    [after] = whet.benchmark((model, tokenizer), [tasks["choice"]], limit=2)
    assert before.key != after.key


def test_random_states_are_preserved(tiny, tmp_path):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    whet.benchmark(tiny, [write_tasks(tmp_path)["choice"]], limit=1)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_no_program_is_started(tiny, tmp_path, monkeypatch, capfd):
    """The harness would ask git, gcc and others about the machine, and git complains outside of a repository."""
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(args) or popen(*args, **options)
    )
    monkeypatch.chdir(tmp_path)
    whet.benchmark(tiny, [write_tasks(tmp_path)["choice"]], limit=1)
    assert started == []
    assert "fatal" not in capfd.readouterr().err
    assert lm_eval.evaluator.get_git_commit_hash.__module__.startswith("lm_eval"), "restored"


def test_shots_change_the_prompts(tiny, tmp_path):
    tasks = write_tasks(tmp_path)
    [default] = whet.benchmark(tiny, [tasks["choice"]], limit=2)
    [zero] = whet.benchmark(tiny, [tasks["choice"]], limit=2, shots=0)
    assert (default.shots, zero.shots) == (2, 0)
    assert default.key != zero.key


def test_chat_prompts_use_the_template(tiny, tmp_path, monkeypatch):
    from whet.evaluation.harness import HarnessModel

    prompts = []
    original = HarnessModel.tok_encode

    def record(self, string, *arguments, **options):
        prompts.append(string)
        return original(self, string, *arguments, **options)

    monkeypatch.setattr(HarnessModel, "tok_encode", record)
    whet.benchmark(tiny, [write_tasks(tmp_path)["answer"]], limit=1, chat=True)
    assert prompts
    assert all(prompt.startswith("<|user|>") and prompt.endswith("<|assistant|>") for prompt in prompts)


def test_the_command_of_the_harness_accepts_runs(run, tmp_path):
    tasks = write_tasks(tmp_path)
    arguments = ["run", "--model", "whet", "--model_args", f"pretrained={run}", "--tasks", tasks["choice"]]
    command = [sys.executable, "-m", "whet.evaluation.harness", *arguments, "--limit", "2"]
    output = [*command, "--output_path", str(tmp_path / "results"), "--device", "cpu"]
    subprocess.run(output, check=True, capture_output=True, timeout=300)
    [path] = (tmp_path / "results").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]["local_choice"]
    [ours] = whet.benchmark(run, [tasks["choice"]], limit=2)
    assert results["acc,none"] == ours.scores["acc"].value


def test_eval_command_prints_a_table_and_json(run, tmp_path, capsys, monkeypatch):
    tasks = write_tasks(tmp_path)
    arguments = ["whet", "eval", str(run), "--tasks", f"{tasks['choice']},{tasks['text']}", "--limit", "3"]
    outputs = []
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        with pytest.raises(SystemExit) as info:
            main()
        assert info.value.code in (0, None)
        outputs.append(capsys.readouterr().out)
    table, text = outputs
    lines = [line.split() for line in table.splitlines()]
    assert lines[1][:5] == ["local_choice", "1", "2", "first", "3"]
    results = json.loads(text)
    assert [result["task"] for result in results] == ["local_choice", "local_text"]
    assert lines[1][6] == f"{results[0]['scores']['acc']['value']:.4f}"


def test_the_house_task_runs(tiny):
    [result] = whet.benchmark(tiny, [str(ROOT / "examples" / "house-task.yaml")], limit=3, chat=True)
    assert (result.task, result.items) == ("house", 3)


def test_python_of_the_guide_runs(tiny_directory, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "evaluate.md"
    for fence in fences(page):
        if len(fence.info) > 1 and "." in fence.info[1]:
            (tmp_path / fence.info[1]).write_text(fence.text)
    [code] = [fence.text for fence in fences(page) if fence.info == ["python", "evals"]]
    exec(compile(code.replace(MODEL, str(tiny_directory)), str(page), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("task: [x\n", "cannot be loaded"),
        ("task: x\nunknown_key: 1\n", "unknown_key"),
    ],
)
def test_a_wrong_task_file_is_reported(tiny_directory, tmp_path, text, message):
    path = tmp_path / "task.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        whet.benchmark(tiny_directory, [str(path)])


def test_an_unknown_task_is_reported_with_similar_names(tiny_directory):
    with pytest.raises(ConfigError, match="unknown task 'helaswag'") as info:
        whet.benchmark(tiny_directory, ["helaswag"])
    assert "hellaswag" in info.value.hint


def test_generation_settings_that_are_not_supported_are_reported(tiny, tmp_path):
    path = write_tasks(tmp_path)["answer"]
    text = (tmp_path / "answer.yaml").read_text()
    (tmp_path / "answer.yaml").write_text(text.replace("max_gen_toks: 12", "max_gen_toks: 12, num_beams: 4"))
    with pytest.raises(WhetError, match="num_beams"):
        whet.benchmark(tiny, [path], limit=1)
