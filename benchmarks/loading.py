"""Peak memory of each process while a run is built that shards its models, up to its first step.

Every case runs in fresh processes, which first train a model of next to nothing, so that all libraries are loaded.
"peak" is the most that was resident beyond that, in the process where it was largest; "own" leaves out the pages of
files, which the system can take back.

    python benchmarks/loading.py                 2 and 4 processes
    python benchmarks/loading.py --only sft --processes 2
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "sft": {},
    "ppo, copied reference, separate critic": {"value": {"kind": "separate"}},
}


def make_model(folder: Path, layers: int) -> float:
    """Save a Llama of random weights in bfloat16; returns the bytes of its weights in float32, in MB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from cavesson.models.tiny import tiny_tokenizer

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 12}
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16_384, tie_word_embeddings=True, **sizes, **ids))
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**20


def build(name: str, folder: Path, model: dict[str, Any], parallel: dict[str, Any]) -> Any:
    """Build the run of a case."""
    from cavesson.algorithms.ppo import PPORun
    from cavesson.algorithms.sft import SFTRun
    from cavesson.train.run import Training

    values = {"run": folder, "model": {"device": "cpu", **model}, "parallel": parallel, "batch_size": 4, "steps": 1}
    if name == "sft":
        return Training(SFTRun.model_validate({**values, "data": {"path": str(folder.parent / "data.jsonl")}}))
    sampling = {"max_new_tokens": 4}
    settings = PPORun.model_validate({**values, **CASES[name], "sampling": sampling})
    return Training(settings, prompts=["a", "b"], rewards=lambda prompts, responses, **_: [1.0] * len(responses))


def resident() -> tuple[float, float]:
    """Resident memory of this process, and its own, in MB."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def measure(name: str, folder: Path) -> None:
    """Build the run of a case in this process, one of several, and print how much memory grew at most."""
    build(name, folder / "nothing", {}, {"shard": "full"}).run(lambda *_: None)
    before, most, is_done = resident(), [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.003):
            most[:] = [max(pair) for pair in zip(most, resident(), strict=True)]

    thread = threading.Thread(target=watch)
    thread.start()
    build(name, folder / "run", {"path": str(folder / "model")}, {"shard": "full"})
    is_done.set()
    thread.join()
    print("grew", *(round(most - least) for most, least in zip(most, before, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--only", choices=CASES, action="append", help="default: all")
    parser.add_argument("--layers", type=int, default=16, help="of the model")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.folder)
        return
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as place:
        size = make_model(Path(place) / "model", given.layers)
        (Path(place) / "data.jsonl").write_text('{"prompt": "a", "response": "b c"}\n' * 8)
        print(f"a model of {size:.0f} MB in float32; growth per process in MB: peak, own")
        for name in given.only or CASES:
            for count in given.processes:
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
                command += [__file__, "--measure", name, "--folder", place]
                done = subprocess.run(command, capture_output=True, text=True, env=environment)
                grew = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("grew")]
                if len(grew) < count:
                    sys.exit(done.stderr[-3000:])
                print(f"{name}, {count} processes:", *(max(map(int, numbers)) for numbers in zip(*grew, strict=True)))
                for run in ("nothing", "run"):
                    subprocess.run(["rm", "-rf", str(Path(place) / run)], check=True)
                time.sleep(0.1)


if __name__ == "__main__":
    main()
