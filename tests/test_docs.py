"""Every command of README.md and docs/ is run here, made small, or stands in EXCUSED with the reason why it is not."""
import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT, TINY, flags, trained

import tasks
from doctor import diagnose, plot
from runtime import config

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRATCH = ("--n_layer=1 --n_embd=32 --n_head=2 --n_kv_head=1 --block_size=160 --batch_size=2 --max_steps=2 --warmup_steps=1 "
           "--eval_tokens=320 --device=cpu")
GO_ON = "--max_steps=3 --device=cpu"
ASK = "--num_questions=3 --max_new_tokens=4 --device=cpu"
RL = "--prompts_per_step=2 --k_samples=2 --max_new_tokens=4 --max_steps=1 --eval_interval=0 --num_questions=20 --reward_workers=1 --device=cpu"

# In this order, in one folder; what is added makes them small.
RUN = {
    "python train.py --dataset=book.txt --out_dir=out/book": SCRATCH,
    "python train.py --init_from=resume --out_dir=out/book": GO_ON,
    "python train.py --resume=auto --dataset=book.txt --out_dir=out/book": GO_ON,
    "torchrun --max-restarts=10 --nproc_per_node=2 train.py --resume=auto --dataset=book.txt --out_dir=out/book": GO_ON,
    "torchrun --nproc_per_node=2 train.py --parallel=fsdp --dataset=book.txt --out_dir=out/fsdp": SCRATCH,
    "python train.py --resume=auto --out_dir=out/book --eval_only": "--eval_tokens=320 --device=cpu",
    "python train.py --init_from=out/book --dataset=book.txt --out_dir=out/next": "--max_steps=1 --batch_size=2 --eval_tokens=320 --device=cpu",
    "python train.py config/cpu_small.py --dataset=input.txt --learning_rate=0.01": SCRATCH + " --mlp_hidden=64 --head_dim=16",
    "python train.py --dataset=book.txt --backward=feedback --out_dir=out/feedback": SCRATCH + " --n_layer=2",
    "python train.py --dataset=book.txt --backward=feedback_micro --out_dir=out/micro": SCRATCH,
    "python train.py --dataset=book.txt --trained_blocks=last --out_dir=out/last": SCRATCH + " --n_layer=2",
    "python train.py --dataset=book.txt --orthogonality=0.01 --orthogonality_warmup=100 --out_dir=out/ortho": SCRATCH,
    "python train.py --dataset=folder --tokenizer=gpt2 --out_dir=out/folder": SCRATCH + " --tokenizer=bytes",
    "python -m text.bpe book.txt --vocab_size=4096 --out=tok": "",
    "python train.py --dataset=book.txt --tokenizer=tok --out_dir=out/bpe": SCRATCH,
    "python train.py --dataset=stories.jsonl --text_key=story --out_dir=out/stories": SCRATCH,
    "python train.py --mixer=favor --dataset=book.txt --out_dir=out/favor": SCRATCH + " --mixer_features=16",
    "python train.py --mixer=linear --mixer_rule=delta --dataset=book.txt --out_dir=out/delta": SCRATCH,
    "python sample.py out/delta --prompt=\"Once upon\" --num_samples=4": "--max_new_tokens=3 --device=cpu",
    "python train.py config/quickstart.py --out_dir=out/base": SCRATCH,
    "python datagen.py --init_from=out/base --task=unit_conversion --oversample=8 --temperature=1":
        ASK + " --oversample=2 --output=data/a.json",
    "python train.py config/rft.py --init_from=out/base --dataset=data/rft.json --out_dir=out/rft": "--max_steps=1 --device=cpu",
    "python eval.py --compare out/base out/rft --task=unit_conversion": ASK,
    "python grpo.py config/grpo.py --init_from=out/rft --out_dir=out/grpo": RL,
    "python grpo.py config/grpo.py --init_from=out/rft --out_dir=out/grpo --resume=auto": RL + " --max_steps=2",
    "python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion": RL + " --overwrite",
    "OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 grpo.py config/grpo.py --init_from=out/rft --out_dir=out/two": RL,
    "python grpo.py config/grpo.py --init_from=out/rft --task=unit_conversion@2+countdown:4+arithmetic --out_dir=out/three": RL,
    "python grpo.py --init_from=out/rft --task=my_reward.py --dataset=questions.jsonl --out_dir=out/mine": RL,
    "python grpo.py --init_from=out/base --teacher=out/rft --beta=1 --reward_weight=0 --out_dir=out/distilled": RL,
    "python train.py config/rft.py --init_from=out/base --dataset=data/rft.json --teacher=out/rft --out_dir=out/sft": "--max_steps=1 --device=cpu",
    "python sample.py out/book --prompt=\"Once upon\" --num_samples=4 --temperature=0.7 --top_p=0.95": "--max_new_tokens=3 --device=cpu",
    "python sample.py out/rft --task=unit_conversion --prompt=\"Convert 6 kg to gram.\"": "--max_new_tokens=3 --device=cpu",
    "torchrun --nproc_per_node=8 sample.py out/book --num_samples=1000": "--num_samples=2 --max_new_tokens=3 --device=cpu",
    "python eval.py out/book --dataset=other.txt": "--device=cpu",
    "torchrun --nproc_per_node=8 eval.py out/book --dataset=other.txt": "--device=cpu",
    "python eval.py --compare out/rft out/grpo --task=unit_conversion --max_new_tokens=144": ASK,
    "python sample.py out/grpo --task=unit_conversion --num_samples=4": "--max_new_tokens=3 --device=cpu",
    "python hf.py out/book exported": "",
    "python -m doctor out/grpo": "",
    "python -m doctor out/base out/grpo --json": "",
    "python -m doctor.page out/grpo --change": "",
    "python -m doctor.regrade out/grpo --task=my_reward.py": "",
    "python sample.py out/grpo --task=unit_conversion --versus=out/rft": "--max_new_tokens=3 --device=cpu",
    "python -m measure.figures T2 R6": "",
    "python -m doctor.plot out/a out/b": "",
    "python -m doctor.plot out/a out/b --x=time": "",
    "python -m doctor.plot out/quickstart/grpo --expected=quickstart_grpo": "",
    "python -m runs.countdown --teachers=out/teachers.json": "--num_questions=20",
}
# patterns of commands that are not run here, and the reason
EXCUSED = {
    "bash runs/": "minutes; .ci/run and the tests of models, countdown, domains and the GPU suite run them or their parts",
    r"python compare\.py": "minutes; tests/test_compare.py runs small ones and reads experiments/",
    "runs.speedrun": "an hour; tests/test_speedrun.py runs small scripts",
    r"python bench\.py": "minutes; tests/test_bench.py runs all that bench.py has",
    r"measure\.gpu\.run --table": "tests/test_gpu_driver.py does",
    "HuggingFaceTB/|lm_eval|SmolLM2-135M-Instruct": "it downloads a model or a dataset",
    "config/a100_|six_domains_mixed|gsm8k_qwen05b": "a GPU's work or a download; tests/test_configs.py looks at the file",
    "chess_mini": "25 s of games alone; tests/test_chess.py has small ones",
    "six_domains_cpu": "it begins from domains.sh; tests/test_surgery.py has small ones",
    "hf.py out/book --gguf": "tests/test_gguf.py runs it",
    "llama_cpp.server": "a server of another project",
    "my_algo.py": "a copy of grpo.py; tests/test_algorithm.py makes and runs copies",
}


def commands():
    """The indented commands of all pages, without comments; not those that end in dots."""
    found = {}
    for page in PAGES:
        for line in page.read_text().splitlines():
            if re.match(r"    (OMP_\w+=1 )?(python|torchrun|bash|sbatch) ", line):
                command = re.sub(r"\s{2,}#.*", "", line).strip()
                if not command.endswith("..."):
                    found[command] = page.name
    return found


def test_every_command_is_run_or_excused():
    excused = {command: [pattern for pattern in EXCUSED if re.search(pattern, command)] for command in commands()}
    assert {command for command, patterns in excused.items() if not patterns} == RUN.keys()
    assert {pattern for patterns in excused.values() for pattern in patterns} == EXCUSED.keys()


def test_every_flag_of_every_command_is_a_knob():
    for command, page in commands().items():
        script, *argv = [word for word in shlex.split(command) if not re.match(r"(OMP_\w+=|python$|-m$|torchrun$|--nproc|--max-restarts|bash$)", word)]
        if script in ("train.py", "grpo.py", "datagen.py", "eval.py", "sample.py", "compare.py"):
            module = importlib.import_module(script.removesuffix(".py"))
            fields = module.Config.__dataclass_fields__
            for word in argv:
                if word.startswith("--"):
                    assert word[2:].partition("=")[0] in fields, (page, command)
                elif word.endswith(".py"):
                    assert (ROOT / word).exists(), (page, command)


def test_the_right_column_of_the_guides_has_our_options_files_and_metrics():
    scripts = [importlib.import_module(name).Config for name in ("train", "grpo", "datagen", "eval", "bench")]
    options = {field for script in scripts for field in script.__dataclass_fields__}
    rows = [line.split(" | ")[-1] for line in (ROOT / "docs/guides.md").read_text().splitlines() if line.startswith("| `") or line.startswith("| v")]
    codes = [code for row in rows for code in re.findall("`([^`]+)`", row)]
    assert len(rows) > 25
    assert {name for code in codes for name in re.findall(r"--([a-z_0-9]+)", code)} - {"nproc_per_node"} <= options
    files = {name for code in codes for name in re.findall(r"[\w/]+\.(?:py|sh)", code)} | {f"config/{code}.py" for code in codes if code.startswith("a100_")}
    assert len(files) > 10 and all((ROOT / name).exists() for name in files), files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a newcomer's commands are typed, with the files that they name."""
    folder = tmp_path_factory.mktemp("newcomer")
    text = "the cat sat on a mat. once upon a time there were three of them.\n" * 300
    for name in ("book.txt", "other.txt", "input.txt", "folder/one.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "stories.jsonl").write_text("".join(json.dumps({"story": text[:500]}) + "\n" for _ in range(30)))
    (folder / "questions.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": f"{i + 1}"}) + "\n" for i in range(40)))
    (folder / "my_reward.py").write_text("def reward(question, completion):\n    return float(question['answer'] in completion)\n")
    (folder / "config").symlink_to(ROOT / "config")
    (folder / "data").mkdir()
    (folder / "data/rft.json").write_text(json.dumps([[f"{i} and 1?", i + 1, f"{i} + 1 = {i + 1}"] for i in range(20)]))
    return folder


def test_a_newcomer_s_commands(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for command, small in RUN.items():
        words = shlex.split(f"{command} {small}")
        words = [word for word in words if not re.match(r"(OMP_\w+=|python$|torchrun$|--nproc|--max-restarts|-m$)", word)]
        name, *argv = words
        monkeypatch.setattr(sys, "argv", words)
        if name == "doctor.plot":
            for run, of in (("a", "out/book"), ("b", "out/book"), ("quickstart", "out")):
                (folder / "out" / run).exists() or (folder / "out" / run).symlink_to(folder / of)
            plot.main(argv)
            continue
        if name == "doctor":
            assert diagnose.main(argv) in (0, 3)
            continue
        code = importlib.import_module(name.removesuffix(".py")).main(argv)
        empty = name == "datagen.py" and code == 1                         # so small a model solves nothing
        assert code in (0, None) or empty, (command, capsys.readouterr())


# --- the README ---

def test_the_readme_is_for_someone_with_ten_minutes():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1000
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith("|"))
    for script, lines in re.findall(r"`(\w+\.py)`(?: has)? ([0-9]{3})[,;.]", text):
        assert len((ROOT / script).read_text().splitlines()) == int(lines), script
    assert "`train.py` has" in text


def test_the_loop_that_the_readme_shows_stands_in_the_script():
    section = (ROOT / "README.md").read_text().split("## The loop of `grpo.py`")[1].split("\n## ")[0]
    script = {re.sub(r"\s+#.*", "", line).strip() for line in (ROOT / "grpo.py").read_text().splitlines()}
    codes = [re.sub(r"\s+#.*", "", line).strip() for line in section.splitlines() if line.startswith("    ")]
    assert len(codes) > 7 and not [code for code in codes if code and not code.startswith("#") and code not in script]


def test_the_task_file_that_docs_show_runs(tmp_path):
    page = (ROOT / "docs/tasks.md").read_text()
    (shown,) = (block for block in re.findall(r"(?:^    .*\n|\n)+", page, re.M) if "def respond(" in block)
    (tmp_path / "shown.py").write_text(textwrap.dedent(shown))
    task = tasks.load(str(tmp_path / "shown.py"))
    question = {"question": "6 * 7?", "answer": "42"}
    assert task.respond(question, "<calc>6 * 7</calc>") == " = 42" and task.respond(question, "6 * 7") is None
    assert task.reward(question, "<answer>42</answer>")[0] == 1 and task.reward(question, "42")[0] == 0


def heading(line):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), (page.name, target)
            if anchor:
                anchors = {heading(line) for line in file.read_text().splitlines() if line.startswith("#")}
                assert anchor in anchors, (page.name, target)
    listed = (ROOT / "docs/README.md").read_text()
    assert all(f"[{page.name}]" in listed for page in PAGES if page.name != "README.md")


def test_the_readme_says_where_every_script_and_package_is():
    listed = (ROOT / "README.md").read_text().split("## Where things are")[1]
    scripts = {path.name for path in ROOT.glob("*.py")}
    packages = {f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")}
    assert not {name for name in scripts | packages if name not in listed}


def test_config_files_are_assignments_of_knobs_alone():
    """As the docs say, so that nobody has to look further than a line for what a knob is."""
    for path in ROOT.glob("config/*.py"):
        about, *statements = ast.parse(path.read_text()).body
        assert isinstance(about, ast.Expr), path
        if path.stem == "rft_smollm2_360m":               # looks how large the card is, and keeps that to itself
            continue
        assert {type(statement) for statement in statements} == {ast.Assign}, path
        assert len(statements) == len(config.read_file(str(path))), path


def test_an_installation_has_every_file_of_the_root():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["py-modules"] == sorted(path.stem for path in ROOT.glob("*.py"))
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert set(setuptools["packages"]) == folders - {"config", "experiments", "runs", "tests"} | {"measure.gpu"}


# --- the first minute ---

@pytest.mark.parametrize("script", ["train.py", "grpo.py", "datagen.py", "eval.py", "sample.py", "bench.py", "compare.py", "hf.py"])
def test_help_does_not_wait_for_pytorch(script):
    program = f"""
import runpy, sys
sys.argv = [{script!r}, "--help"]
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as e:
    assert e.code == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr


def test_sampling_does_not_wait_for_the_compiler(folder, text):
    """torch._dynamo takes as long to import as a small model to answer."""
    trained(folder / "small", text, max_steps=1)
    program = ("import sys; import sample; sample.main(sys.argv[1:]); assert 'torch._dynamo' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", program, str(folder / "small"), "--max_new_tokens=2", "--device=cpu"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the layout ---

COMMANDS = ("train", "datagen", "grpo", "eval", "sample", "bench", "compare", "micro")


def test_no_line_is_wider_than_110_columns():
    files = [file for pattern in ("*.py", "*/*.py", "*/*/*.py") for file in ROOT.glob(pattern) if "tests" not in file.parts]
    assert not [(file, line) for file in files for line in file.read_text().splitlines() if len(line) > 110]


def test_no_package_imports_upward():
    """Each may import those before it alone; the tests may import all."""
    order = ["layers", "model", "runtime", "tasks", "engine", "text", "rollouts", "hub", "hf", "doctor", "experimental", "measure"]
    for place, name in enumerate(order):
        files = sorted((ROOT / name).rglob("*.py")) or [ROOT / f"{name}.py"]
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                above = {module.partition(".")[0] for module in modules} & {*order[place + 1:], "runs", *COMMANDS}
                assert not above, (file, above)


def imported(entry, seen):
    """Add {file: lines} of the project's files that importing `entry` loads: imports at module level, followed."""
    if entry in seen or not entry.exists():
        return seen
    text = entry.read_text()
    seen[entry] = len(text.splitlines())
    for node in ast.parse(text).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            for n in range(1, len(parts) + 1):
                imported(ROOT.joinpath(*parts[:n]).with_suffix(".py"), seen)
                imported(ROOT.joinpath(*parts[:n], "__init__.py"), seen)
    return seen


@pytest.mark.parametrize("script, files, lines", [("train.py", 42, 8000), ("sample.py", 32, 7500), ("eval.py", 46, 10_000),
                                                  ("datagen.py", 42, 10_000), ("grpo.py", 58, 11_500)])
def test_a_script_loads_only_what_its_options_name(script, files, lines):
    """Who copies a script reads these files."""
    found = imported(ROOT / script, {})
    assert len(found) <= files and sum(found.values()) <= lines, (len(found), sum(found.values()))
    options = {"experimental", "doctor/checks", "doctor/diagnose", "hub/gguf_import", "hub/gguf_export", "hub/architectures",
               "layers/linear_attention", "engine/state_cache", "runtime/help", "runtime/unknown", "tasks/_mixture"}
    assert not [path for path in found for option in options if path.is_relative_to(ROOT / option) and path.stem != "__init__"
                or path == (ROOT / option).with_suffix(".py")]


def test_a_plain_run_loads_none_of_the_options(folder, text):
    program = """
import sys, train
code = train.main(sys.argv[1:])
loaded = [name for name in sys.modules if name.startswith(("experimental.", "doctor.", "tasks", "jinja2", "gguf", "hub.", "layers.linear",
                                                         "layers.logprobs", "rollouts"))]
assert not code and not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program, *flags(**TINY | {"max_steps": 2}, dataset=text, out_dir=folder / "plain",
                           data_dir=folder / "plain_data", device="cpu", diagnose=False)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
