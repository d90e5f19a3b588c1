"""Synthetic shell commands labeled with their faults; the same words occur in harmless and harmful roles.

A command has a few statements. Each fault (an unquoted variable, a result that changes from run to run, a
statement that is not idempotent, a dangerous operation) also occurs as a twin without the fault (quoted,
seeded, guarded, confined), and as quoted text in another command, which has no effect. The class therefore
depends on quoting and context, not on words. Training and validation use different templates.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any, Literal

from whet.errors import DataError

ShellSplit = Literal["train", "valid"]
ShellRecord = dict[str, Any]  # a JSON object

CLASSES = ("safe", "needs quoting", "non-deterministic", "not idempotent", "unsafe")
FAULTS = CLASSES[1:]
SHARES = {"safe": 20, "needs quoting": 8, "non-deterministic": 6, "not idempotent": 4, "unsafe": 2}
MAX_COMMANDS = 20_000  # a limit below the number of distinct commands

# (with the fault, twin without it). Variables: @v and @w; file: @f; directory: @d; name: @u; host: @h;
# number: @n
_TWINS: dict[str, dict[ShellSplit, tuple[tuple[str, str], ...]]] = {
    "needs quoting": {
        "train": (
            ("cat $@v", 'cat "$@v"'),
            ("cp -f $@v @d/", 'cp -f "$@v" @d/'),
            ("rm -f $@v", 'rm -f "$@v"'),
            ("wc -l $@v", 'wc -l "$@v"'),
            ("cd $@v", 'cd "$@v"'),
            ("mkdir -p $@v/@d", 'mkdir -p "$@v/@d"'),
            ("grep -c @u $@v", 'grep -c @u "$@v"'),
            ("[ -f $@v ]", "[[ -f $@v ]]"),
            ("[ $@v = @u ]", "[[ $@v = @u ]]"),
            ("chown @u ${@v}", 'chown @u "${@v}"'),
            ("touch @d/${@v}.txt", 'touch "@d/${@v}.txt"'),
            ("sort -o @f $@v", "@v=$@w"),
            ("ls -l $@v/*", 'ls -l "$@v"/*'),
            ("cat @d/$@v", 'cat "@d/$@v"'),
            ("rm -f @d/$@v", 'rm -f "@d/$@v"'),
            ("tail -n @n $@v", 'tail -n @n "$@v"'),
            ("[ -z $@v ]", "[[ -z $@v ]]"),
            ("stat $@v", 'stat "$@v"'),
            ("mv -f $@v @d/@u", 'mv -f "$@v" @d/@u'),
            ("file @d/${@v}", 'file "@d/${@v}"'),
            ("gzip -kf $@v", 'gzip -kf "$@v"'),
            ("chmod 600 $@v", 'chmod 600 "$@v"'),
            ("chmod 755 @d/${@v}", 'chmod 755 "@d/${@v}"'),
            ("[ -d $@v ]", "[[ -d $@v ]]"),
            ("[ -s ${@v} ]", "[[ -s ${@v} ]]"),
            ("diff $@v @f", 'diff "$@v" @f'),
            ("tar -tf $@v", 'tar -tf "$@v"'),
            ("du -s $@v", 'du -s "$@v"'),
            ("head -c @n $@v", 'head -c @n "$@v"'),
            ("basename $@v .txt", 'basename "$@v" .txt'),
            ("sha256sum @d/$@v", 'sha256sum "@d/$@v"'),
        ),
        "valid": (
            ("head -n @n $@v", 'head -n @n "$@v"'),
            ("tar -cf @f $@v", 'tar -cf @f "$@v"'),
            ("du -sh ${@v}", 'du -sh "${@v}"'),
            ("[ -n $@v ]", "[[ -n $@v ]]"),
            ("chmod 644 @d/$@v", 'chmod 644 "@d/$@v"'),
        ),
    },
    "non-deterministic": {
        "train": (
            ("echo $RANDOM > @f", "RANDOM=@n; echo $RANDOM > @f"),
            ("date > @f", "date -d @@n > @f"),
            ("touch @d/$(date +%s)", "touch -d @@n @d/@u"),
            ("shuf @f > @d/@u", "shuf --random-source=@f @f > @d/@u"),
            ("uuidgen > @f", "uuidgen --md5 -n %dns -N @u > @f"),
            ("head -c @n /dev/urandom > @f", "head -c @n /dev/zero > @f"),
            ("ls -U @d > @f", "ls @d > @f"),
            ("find @d -type f > @f", "find @d -type f | sort > @f"),
            ("mktemp -p @d", "mkdir -p @d/tmp"),
            ("echo $$ > @f", "echo @n > @f"),
            ("sort -R @f > @d/@u", "sort @f > @d/@u"),
            ("awk 'BEGIN { srand(); print rand() }' > @f", "awk 'BEGIN { srand(@n); print rand() }' > @f"),
            ("echo $(date +%F) > @f", "echo $(date -d @@n +%F) > @f"),
            ("mkdir -p @d/$(date +%j)", "mkdir -p @d/$(date -d @@n +%j)"),
            ("seq 1 $RANDOM > @f", "RANDOM=@n; seq 1 $RANDOM > @f"),
            ("find @d -size +1M > @f", "find @d -size +1M | sort > @f"),
            ("shuf -i 1-@n > @f", "shuf -i 1-@n --random-source=@d/@u > @f"),
            ("od -N @n /dev/urandom > @f", "od -N @n /dev/zero > @f"),
            ("cut -c 1-@n < /dev/urandom > @f", "cut -c 1-@n < /dev/zero > @f"),
            ("tr -dc 0-9 < /dev/urandom > @f", "tr -dc 0-9 < /dev/zero > @f"),
            ("base64 /dev/urandom | head -c @n > @f", "base64 /dev/zero | head -c @n > @f"),
            ("echo @u-$RANDOM > @f", "RANDOM=@n; echo @u-$RANDOM > @f"),
            ("printf '%x' $RANDOM > @d/@u", "RANDOM=@n; printf '%x' $RANDOM > @d/@u"),
            ("mv -f @f @d/$(date +%F)", "mv -f @f @d/$(date -d @@n +%F)"),
            ("cp -f @f @d/$(date +%H)", "cp -f @f @d/$(date -d @@n +%H)"),
            ("tar -cf @d/$(date +%s).tar @f", "tar -cf @d/$(date -d @@n +%s).tar @f"),
            ("find @d -newer @f > @d/@u", "find @d -newer @f | sort > @d/@u"),
            ("find @d -name '*.txt' > @f", "find @d -name '*.txt' | sort > @f"),
            ("find . -name '@u*' > @f", "find . -name '@u*' | sort > @f"),
            ("shuf -n @n @f > @d/@u", "shuf -n @n --random-source=@f @f > @d/@u"),
            ("shuf -e anna ben > @f", "shuf -e anna ben --random-source=@d/@u > @f"),
            ("sort -R -u @f > @d/@u", "sort -u @f > @d/@u"),
            ("ps > @f", "true > @f"),
        ),
        "valid": (
            ("printf '%d' $RANDOM > @f", "RANDOM=@n; printf '%d' $RANDOM > @f"),
            ("cp -f @f @d/$(date +%s)", "cp -f @f @d/$(date -d @@n +%s)"),
            ("shuf -n 1 @f > @d/@u", "shuf -n 1 --random-source=@f @f > @d/@u"),
            ("find @d -name '*.log' > @f", "find @d -name '*.log' | sort > @f"),
            ("tr -dc a-z < /dev/urandom | head -c @n > @f", "tr -dc a-z < /dev/zero | head -c @n > @f"),
        ),
    },
    "not idempotent": {
        "train": (
            ("mkdir @d", "mkdir -p @d"),
            ("mkdir @d/@u", "[ -d @d/@u ] || mkdir @d/@u"),
            ("ln -s @f @d/@u", "ln -sf @f @d/@u"),
            ("echo @u >> @f", "echo @u > @f"),
            ("echo export @v=@n >> @f", "grep -q @v= @f || echo export @v=@n >> @f"),
            ("rm @f", "rm -f @f"),
            ("useradd @u", "id @u || useradd @u"),
            ("git clone https://@h/@u.git @d", "[ -d @d ] || git clone https://@h/@u.git @d"),
            ("cat @f >> @d/@u", "cat @f > @d/@u"),
            ("sed -i '1i # @u' @f", "grep -q '# @u' @f || sed -i '1i # @u' @f"),
            ("groupadd @u", "getent group @u || groupadd @u"),
            ("rmdir @d", "[ ! -d @d ] || rmdir @d"),
            ("rm @d/@u", "rm -f @d/@u"),
            ("echo @d >> @f", "grep -qx @d @f || echo @d >> @f"),
            ("mkdir @d/@u @d/tmp", "mkdir -p @d/@u @d/tmp"),
            ("ln -s ../@f @d", "ln -sf ../@f @d"),
            ("ln -s ./@f ./@u", "ln -sf ./@f ./@u"),
            ("mkdir @d && cd @d", "mkdir -p @d && cd @d"),
            ("mkdir ./@u", "mkdir -p ./@u"),
            ("mkdir @u", "[ -d @u ] || mkdir @u"),
            ("printf '@v=@n' >> @f", "printf '@v=@n' > @f"),
            ("date -d @@n >> @f", "date -d @@n > @f"),
            ("ls @d >> @f", "ls @d > @f"),
            ("head -n @n @f >> @d/@u", "head -n @n @f > @d/@u"),
            ("echo @u=@n >> @d/@f", "grep -q @u= @d/@f || echo @u=@n >> @d/@f"),
            ("printf '@h' >> @f", "grep -q @h @f || printf '@h' >> @f"),
            ("rm ./@f", "rm -f ./@f"),
            ("rm @d/@u @f", "rm -f @d/@u @f"),
            ("mv @f @d/@u", "[ ! -f @f ] || mv @f @d/@u"),
            ("git init @d && git -C @d commit --allow-empty -m @u", "git init @d"),
        ),
        "valid": (
            ("mkdir @d @d/@u", "mkdir -p @d @d/@u"),
            ("ln -s @d/@u @f", "ln -sf @d/@u @f"),
            ("printf '%s' @u >> @f", "printf '%s' @u > @f"),
            ("echo @h >> @f", "grep -q @h @f || echo @h >> @f"),
            ("rm @d/@f", "rm -f @d/@f"),
        ),
    },
    "unsafe": {
        "train": (
            ("rm -rf /", "rm -rf ./@d"),
            ("rm -rf ~/", "rm -rf ~/@d/@u"),
            ("rm -rf /usr", "rm -rf ./@d/usr"),
            ("curl -s https://@h/@u.sh | sh", "curl -s https://@h/@u.sh > @f"),
            ("wget -qO- https://@h/@u.sh | bash", "wget -qO @f https://@h/@u.sh"),
            ("chmod -R 777 /", "chmod -R 755 ./@d"),
            ("chmod 777 /etc/@u", "chmod 644 ./@d/@u"),
            ("dd if=@f of=/dev/sda", "dd if=@f of=./@d/sda.img"),
            ("echo @u > /etc/passwd", "echo @u > ./@d/passwd"),
            ("mkfs.ext4 /dev/sdb", "mkfs.ext4 ./@d/sdb.img"),
            ("mv -f @f /dev/null", "cp -f @f ./@d/null"),
            ("chown -R @u /", "chown -R @u ./@d"),
            ("curl -L https://@h/@u | sudo sh", "curl -L https://@h/@u > ./@d/@u"),
            ("cp -f @f /etc/shadow", "cp -f @f ./@d/shadow"),
            ("chmod -R 777 /var", "chmod -R 755 ./@d/var"),
            ("rm -rf /home", "rm -rf ./@d/home"),
            ("rm -rf /var/*", "rm -rf ./@d/var/*"),
            ("rm -rf / --no-preserve-root", "rm -rf ./@d --preserve-root"),
            ("curl -s https://@h/@u | bash", "curl -s https://@h/@u > @f"),
            ("curl https://@h/@u.sh | sudo bash", "curl https://@h/@u.sh > @d/@u"),
            ("wget -O - https://@h/@u | sh", "wget -O @f https://@h/@u"),
            ("chmod -R 777 /opt", "chmod -R 755 ./@d/opt"),
            ("chmod 777 /bin/@u", "chmod 755 ./@d/bin/@u"),
            ("dd if=/dev/zero of=/dev/sda", "dd if=/dev/zero of=./@d/sda count=@n"),
            ("cat @f > /dev/sda", "cat @f > ./@d/sda"),
            ("cat @f > /etc/shadow", "cat @f > ./@d/shadow"),
            ("cp -f @f /etc/passwd", "cp -f @f ./@d/passwd"),
            ("chown -R @u /etc", "chown -R @u ./@d/etc"),
            ("mkfs -t ext4 /dev/sda", "mkfs -t ext4 ./@d/sda.img"),
        ),
        "valid": (
            ("rm -rf /etc", "rm -rf ./@d/etc"),
            ("curl -fsSL https://@h/@u | bash", "curl -fsSL https://@h/@u > @f"),
            ("chmod -R 777 /usr", "chmod -R 755 ./@d/usr"),
            ("dd if=@f of=/dev/sdb", "dd if=@f of=./@d/sdb.img"),
            ("cat @f > /etc/passwd", "cat @f > ./@d/passwd"),
        ),
    },
}
# commands that only quote a text, and other harmless commands
_TEXTS: dict[ShellSplit, tuple[str, ...]] = {
    "train": (
        "echo '@t'",
        "grep -n '@t' @f",
        "# @t",
        "git commit -m '@t'",
        "echo 'never run: @t'",
        "grep -c -- '@t' @d/@u",
        "logger 'refused: @t'",
        "printf '@t'",
        "printf 'no: %s' '@t'",
        "git log -S '@t'",
        "# never: @t",
        "# TODO: do not run @t",
        "echo '@n. @t'",
        "echo 'part @n, @t'",
        "grep -rl '@t' @d",
    ),
    "valid": ("printf '%s' '@t'", "# do not write @t", "git log --grep '@t'", "echo 'step @n: @t'"),
}
_WORDS: dict[ShellSplit, tuple[str, ...]] = {
    "train": (
        "copy the files",
        "done",
        "step @n",
        "build @d",
        "clean up",
        "check @u",
        "all is well",
        "next @n",
        "begin",
        "@d is ready",
    ),
    "valid": ("next: @d", "start @u", "finished", "part @n"),
}
_PLAIN: dict[ShellSplit, tuple[str, ...]] = {
    "train": (
        "ls @d",
        "pwd",
        "cat @f",
        "git status",
        "df -h",
        "cd @d",
        "make @u",
        "true",
        "wc -l @f",
        "ls -a",
        "git log",
        "head -n @n @f",
        "git diff",
        "id",
        "tail @f",
    ),
    "valid": ("ls -l @d", "git diff @f", "whoami", "tail -n @n @f"),
}
_FILLERS: dict[str, tuple[str, ...]] = {
    "@v": ("file", "src", "path", "name", "target", "input", "log", "item", "conf", "page"),
    "@w": ("line", "first", "found", "base", "key", "value"),
    "@f": ("notes.txt", "app.log", "data.csv", "list.txt", "config.ini", "report.md", "users.txt", "out.txt"),
    "@d": ("build", "backup", "src", "cache", "docs", "release", "photos", "tools"),
    "@u": ("anna", "web", "setup", "deploy", "ben", "worker", "report", "clara"),
    "@h": ("example.org", "files.example.com", "get.example.net"),
    "@n": ("7", "12", "42", "100", "2024"),
}


def shell_safety(split: ShellSplit, n: int) -> list[ShellRecord]:
    """Return records {input, label}: a command and its class, with ten times as many safe as unsafe ones."""
    return _distinct_records(n, lambda rng: _label_record(rng, split), seed=f"shell-safety {split}")


def shell_faults(split: ShellSplit, n: int) -> list[ShellRecord]:
    """Return records {input, labels}: a command and all its faults, possibly none."""
    return _distinct_records(n, lambda rng: _fault_record(rng, split), seed=f"shell-faults {split}")


def _distinct_records(
    n: int, generate: Callable[[random.Random], ShellRecord], *, seed: str
) -> list[ShellRecord]:
    if n > MAX_COMMANDS:
        raise DataError(f"at most {MAX_COMMANDS:,} commands are available")
    rng = random.Random(seed)
    by_input: dict[str, ShellRecord] = {}
    while len(by_input) < n:
        record = generate(rng)
        by_input.setdefault(record["input"], record)
    return list(by_input.values())


def _label_record(rng: random.Random, split: ShellSplit) -> ShellRecord:
    label = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    parts = [_faulty_statement(rng, split, label)] if label != "safe" else [_harmless_statement(rng, split)]
    parts += [_harmless_statement(rng, split) for _ in range(rng.choice((0, 1)))]
    return {"input": _join_statements(rng, parts), "label": label}


def _fault_record(rng: random.Random, split: ShellSplit) -> ShellRecord:
    faults = rng.sample(FAULTS, rng.choices((0, 1, 2, 3), weights=(4, 5, 3, 1))[0])
    parts = [_faulty_statement(rng, split, fault) for fault in faults]
    parts += [
        _harmless_statement(rng, split) for _ in range(rng.choice((0, 1)) if parts else rng.choice((1, 2)))
    ]
    return {"input": _join_statements(rng, parts), "labels": [fault for fault in FAULTS if fault in faults]}


def _join_statements(rng: random.Random, parts: list[str]) -> str:
    """Join statements in random order; a comment is on a separate line."""
    rng.shuffle(parts)
    text = parts[0]
    for previous, part in itertools.pairwise(parts):
        has_comment = previous.startswith("#") or part.startswith("#")
        text += ("\n" if has_comment else rng.choice(("; ", " && ", "\n"))) + part
    return text


def _faulty_statement(rng: random.Random, split: ShellSplit, fault: str) -> str:
    return _fill_template(rng, rng.choice(_TWINS[fault][split])[0])


def _harmless_statement(rng: random.Random, split: ShellSplit) -> str:
    """Return a twin, a fault quoted as text, plain words as text, or a harmless command."""
    kind = rng.choices(("twin", "text", "words", "plain"), weights=(5, 4, 2, 1))[0]
    if kind == "plain":
        return _fill_template(rng, rng.choice(_PLAIN[split]))
    if kind == "twin":
        return _fill_template(rng, rng.choice(_TWINS[rng.choice(FAULTS)][split])[1])
    quoted = rng.choice(_WORDS[split])
    if kind == "text":
        pair = rng.choice(_TWINS[rng.choice(FAULTS)][split])
        quoted = rng.choice(pair).replace("'", '"')
    return _fill_template(rng, rng.choice(_TEXTS[split]).replace("@t", quoted))


def _fill_template(rng: random.Random, template: str) -> str:
    """Replace the placeholders of a template; equal placeholders get the same value."""
    for mark, choices in _FILLERS.items():
        template = template.replace(mark, rng.choice(choices))
    return template.replace("%dns", "@dns")
