"""The parsers of external files: a valid file, how it is mutated, and the code that reads it."""

import functools
import gzip
import io
import json
import os
import shutil
import struct
import tarfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import yaml

import whet
from fuzz.mutations import (
    edit_json,
    mutate_bytes,
    mutate_file,
    mutate_json,
    mutate_text,
    random_value,
)
from tiny import TEMPLATE, run_config, write_tiny_model
from whet.errors import WhetError


@dataclass(frozen=True)
class Parser:
    """`build` writes valid files, `change` mutates and describes them, `parse` reads them as a user would."""

    name: str
    build: Callable
    change: Callable
    parse: Callable
    cases: int


PARSERS = {}


def parser(cases):
    def register(module):
        PARSERS[module.__name__] = Parser(module.__name__, module.build, module.change, module.parse, cases)
        return module

    return register


CONFIGS = [
    {"method": {"kind": "lora", "rank": 4, "targets": ["q_proj", "mlp"], "dropout": 0.1}},
    {"objective": {"kind": "dpo", "beta": 0.1}, "data": {"train": "pairs.jsonl", "valid": None}},
    {"objective": {"kind": "grpo", "rewards": ["length"], "group_size": 4, "max_new_tokens": 8}},
    {"objective": {"kind": "classify", "classes": ["a", "b"], "pooling": "mean"}},
    {"objective": {"kind": "distill", "teacher": "gpt2", "alpha": 0.5}},
    {
        "model": {"preset": "nano", "tokenizer": "bytes", "d_model": 64},
        "optim": {"name": "muon"},
        "method": {"kind": "full"},
    },
    {"data": {"train": [{"source": "a.jsonl", "weight": 2}, {"source": "b.csv", "weight": 1}]}},
    {"eval": {"every": 2, "early_stop": {"metric": "eval_loss", "patience": 3}}, "log": {"every": 5}},
]
YAML_PIECES = ["&a ", "*a", "!!python/object/apply:os.system [x]", "!!binary ", "<<: *a", "\t", "\0", "---\n", "...\n", "? ", ": ",
               "- ", "|\n", ">-\n", "{", "}", "[", "]", "'", '"', "#", "%YAML 1.1\n", "@", "`", "1e400", ".nan", "0x1F", "2024-01-01",
               "\u2028", "\ufeff", "yes", "~", "!!set {a, b}", "!!omap", "\n", "  "]  # fmt: skip


@parser(cases=350)
class yaml_config:
    def build(directory):
        directory.mkdir()
        for number, sections in enumerate(CONFIGS):
            config = run_config("model", "tmp", **{k: v for k, v in sections.items() if k != "model"})
            text = yaml.safe_dump(config | {"model": sections.get("model", "model")}, sort_keys=False)
            (directory / f"{number}.yaml").write_text(text)

    def change(directory, rng):
        path = rng.choice(sorted(directory.iterdir()))
        for other in set(directory.iterdir()) - {path}:
            other.unlink()
        text = path.read_text()
        if rng.random() < 0.6:
            value, description = mutate_json(yaml.safe_load(text), rng)
            try:
                text = yaml.safe_dump(value, sort_keys=False, default_flow_style=rng.choice([None, True]))
            except RecursionError:
                text = json.dumps(value)  # JSON is also YAML
        elif rng.random() < 0.7:
            text, description = mutate_text(text, rng, YAML_PIECES)
        else:
            data, description = mutate_bytes(text.encode(), rng)
            path.write_bytes(data)
            return f"{path.name}: {description}"
        path.write_bytes(text.encode(errors="surrogatepass"))
        return f"{path.name}: {description}"

    def parse(directory):
        from whet.config.load_config import load_config, parse_yaml, to_dict, to_yaml, validate_config

        for path in sorted(directory.iterdir()):
            config = load_config(path, ["run.seed=3"])
            assert to_dict(validate_config(parse_yaml(to_yaml(config)))) == to_dict(config)


RECORDS = [
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
    {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4", "weight": 0}], "tools": [{"type": "function"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "p", "completion": "c", "group": "g"},
    {"prompt": "p", "chosen": "good", "rejected": "bad"},
    {"prompt": [{"role": "user", "content": "p"}], "chosen": [{"role": "assistant", "content": "x"}], "rejected": [{"role": "assistant", "content": "y"}]},
    {"instruction": "i", "input": "", "output": "o"},
    {"text": "plain text, ünïcode"},
    {"text": "t", "auth_weight": 0.5, "prov_entropy": 2.0},
    {"input": "some", "label": "a"},
    {"input": "some", "labels": [1, 0]},
    {"features": [0.1, 2, 3.5], "target": 1.0},
]  # fmt: skip


@functools.cache
def tokenizer():
    import tempfile
    from pathlib import Path

    from tiny import write_tokenizer
    from whet.model_io.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(directory)
        return load_tokenizer(Path(directory))


def read_records(path):
    """Read, normalize, render and tokenize all records; a rejected record does not stop the others."""
    from whet.data.sources.source import open_source
    from whet.data.tokens.chat_template import Renderer, record_text
    from whet.data.tokens.tokenize import Encoder

    renderer, encoder = Renderer(tokenizer()), Encoder(tokenizer())
    source = open_source(str(path), on_bad="skip")
    source.digest()
    for record in source:
        for use in (
            renderer.render,
            renderer.render_pair,
            renderer.render_question,
            renderer.render_prompt,
            renderer.render_classification,
            record_text,
        ):
            with suppress(WhetError):
                rendering = use(record)
                if use == renderer.render:
                    encoder.encode_one(rendering)
    list(open_source(str(path)))


@parser(cases=350)
class jsonl:
    def build(directory):
        directory.mkdir()
        (directory / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        (directory / "x.json").write_text(json.dumps(RECORDS[3:6]))

    def change(directory, rng):
        kind = rng.choice(["structure"] * 5 + ["bytes", "list", "deep"])
        path = directory / ("x.json" if kind == "list" else "x.jsonl")
        if kind == "bytes":
            return mutate_file(path, rng)
        if kind == "list":
            return rng.choice([mutate_file, edit_json])(path, rng)
        records = [rng.choice(RECORDS) for _ in range(3)]
        if kind == "deep":
            levels = rng.choice([500, 5000, 100_000])
            line = rng.choice(
                ['{"text": ' + "[" * levels + "]" * levels + "}", "[" * levels, '{"a":' * levels]
            )
            path.write_text("\n".join([json.dumps(records[0]), line, json.dumps(records[1])]))
            return f"{levels} levels"
        value, description = mutate_json(records[0], rng, surrogates=True)
        path.write_text("\n".join(map(json.dumps, [value, *records[1:]])))
        return description

    def parse(directory):
        read_records(directory / "x.json")
        read_records(directory / "x.jsonl")


@parser(cases=200)
class csv_file:
    def build(directory):
        directory.mkdir()
        (directory / "x.csv").write_text(
            'prompt,completion,label,messages\na,"b, ""c""",1,\n"line\nbreak",d,x,"[{""role"": ""user"", ""content"": ""x""}]"\n'
        )
        (directory / "x.tsv").write_text("text\tauth_weight\tprov_entropy\nsome\t0.5\t1\nmore\t0.1\t2\n")

    def change(directory, rng):
        path = directory / rng.choice(["x.csv", "x.tsv"])
        if rng.random() < 0.5:
            return mutate_file(path, rng)
        pieces = [
            *',\t\n\r"',
            '""',
            "\0",
            "a" * 5000,
            "\ud800",
            "nan",
            "1e999",
            "[[[",
            '[{"role": 3}]',
            "²",
            "\ufeff",
            "-1",
        ]
        text, description = mutate_text(path.read_text(), rng, pieces)
        path.write_bytes(text.encode(errors="surrogatepass"))
        return f"{path.name}: {description}"

    def parse(directory):
        read_records(directory / "x.csv")
        read_records(directory / "x.tsv")


@parser(cases=200)
class archives:
    def build(directory):
        directory.mkdir()
        content = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
        with zipfile.ZipFile(directory / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("a.jsonl", "b/c.json"):
                archive.writestr(name, content)
        for mode, name in (("w", "x.tar"), ("w:gz", "x.tar.gz")):
            with tarfile.open(directory / name, mode) as archive:
                for member in ("a.jsonl", "b/c.json"):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))

    def change(directory, rng):
        path = directory / rng.choice(["x.zip", "x.tar", "x.tar.gz"])
        if path.suffix != ".gz" or rng.random() < 0.3:
            return mutate_file(path, rng)
        data, description = mutate_bytes(gzip.decompress(path.read_bytes()), rng)  # behind its checksum
        path.write_bytes(gzip.compress(data))
        return f"inside {path.name}: {description}"

    def parse(directory):
        for name in ("x.zip", "x.tar", "x.tar.gz"):
            read_records(directory / name)


@parser(cases=200)
class parquet:
    def build(directory):
        import pyarrow as pa
        import pyarrow.parquet as pq

        directory.mkdir()
        messages = [RECORDS[0]["messages"]] * 4
        table = pa.table(
            {
                "prompt": ["a", "b", "c", None],
                "completion": ["x"] * 4,
                "n": [1, 2, 3, 4],
                "messages": messages,
            }
        )
        pq.write_table(table, directory / "x.parquet", compression="none")

    def change(directory, rng):
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = directory / "x.parquet"
        data = path.read_bytes()
        if rng.random() < 0.35:
            return mutate_file(path, rng)
        if rng.random() < 0.5:  # inside the footer, which describes the columns
            size = struct.unpack("<I", data[-8:-4])[0]
            footer, description = mutate_bytes(data[-8 - size : -8], rng)
            path.write_bytes(data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1")
            return f"footer: {description}"
        columns = {
            "text": pa.array(["a", None, "b"]),
            "big": pa.array([2**62, None, 1]),
            "time": pa.array([2**60, 0, -(2**60)], pa.timestamp("us")),
            "day": pa.array([2**31 - 1, 0, 1], pa.date32()),
            "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
            "words": pa.array(["x", "y", "x"]).dictionary_encode(),
            "bytes": pa.array([b"\xff", None, b""]),
            "decimal": pa.array([None, None, None], pa.decimal128(38, 10)),
            "prompt": pa.array([{"a": [1.5]}, None, {"a": []}]),
            "messages": pa.array([[{"role": "user", "content": None}], [], None]),
            "": pa.array([1.0, float("nan"), float("inf")]),
        }
        names = rng.sample(sorted(columns), rng.randint(1, 4))
        arrays = [columns[name] for name in names]
        if rng.random() < 0.2:
            names, arrays = [*names, names[0]], [*arrays, arrays[0]]
        pq.write_table(pa.Table.from_arrays(arrays, names=names), path)
        return f"columns {names}"

    def parse(directory):
        read_records(directory / "x.parquet")


def load_and_use(directory):
    model, tokenizer = whet.load(directory, dtype=torch.float32, device="cpu")
    if tokenizer is not None:
        whet.generate(model, tokenizer, "hi", max_tokens=1)


@parser(cases=250)
class safetensors_file:
    def build(directory):
        write_tiny_model(directory, num_hidden_layers=1)

    def change(directory, rng):
        path = directory / "model.safetensors"
        data = path.read_bytes()
        if rng.random() < 0.3:
            return mutate_file(path, rng)
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        if rng.random() < 0.2:  # non-finite or extreme values
            values = np.frombuffer(body, np.float32).copy()
            values[rng.randrange(len(values))] = rng.choice([np.nan, np.inf, -np.inf, 3e38, 1e-45])
            path.write_bytes(data[: 8 + size] + values.tobytes())
            return "an extreme value"
        if rng.random() < 0.5:
            name = rng.choice([key for key in header if key != "__metadata__"])
            entry = header[name]
            key = rng.choice(["dtype", "shape", "data_offsets"])
            entry[key] = {
                "dtype": rng.choice(["F64", "F16", "BF16", "I32", "BOOL", "F8_E4M3", "X", 3]),
                "shape": rng.choice(
                    [[], entry["shape"][::-1], [0], [-1], [2**62, 4], [1, *entry["shape"]], "x"]
                ),
                "data_offsets": rng.choice([[0, 4], [4, 0], [0, 2**63], [-4, 0], [0], [0.5, 1]]),
            }[key]
            description = f"{name}.{key} = {entry[key]}"
        else:
            header, description = mutate_json(header, rng)
        encoded = json.dumps(header).encode()
        length = rng.choice([len(encoded)] * 6 + [0, 1, 2**40, 2**63, len(encoded) + 7])
        path.write_bytes(struct.pack("<Q", length) + encoded + body)
        return description

    def parse(directory):
        load_and_use(directory)


@parser(cases=300)
class model_config:
    """config.json of a native family and of one through transformers, generation_config.json, an index."""

    def build(directory):
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        write_tiny_model(directory / "native", num_hidden_layers=1)
        config = GPTNeoXConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        GPTNeoXForCausalLM(config).save_pretrained(directory / "bridged")
        names = dict.fromkeys(["model.norm.weight", "model.embed_tokens.weight"], "model.safetensors")
        (directory / "index.json").write_text(
            json.dumps({"metadata": {"total_size": 1}, "weight_map": names})
        )

    def change(directory, rng):
        native = directory / "native"
        choice = rng.choice(["native"] * 5 + ["bridged"] * 3 + ["generation", "index", "bytes"])
        if choice == "index":
            shutil.copy(directory / "index.json", native / "model.safetensors.index.json")
            return edit_json(native / "model.safetensors.index.json", rng)
        if choice == "generation":
            return edit_json(native / "generation_config.json", rng)
        if choice == "bytes":
            return mutate_file(native / "config.json", rng)
        path = directory / choice / "config.json"
        if rng.random() < 0.4:
            config = json.loads(path.read_text())
            key = rng.choice(["model_type", "dtype", "hidden_size", "rope_parameters", "rope_scaling", "layer_types", "sliding_window",
                              "quantization_config", "head_dim", "hidden_act", "auto_map", "text_config", "architectures",
                              "num_hidden_layers", "tie_word_embeddings", "max_position_embeddings"])  # fmt: skip
            families = [
                "gpt2",
                "gemma3_text",
                "mixtral",
                "qwen3",
                "phi3",
                "whet",
                "olmo2",
                "bert",
                "t5",
                "mamba",
            ]
            config[key] = rng.choice(families) if key == "model_type" else random_value(rng)
            path.write_text(json.dumps(config))
            return f"{choice} {key} = {str(config[key])[:60]}"
        return f"{choice} {edit_json(path, rng)}"

    def parse(directory):
        load_and_use(directory / "bridged")
        load_and_use(directory / "native")
        from whet.planning.meta_model import build_meta_model
        from whet.planning.model_facts import model_facts

        for kind in ("native", "bridged"):
            model_facts(str(directory / kind), tokens=260)
            build_meta_model(str(directory / kind))


@parser(cases=250)
class gguf_file:
    def build(directory):
        import gguf

        from model_io.test_gguf_reader import gguf_metadata, gguf_tensors, tiny_model, write_gguf

        directory.mkdir()
        model = tiny_model()
        tensors, kinds = gguf_tensors(model), {}
        name = "blk.0.ffn_up.weight"
        kinds[name] = gguf.GGMLQuantizationType.Q8_0
        tensors[name] = gguf.quants.quantize(tensors[name], kinds[name])
        write_gguf(directory / "x.gguf", gguf_metadata(model.config), tensors, kinds=kinds)

    def change(directory, rng):
        path = directory / "x.gguf"
        data = bytearray(path.read_bytes())
        if rng.random() < 0.25:
            return mutate_file(path, rng)
        end = data.index(b"output_norm.weight") + 64  # approximate end of the header
        positions = [
            data.find(key) for key in (b"llama.", b"tokenizer.ggml.", b"blk.0", b"token_embd", b"general.")
        ]
        offset = rng.choice(
            [rng.randrange(end), *(position for position in positions if position > 0)]
        ) + rng.randrange(40)
        if rng.random() < 0.6:
            width, number = rng.choice([4, 8]), rng.choice([0, 1, 3, 8, 9, 12, 33, 2**31, 2**32 - 1])
            data[offset : offset + width] = number.to_bytes(width, "little")
            path.write_bytes(data)
            return f"{number} at {offset}"
        header, description = mutate_bytes(bytes(data[:end]), rng)
        path.write_bytes(header + data[end:])
        return f"header: {description}"

    def parse(directory):
        from whet.model_io.gguf.reader import convert_gguf

        shutil.rmtree(directory / "converted", ignore_errors=True)
        convert_gguf(directory / "x.gguf", directory / "converted")
        load_and_use(directory / "converted")


REGEXES = [
    "(",
    "(a+)+$",
    r"\p{Nothing}",
    "(?<=a+)b",
    "[z-a]",
    "",
    ".*" * 30,
    r"(?i:\s+)",
    "a{9999999}",
    r"\1",
    "(?:" * 200,
]


@parser(cases=300)
class tokenizer_files:
    def build(directory):
        from tiny import write_tokenizer
        from whet.models.from_scratch.train_tokenizer import make_tokenizer

        write_tokenizer(directory / "bytes")
        tokenizer = make_tokenizer(
            "bpe:300", ["some text to learn merges from, and some more text", "the text"] * 20
        )
        tokenizer.save_pretrained(directory / "bpe")

    def change(directory, rng):
        folder = directory / rng.choice(["bytes", "bpe"])
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json")
        path = rng.choice([folder / "tokenizer.json"] * 4 + files)
        if rng.random() < 0.1:
            return f"{folder.name} {mutate_file(path, rng)}"
        if path.name != "tokenizer.json" or rng.random() < 0.3:
            return f"{folder.name} {edit_json(path, rng)}"
        settings = json.loads(path.read_text())
        part = rng.choice(
            [
                "model",
                "added_tokens",
                "pre_tokenizer",
                "post_processor",
                "decoder",
                "normalizer",
                "truncation",
                "padding",
            ]
        )
        if part == "pre_tokenizer" and rng.random() < 0.6:
            pattern = rng.choice([{"Regex": rng.choice(REGEXES)}, {"String": rng.choice(["", "a"])}])
            behavior = rng.choice(["Isolated", "Removed", "MergedWithNext", "Odd"])
            settings[part] = {
                "type": "Split",
                "pattern": pattern,
                "behavior": behavior,
                "invert": rng.random() < 0.3,
            }
            description = f"{part} {settings[part]}"
        elif part == "normalizer":
            description = settings[part] = rng.choice(
                [{"type": "Replace", "pattern": {"Regex": rng.choice(REGEXES)}, "content": "b" * 50}, {"type": "Prepend", "prepend": ""},
                 {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, {"type": "Sequence", "normalizers": []}, {"type": "NFKC"}]
            )  # fmt: skip
        elif part == "model":
            model, description = mutate_json(
                {k: v for k, v in settings[part].items() if k not in ("vocab", "merges")}, rng
            )
            if isinstance(model, dict):
                vocab, merges = settings[part].get("vocab"), settings[part].get("merges")
                if rng.random() < 0.5:
                    key = rng.choice(list(vocab))
                    vocab[key] = rng.choice([-1, 2**31, 2**32, 0, 1.5, "x", None])
                    description += f"; vocab {vocab[key]}"
                if rng.random() < 0.5:
                    merges = [
                        *(merges or []),
                        rng.choice([["a", "zz"], "a", ["a"], [1, 2], "a b c", ["", ""]]),
                    ]
                    description += f"; merge {merges[-1]}"
                model |= {"vocab": vocab, "merges": merges}
            settings[part] = model
        else:
            settings[part], description = mutate_json([settings[part]], rng)
            settings[part] = (
                settings[part][0] if isinstance(settings[part], list) and settings[part] else settings[part]
            )
        path.write_text(json.dumps(settings))
        return f"{folder.name} {path.name} {part}: {str(description)[:200]}"

    def parse(directory):
        from whet.data.tokens.rendering import Rendering
        from whet.data.tokens.tokenize import Encoder, encode_prompt_ids, token_bytes
        from whet.model_io.tokenizer import load_tokenizer

        for folder in ("bytes", "bpe"):
            tokenizer = load_tokenizer(directory / folder)
            encoder = Encoder(tokenizer)
            for text in ("some text", "", "a" * 40 + "b", "ünïcode \U0001d518 \0", "<|end|><|user|>x"):
                encoder.encode(
                    [Rendering(text, [(0, len(text))], plain, plain, "x:1") for plain in (True, False)]
                )
                tokenizer.decode(encode_prompt_ids(tokenizer, text))
            token_bytes(tokenizer, vocab_size=300)


TEMPLATES = [
    TEMPLATE,
    "{{ bos_token }}{% for m in messages %}{{ m.role|upper }}: {{ m['content']|trim }}{{ '\n' if not loop.last }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}[{{ ns.n }}]"
    "{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
    "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages[1:] %}{{ turn(m) }}{% endfor %}"
    "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}{{ strftime_now('%d') }}",
]
TEMPLATE_PIECES = ["{% for m in messages %}", "{% endfor %}", "{% if x %}", "{% endif %}", "{{", "}}", "{%", "%}", "{#", "|tojson", "|length",
                   "|join", "|int", "messages", "m", ".content", "['x']", "[0]", "[-1]", "range(3)", "loop.index", "namespace()", "none",
                   "1/0", "'x'*9", "**", "//", ".__class__", ".__init__.__globals__", "|attr('__class__')", "lipsum", "cycler", "self", "raise_exception('x')",
                   "strftime_now('%Y')", "{% include 'x' %}", "{% extends 'x' %}", "{% import 'os' as o %}", "{% generation %}", "{% break %}",
                   "{% set m = messages %}", "{% macro a() %}", "{{ a() }}", "{% endmacro %}", "\0", "\ud800", "tools", "~", "is defined", "%s"]  # fmt: skip


@parser(cases=250)
class chat_template:
    def build(directory):
        directory.mkdir()
        for number, template in enumerate(TEMPLATES):
            (directory / f"{number}.jinja").write_text(template)

    def change(directory, rng):
        path = rng.choice(sorted(directory.iterdir()))
        text, description = mutate_text(path.read_text(), rng, TEMPLATE_PIECES)
        path.write_bytes(text.encode(errors="surrogatepass"))
        for other in directory.iterdir():
            if other != path:
                other.unlink()
        return f"{path.name}: {description}"

    def parse(directory):
        import copy

        from whet.data.sources.source import Record
        from whet.data.tokens.chat_template import Renderer

        for path in sorted(directory.iterdir()):
            template_tokenizer = copy.deepcopy(tokenizer())
            template_tokenizer.chat_template = path.read_bytes().decode(errors="surrogatepass")
            renderer = Renderer(template_tokenizer)
            for number, fields in enumerate(
                [RECORDS[0], RECORDS[1], RECORDS[3], {"messages": RECORDS[0]["messages"][1:] * 3}]
            ):
                record = Record(fields, f"x:{number}")
                for use in (renderer.render, renderer.render_question):
                    with suppress(WhetError):
                        use(record)
            with suppress(WhetError):
                from whet.generation.generate import encode_prompt

                encode_prompt(template_tokenizer, "hi")


@functools.cache
def adapter_base(directory):
    return whet.load(directory, dtype=torch.float32, device="cpu")[0]


@parser(cases=250)
class adapter:
    def build(directory):
        from tiny_adapters import shake

        write_tiny_model(directory / "base", num_hidden_layers=1)
        for layout in ("peft", "mlx"):
            model = whet.load(directory / "base", dtype=torch.float32, device="cpu")[0]
            whet.save_adapter(shake(whet.attach_lora(model, rank=2)), directory / layout, layout)
            edit = directory / layout / "adapter_config.json"
            config = json.loads(edit.read_text())
            config["model" if layout == "mlx" else "base_model_name_or_path"] = "BASE"
            edit.write_text(json.dumps(config))

    def change(directory, rng):
        folder = directory / rng.choice(["peft", "mlx"])
        for path in directory.glob("*/adapter_config.json"):
            path.write_text(path.read_text().replace('"BASE"', json.dumps(str(directory / "base"))))
        if rng.random() < 0.6:
            return f"{folder.name} {edit_json(folder / 'adapter_config.json', rng)}"
        [path] = folder.glob("*.safetensors")
        data = path.read_bytes()
        if rng.random() < 0.4:
            return f"{folder.name} {mutate_file(path, rng)}"
        size = struct.unpack("<Q", data[:8])[0]
        header, description = mutate_json(json.loads(data[8 : 8 + size]), rng)
        encoded = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])
        return f"{folder.name} {path.name} {description}"

    def parse(directory):
        for path in directory.glob("*/adapter_config.json"):
            path.write_text(path.read_text().replace('"BASE"', json.dumps(str(directory / "base"))))
        whet.load(directory / "mlx", dtype=torch.float32, device="cpu")
        whet.load(directory / "peft", dtype=torch.float32, device="cpu")


@parser(cases=80)
class run_directory:
    """A run that was killed after its last checkpoint: listed, reported, compared, loaded and resumed."""

    def build(directory):
        model = directory.parent / "model"
        write_tiny_model(model, num_hidden_layers=1)
        run = {"steps": 2, "batch_size": 2, "name": "run"}
        result = whet.train(run_config(model, directory.parent, run=run, checkpoint={"every": 1}))
        shutil.copytree(result.directory, directory)
        shutil.rmtree(directory / "final")

    def change(directory, rng):
        checkpoint = rng.choice(sorted((directory / "checkpoints").iterdir()))
        files = [path for path in [*directory.iterdir(), *checkpoint.iterdir()] if path.is_file()]
        path = rng.choice(sorted(files))
        if path.suffix == ".json" and rng.random() < 0.7:
            description = edit_json(path, rng)
        elif path.suffix == ".jsonl" and rng.random() < 0.8:
            lines = path.read_text().splitlines()
            number = rng.randrange(len(lines))
            value, description = mutate_json(json.loads(lines[number]), rng)
            lines[number] = json.dumps(value)
            path.write_text("\n".join(lines) + "\n")
        elif path.suffix == ".yaml" and rng.random() < 0.7:
            value, description = mutate_json(yaml.safe_load(path.read_text()), rng)
            path.write_text(json.dumps(value))
        else:
            description = mutate_file(path, rng)
        if rng.random() < 0.5 and path.parent == checkpoint and (checkpoint / "MANIFEST.json").is_file():
            update_manifest(checkpoint, path)
            description += " (the manifest was updated)"
        if rng.random() < 0.05:
            (
                directory
                / "checkpoints"
                / rng.choice(["step-²", "step-", "step-99999999999999999999", "step-x"])
            ).mkdir()
        return f"{path.name}: {description}"

    def parse(directory):
        from whet.reporting.run.report_page import write_report
        from whet.reporting.run.run_list import list_runs, runs_text
        from whet.studies.compare_runs import compare_runs

        runs_text(list_runs(directory), 0.0)
        actions = [lambda: write_report(directory), lambda: compare_runs([directory])]
        actions += [
            lambda path=path: whet.load(path, device="cpu") for path in (directory / "checkpoints").iterdir()
        ]
        for action in actions:
            with suppress(WhetError):
                action()
        whet.resume(directory)


def update_manifest(checkpoint, path):
    from whet.storage import file_sha256

    with suppress(ValueError, TypeError, KeyError, AttributeError):
        manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
        manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


@parser(cases=100)
class tkp1_file:
    def build(directory):
        from whet.recipes.quality.tkp1 import Tkp1Record, write_tkp1

        directory.mkdir()
        ones = np.ones(4, np.float32)
        records = [
            Tkp1Record(f"expert_{n}.param_0", ones, ones, ones, 3, ones if n else None) for n in range(2)
        ]
        write_tkp1(directory / "x.tkp1", step=3, config={"size": "small"}, count=2, records=records)

    def change(directory, rng):
        return mutate_file(directory / "x.tkp1", rng)

    def parse(directory):
        from whet.recipes.quality.tkp1 import read_tkp1

        read_tkp1(directory / "x.tkp1")


if "WHET_FUZZ_SELF_TEST" in os.environ:

    @parser(cases=4)
    class self_test:
        """Not a parser: one case hangs and one aborts."""

        def build(directory):
            directory.mkdir()

        def change(directory, rng):
            number = sum(1 for _ in (directory.parent).glob("seen-*"))
            (directory.parent / f"seen-{number}").touch()
            return number

        def parse(directory):
            number = sum(1 for _ in (directory.parent).glob("seen-*")) - 1
            if directory.name == "case" and number == 1:
                time.sleep(600)
            if directory.name == "case" and number == 2:
                os.abort()
