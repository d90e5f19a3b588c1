"""The command line: output, errors and exit codes."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import whet
from tiny import run_config, write_tiny_model
from whet import storage
from whet.cli.config_help import COMMON_KEYS
from whet.config.load_config import describe_keys


def write_config(tiny_directory, tmp_path, **sections):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run_config(tiny_directory, tmp_path, **sections)))
    return path


def write_records(tmp_path, *records):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    )
    return path


@pytest.fixture(scope="module")
def trained(tiny_directory, tmp_path_factory):
    """A finished run."""
    return whet.train(run_config(tiny_directory, tmp_path_factory.mktemp("cli"))).directory


def test_train_prints_progress_and_final_model_path(cli, tiny_directory, tmp_path):
    code, out, err = cli("train", write_config(tiny_directory, tmp_path), "run.steps=3")
    assert code == 0
    assert "3 steps" in out
    assert "runs/test/final" in out
    assert "whet chat" in out
    for expected in (
        "fp32: ",
        "whet's native llama",
        " trainable (",
        "train: synth:house:24: 24 examples",
        "step 3/3  loss",
    ):
        assert expected in err
    assert "Traceback" not in err


def test_piped_output_has_no_terminal_codes(cli, tiny_directory, tmp_path):
    _, out, err = cli("train", write_config(tiny_directory, tmp_path))
    assert "\x1b" not in out + err
    assert "\r" not in out + err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr', did you mean 'lr'?"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("model=no-such-model", "no-such-model"),
        ("model=./no/such/directory", "no/such/directory"),
        ("run.steps=0", "run.steps: Input should be greater than 0"),
        ("method.targets=[q_prj]", "did you mean q_proj?"),
        ("run.device=warp", "unknown device 'warp'"),
        ("run.device=meta", "unknown device 'meta'"),
        (f"run.name={'x' * 300}", "run.name: the name of a run can have at most 200 bytes"),
        ("run.dir=/dev/null/runs", "/dev/null/runs/test cannot be created"),
        ("run.micro_batch_tokens=16", "do not fit run.micro_batch_tokens=16"),
        ("data.train=synth:hose:5", "house"),
        ("eval.early_stop={metric: f1}", "early stopping: evaluations have no metric 'f1'"),
    ],
)
def test_invalid_input_prints_one_message_and_exits_2(cli, tiny_directory, tmp_path, override, message):
    code, out, err = cli("train", write_config(tiny_directory, tmp_path), override)
    assert code == 2
    assert message in err
    assert err.splitlines()[-1].startswith(("error: ", "  hint: "))
    assert "Traceback" not in err
    assert not out


def test_unread_key_is_reported_by_train_but_not_by_resume(cli, tiny_directory, tmp_path):
    config = write_config(tiny_directory, tmp_path)
    line = "method.dropout has no effect with method.kind: full"
    changes = ("method={kind: full, dropout: 0.1}", "run.steps=2")
    code, out, _ = cli("train", config, *changes, "--dry-run")
    assert (code, line in out) == (0, True)
    code, _, err = cli("train", config, *changes)
    assert (code, err.count(line)) == (0, 1)
    assert line not in cli("resume", str(tmp_path / "runs" / "test"))[2]


GOOD = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([GOOD, '{"prompt": '], "data.jsonl:2: not valid JSON"),
        ([GOOD, "[1]"], "data.jsonl:2: a record must be a JSON object"),
        ([], "data.jsonl contains no records"),
        (
            [GOOD, {"messages": [{"role": "user", "content": "hi"}]}],
            "data.jsonl:2: no token of this example is superv",
        ),
        (
            [GOOD, {"input": "x"}],
            "data.jsonl:2: a record with the fields 'input' matches no known record format",
        ),
    ],
)
def test_invalid_data_error_names_file_and_line(cli, tiny_directory, tmp_path, records, message):
    config = write_config(tiny_directory, tmp_path)
    code, _, err = cli("train", config, f"data.train={write_records(tmp_path, *records)}")
    assert code == 2
    assert message in err
    assert not (tmp_path / "runs" / "test").exists(), "a refused run leaves nothing behind"


def test_tokens_outside_the_vocabulary_raise_an_error(cli, tmp_path, tiny_directory):
    write_tiny_model(tmp_path / "small", vocab_size=200)
    code, _, err = cli("train", write_config(tmp_path / "small", tmp_path))
    assert code == 2
    assert "is outside the model's vocabulary: vocab_size=200" in err
    assert "synth:house:24#1" in err


def test_mismatched_tensor_shapes_are_reported(cli, tmp_path, tiny_directory):
    shutil.copytree(tiny_directory, tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    code, _, err = cli("train", write_config(tmp_path / "broken", tmp_path))
    assert code == 2
    assert "wrong shape: model.layers.0.mlp" in err
    assert "expected [80, 32]" in err


def test_unknown_model_error_lists_tried_locations(cli):
    code, _, err = cli("pull", "smollm2-135m-instrct")
    assert code == 2
    assert "smollm2-135m-instruct" in err


def test_train_does_not_overwrite_an_existing_run(cli, tiny_directory, tmp_path):
    config = write_config(tiny_directory, tmp_path)
    assert cli("train", config)[0] == 0
    code, _, err = cli("train", config)
    assert code == 2
    assert "never overwrites a run" in err


def test_stopped_run_exits_3_and_resumes(cli, tiny_directory, tmp_path):
    code, out, err = cli("train", write_config(tiny_directory, tmp_path), "run.max_memory=0.01")
    assert code == 3
    assert "whet resume" in err
    run = tmp_path / "runs" / "test"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"]["max_memory"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    code, out, err = cli("resume", run)
    assert code == 0
    assert "resuming after step" in err
    assert (run / "final" / "adapter_model.safetensors").is_file()


def test_nonfinite_loss_exits_1_and_keeps_metrics(cli, tiny_directory, tmp_path, monkeypatch):
    from whet.objectives.sft import SFT

    original, calls = SFT.loss, []

    def poisoned(self, model, batch):
        result = original(self, model, batch)
        calls.append(model.training)
        return type(result)({"loss": result.sums["loss"] * (float("nan") if calls.count(True) >= 3 else 1.0)})

    monkeypatch.setattr(SFT, "loss", poisoned)
    code, _, err = cli("train", write_config(tiny_directory, tmp_path, checkpoint={"every": 1}))
    assert code == 1
    assert "loss nan" in err
    assert "lower optim.lr" in err
    assert list((tmp_path / "runs" / "test" / "checkpoints").iterdir())


def test_debug_shows_traceback_and_keeps_exit_code(cli):
    code, _, err = cli("train", "nowhere.yaml", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: nowhere.yaml does not exist"


def test_version(cli):
    code, out, _ = cli("--version")
    assert (code, out) == (0, f"whet {whet.__version__}\n")


def test_train_prints_test_metrics(cli, tmp_path, tiny_directory):
    config = write_config(tiny_directory, tmp_path, data={"test": "synth:house-test:3"})
    code, out, _ = cli("train", config)
    assert code == 0
    assert out.startswith("test: loss ")


def test_unexpected_error_prints_one_line_with_debug_hint(cli, monkeypatch):
    monkeypatch.setattr("whet.model_io.resolve_model.resolve_model", lambda name: 1 / 0)
    code, _, err = cli("pull", "x")
    assert code == 1
    assert err.splitlines() == [
        "error: unexpected ZeroDivisionError: division by zero", "  hint: rerun with --debug to see the traceback"
    ]  # fmt: skip


def test_generate_prints_only_the_completion(cli, trained):
    code, out, err = cli("generate", trained, "Turn on the light", "--max-tokens", 5)
    assert code == 0
    assert out.strip() == whet.generate(*whet.load(trained), "Turn on the light", max_tokens=5).strip()


def test_generate_compare_shows_base_and_fine_tuned(cli, trained, tiny_directory):
    code, out, _ = cli("generate", trained, "Turn on the light", "--max-tokens", 5, "--compare")
    assert code == 0
    assert out.startswith("base:       ")
    base = whet.generate(*whet.load(tiny_directory), "Turn on the light", max_tokens=5)
    tuned = whet.generate(*whet.load(trained), "Turn on the light", max_tokens=5)
    assert out == f"base:       {base}\nfine-tuned: {tuned}\n"
    code, _, err = cli("generate", tiny_directory, "hi", "--compare")
    assert code == 2
    assert "no base model to compare with" in err


def test_sampling_options_are_seeded_and_validated(cli, trained):
    arguments = ("generate", trained, "hi", "--max-tokens", 12, "--temperature", 1.5, "--seed")
    assert cli(*arguments, 1)[1] == cli(*arguments, 1)[1]
    assert cli(*arguments, 1)[1] != cli(*arguments, 2)[1]
    code, _, err = cli("generate", trained, "hi", "--top-p", 3)
    assert code == 2
    assert "top_p 3.0 is not in (0, 1]" in err
    code, _, err = cli("generate", trained, "hi", "--repetition-penalty", -1)
    assert code == 2
    assert "repetition_penalty -1.0 is not positive" in err


def test_stop_strings_and_penalties_are_passed_to_generate(cli, trained):
    model, tokenizer = whet.load(trained)
    settings = {"max_tokens": 30, "repetition_penalty": 1.3}
    free = whet.generate(model, tokenizer, "hello", **settings)
    arguments = ("--max-tokens", 30, "--repetition-penalty", 1.3, "--stop", free[9:11], "--stop", "@@@")
    expected = whet.generate(model, tokenizer, "hello", stop=[free[9:11], "@@@"], **settings)
    assert len(expected) < len(free)
    assert cli("generate", trained, "hello", *arguments)[1] == expected + "\n"
    assert cli("chat", trained, *arguments, stdin="hello\nq\n")[1] == expected + "\n"


def test_chat_keeps_the_conversation(cli, trained):
    code, out, err = cli("chat", trained, "--max-tokens", 4, stdin="hello\nh\nr\nhello\nq\nnever read\n")
    assert code == 0
    assert "q: quit" in err
    answer = whet.generate(*whet.load(trained), "hello", max_tokens=4)
    assert out == f"{answer}\n{answer}\n"


def test_chat_without_template_suggests_generate(cli, tmp_path):
    write_tiny_model(tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    data = {"train": str(write_records(tmp_path, *[{"text": "hello there"}] * 4)), "valid": None}
    config = write_config(tmp_path / "plain", tmp_path, data=data, run={"steps": 1})
    code, out, err = cli("train", config)
    run = tmp_path / "runs" / "test"
    assert code == 0, err
    assert out.splitlines()[-1] == f'try it: whet generate {run} "some text"'
    code, out, err = cli("chat", run, stdin="hello\nhello\n")
    assert (code, out) == (2, "")
    assert err.count("its tokenizer has no chat template") == 1
    assert "q: quit" not in err
    assert f'whet generate {run} "some text"' in err
    for file in (tmp_path / "plain").glob("tokenizer*"):
        file.unlink()
    code, _, err = cli("chat", tmp_path / "plain", stdin="hello\n")
    assert code == 2
    assert "plain cannot chat: it has no tokenizer" in err


def test_eval_rejects_preference_pairs(cli, trained, tmp_path):
    path = write_records(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"})
    code, out, err = cli("eval", trained, "--data", path)
    assert (code, out) == (2, "")
    assert "data.jsonl:1: whet eval computes a next-token loss, and a preference record has none" in err
    assert (
        "use records with messages, with prompt and completion, or with text; a run evaluates preference pairs as"
        in err
    )


def test_chat_continues_after_a_too_long_message(cli, trained):
    code, out, err = cli("chat", trained, "--max-tokens", 2, stdin="x" * 2000 + "\nhello\n")
    assert code == 0
    assert "leaves no room" in err
    assert out == whet.generate(*whet.load(trained), "hello", max_tokens=2) + "\n"


def test_chat_ends_at_end_of_input(cli, trained):
    assert cli("chat", trained, "--max-tokens", 2, stdin="hello")[0] == 0


def test_eval_reports_loss_and_exact_match(cli, trained, tmp_path):
    code, out, err = cli(
        "eval", trained, "--data", "synth:house-test:10", "--json", "--max-tokens", 6, "--samples", 1
    )
    assert code == 0
    metrics = json.loads(out)
    assert metrics.keys() >= {
        "eval_loss",
        "eval_perplexity",
        "exact_match",
        "exact_match_known",
        "exact_match_unseen",
    }
    assert "prompt  " in err
    plain = cli("eval", trained, "--data", "synth:house-test:10", "--no-generate")[1]
    assert "eval loss" in plain
    assert "exact match" not in plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --data or --tasks is needed"),
        (("--data", "synth:house-test:2", "--tasks", "arc_easy"), "--data and --tasks exclude each other"),
        (
            ("--data", "synth:house-test:2", "--shots", "2"),
            "--limit, --shots, --chat and --contamination apply to --tasks only",
        ),
    ],
)
def test_eval_rejects_options_that_do_not_fit_together(cli, trained, arguments, message):
    code, _, err = cli("eval", trained, *arguments)
    assert code == 2
    assert message in err


def test_eval_names_the_extra_that_tasks_need(cli, trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    code, _, err = cli("eval", trained, "--tasks", "arc_easy")
    assert code == 2
    assert "benchmark tasks need lm-evaluation-harness" in err
    assert 'pip install "whet[evals]"' in err


def test_eval_rejects_missing_data(cli, trained):
    code, _, err = cli("eval", trained, "--data", "nowhere.jsonl")
    assert code == 2
    assert "nowhere.jsonl does not exist" in err


def test_unfinished_run_error_suggests_resume(cli, tiny_directory, tmp_path):
    cli("train", write_config(tiny_directory, tmp_path), "run.max_memory=0.01")
    code, _, err = cli("chat", tmp_path / "runs" / "test")
    assert code == 2
    assert "whet resume" in err


def test_doctor_shows_device_precision_versions_and_cache(cli):
    code, out, _ = cli("doctor")
    assert code == 0
    for expected in ("device", "precision", "torch", "transformers", "cache", "cores"):
        assert expected in out


@pytest.mark.parametrize("problem", [None, "Failed to find C compiler."])
def test_doctor_shows_whether_kernels_are_available_on_a_gpu(cli, monkeypatch, problem):
    from whet.cli import doctor

    monkeypatch.setattr("whet.ops.dispatch.kernel_build_problem", lambda: problem)
    expected = "whet's Triton kernels" if problem is None else f"plain torch: {problem}"
    assert doctor._describe_kernels(torch.device("cuda")) == {"kernels": expected}
    assert doctor._describe_kernels(torch.device("cpu")) == {}


def test_doctor_recommends_model_sizes(cli, monkeypatch):
    from whet.studies import recommend

    monkeypatch.setattr(
        recommend, "recommend_for", lambda target, f=recommend.recommend_for: f(target, ["135M"])
    )
    code, out, _ = cli("doctor", "--recommend", "--device", "rtx4090")
    assert code == 0
    assert out.startswith("device     rtx4090: 22.35 GiB")
    assert "\nlora   up to 135M, with run.micro_batch_tokens up to " in out
    code, _, err = cli("doctor", "--recommend", "--device", "rtx4091")
    assert code == 2
    assert "did you mean rtx4090?" in err
    code, _, err = cli("doctor", "--device", "rtx4090")
    assert code == 2
    assert "whet doctor --recommend --device rtx4090" in err


def test_doctor_lists_cached_models(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("whet.model_io.resolve_model.cached_models", lambda: [("a-model", 2**29)])
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    lines = [line.split() for line in cli("doctor")[1].splitlines()]
    assert lines[-2:] == [["cache", str(tmp_path)], ["a-model", "0.50", "GiB"]]


def test_usage_errors_exit_2(cli):
    assert cli("train")[0] == 2
    assert cli("fly")[0] == 2
    assert cli("eval", "model")[0] == 2


def test_help_groups_commands_by_task(cli):
    code, out, _ = cli("--help")
    assert code == 0
    panels = {}
    for line in out[out.index("\nTrain:") :].splitlines():
        if line.endswith(":") and not line.startswith(" "):
            panels[line.removesuffix(":")] = commands = []
        elif line.strip():
            assert "..." not in line, "the summary of a command fits on its line"
            commands.append(line[2:].split("  ")[0])
    assert panels == {
        "Train": ["init", "convert", "train", "resume", "plan", "advise", "doctor"],
        "Data": ["data", "data clean", "tokenizer"],
        "Use": ["chat", "generate", "classify", "merge", "export", "pull", "push"],
        "Evaluate": ["eval", "report"],
        "Compare": ["runs", "compare", "sweep"],
        "Advanced": ["teach", "diagnose", "ablate", "data score-distrust", "lab", "ledger"],
    }


def test_train_help_lists_common_keys_first_and_rare_keys_last(cli):
    code, out, _ = cli("train", "--help")
    assert code == 0
    common, rest = out[out.index("Common config keys:") :].split("All config keys by section:")
    by_section, rare = rest.split("Rarely needed:")
    assert keys_in(common) == list(COMMON_KEYS)
    assert keys_in(common)[:2] == ["model", "data.train"]
    assert {"method.kind", "optim.lr", "run.steps", "run.batch_size", "eval.every"} <= set(keys_in(common))
    assert sorted([*keys_in(by_section), *keys_in(rare)]) == sorted(keys_in("\n".join(describe_keys())))
    for key in ("optim.warmup", "run.max_memory", "method.targets", "data.too_long"):
        assert key in keys_in(by_section)
    for key in (
        "model.base",
        "optim.mup.base_width",
        "data.curriculum.kind",
        "log.probes.rank",
        "experts.z_loss",
    ):
        assert key in keys_in(rare)
        assert key not in keys_in(by_section)


def keys_in(text):
    return [line.strip().partition(":")[0] for line in text.splitlines() if line.startswith("  ")]


def test_ctrl_c_in_a_real_process_saves_and_exits_3(tiny_directory, tmp_path):
    """Start a run, wait for a step, press Ctrl-C."""
    config = write_config(tiny_directory, tmp_path, run={"steps": 100_000}, log={"every": 1})
    whet_command = str(Path(sys.executable).with_name("whet"))
    process = subprocess.Popen([whet_command, "train", str(config)], stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "test" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and '"loss"' in metrics.read_text()):
            assert time.monotonic() < deadline, "no step was taken"
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3, err
    assert "finishing this step, then saving" in err
    assert "to resume: whet resume" in err
    assert "Traceback" not in err
    assert list((tmp_path / "runs" / "test" / "checkpoints").glob("step-*/MANIFEST.json"))


def test_dot_path_and_empty_directory_are_not_hub_models(cli, tmp_path, monkeypatch):
    """Without the dot, the name would be a model in the cache or on the hub."""
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    write_tiny_model(tmp_path / "cache" / "models" / "smollm2-135m-instruct")
    for name in ("smollm2-135m-instruct", "foo/bar"):
        (tmp_path / "here" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("./smollm2-135m-instruct", "./foo/bar", "foo/bar", "foo"):
        code, out, err = cli("generate", name, "hi", "--max-tokens", "1")
        assert (code, out) == (2, "")
        assert f"{name} is not a model directory: it has no config.json" in err
    assert cli("generate", "smollm2-135m-instruct", "hi", "--max-tokens", "1")[0] == 0


def test_run_path_expands_home(cli, trained, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(trained.parent))
    path = f"~/{trained.name}"
    assert cli("generate", path, "hi")[1] == cli("generate", trained, "hi")[1]
    [checkpoint, *_] = sorted((trained / "checkpoints").iterdir())
    assert cli("generate", f"{path}/checkpoints/{checkpoint.name}", "hi")[0] == 0
    code, out, err = cli("export", path, "--to", "hf", "--out", tmp_path / "out")
    assert code == 0, out + err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_unwritable_stdout_is_an_error(trained):
    """A closed pipe is not an error, a full disk is."""
    command = [sys.executable, "-m", "whet", "runs", str(trained.parent)]
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 1
    assert "No space left on device" in process.stderr


def test_chat_ends_with_closed_stdin(cli, trained, monkeypatch):
    monkeypatch.setattr("io.StringIO", lambda text: None)
    assert cli("chat", trained)[0] == 0


def test_missing_output_directory_exits_2_and_full_disk_does_not(cli, trained, tmp_path, monkeypatch):
    code, _, err = cli("report", trained, "--out", tmp_path / "nowhere" / "page.html")
    assert code == 2
    assert "--out needs a file in an existing directory" in err

    def full(event, path):
        if event == "write" and "html" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "before_file_operation", full)
    code, _, err = cli("report", trained)
    assert code == 1
    assert "No space left on device" in err
    assert "--out" not in err


def test_long_errors_are_truncated(capsys):
    from whet.cli import app
    from whet.errors import ConfigError

    problem = ConfigError("\n".join(["first", *["x" * 100_000] * 500]), hint="the way out")
    app._print_error(str(problem))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) < 2200
    assert lines[0] == "error: first"
    assert lines[-1] == "  hint: the way out"


def test_exit_is_immediate_while_a_checkpoint_is_written():
    """torch aborts if one of its threads is still running when Python has ended."""
    script = """
import threading, time
from whet.cli import app
threading.Thread(target=time.sleep, args=(1000,), name="whet-save").start()
app._exit(130)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == 130


def test_ctrl_c_during_pydantic_import_is_an_interruption():
    """pydantic raises a SchemaError whose text ends in the interrupt."""
    script = """
from pydantic_core import SchemaError
from whet.cli import app


def interrupted(arguments):
    raise SchemaError("Error building `literal` serializer: KeyboardInterrupt: ")


app.app = interrupted
app.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 130
    assert "unexpected" not in done.stderr
