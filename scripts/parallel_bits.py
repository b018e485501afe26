"""Check that training and serving on two ranks give the same bits and tokens as on one device.

    python scripts/parallel_bits.py                   # two GPUs, NCCL, bfloat16; about five minutes
    python scripts/parallel_bits.py --device cpu      # gloo, float32, smaller models
    python scripts/parallel_bits.py --only serve

Training: each parallel plan runs in its own processes, two updates of a model of four layers on random tokens; the losses,
norms and a hash of all weights and moments are compared. Serving: two prompts are decoded greedily and the token ids are
compared. Prints a line for each comparison and writes `--out`; the exit code is 1 if anything differs.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tests.server.victim import server_process
from tilewright.bench.provenance import environment as provenance
from tilewright.engine.llm import LLM
from tilewright.engine.request import SamplingParams
from tilewright.hw.env import launched
from tilewright.models import SHAPES, ModelConfig, empty_model, initialise, random_model, save_model
from tilewright.parallel.launch import run_ranks
from tilewright.parallel.mesh import join, leave
from tilewright.parallel.plan import Plan
from tilewright.parallel.saved import gathered
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.config import TrainConfig
from tilewright.train.ranks import check_plan, make_spread
from tilewright.train.setup import build_optimizer, learning_rate
from tilewright.train.step import NextToken, spread_step

PLANS = {
    "dp=2,zero=3": "dp=1", "tp=2": "slices=2", "tp=2,sp": "slices=2", "pp=2": "dp=1", "cp=2": "chunks=2",
    "cp=2,ring": "chunks=2,ring", "dp=2,ep=2@experts": "dp=1@experts",
}  # fmt: skip
"""Plan of two ranks -> the plan of one process that has its bits. "@experts": of a mixture."""
STEPS, MICRO = 2, 4
PROMPTS = ("The captain looked at", "It was")


def shape_of(experts: bool, cpu: bool) -> ModelConfig:
    """A small model of four layers."""
    hidden, inner, heads, kv, dim, vocabulary = (64, 128, 8, 4, 16, 512) if cpu else (1024, 3072, 16, 8, 128, 32768)
    more: dict[str, Any] = {}
    if experts:
        more = {
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": inner // 4, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    fields = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"], "vocab_size": vocabulary,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 4, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": dim, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": not experts, "eos_token_id": 0, **more,
    }  # fmt: skip
    return ModelConfig.from_hf(fields, None)


def batches(step: int, vocabulary: int, cpu: bool) -> Iterator[TrainBatch]:
    """The micro-batches of an update: rows of two documents each."""
    random, row = np.random.default_rng([step, 7]), 64 if cpu else 1024
    for _ in range(MICRO):
        ids = random.integers(1, vocabulary, row + 1)
        cut = int(random.integers(row // 4, row // 2))
        yield pack([(ids[:cut], ids[1 : cut + 1]), (ids[cut:-1], ids[cut + 1 :])], not cpu)


def train(name: str, cpu: bool, out: Path) -> None:
    """The updates of one plan, in one of its ranks; the first writes losses, norms and the hash to `out`."""
    text, _, kind = name.partition("@")
    plan, place = Plan.read(text), launched()
    rank = place.rank if place else 0
    device = torch.device("cpu") if cpu else torch.device("cuda", place.local_rank if place else 0)
    if not cpu:
        torch.cuda.set_device(device)
    shape, dtype = shape_of(bool(kind), cpu), torch.float32 if cpu else torch.bfloat16
    config = TrainConfig(
        model="qwen3-0.6b", init="random", dtype=str(dtype).removeprefix("torch."), steps=STEPS, warmup=1, lr=1e-3,
        micro_batches=MICRO, micro_rows=1, row_tokens=64 if cpu else 1024, accumulate="tree", parallel=plan,
    )  # fmt: skip
    check_plan(config, shape)
    store = None if place is None else PrefixStore("bits", next(iter(rendezvous("env://")))[0])
    mesh = join(plan, rank=rank, device=device, store=store, invariant=True)
    model = empty_model(shape, device=device, dtype=dtype)
    initialise(model, std=0.02)
    spread = make_spread(config, model.requires_grad_(True), mesh)
    assert spread is not None, "sums of gradients are a tree, which is a plan's matter"
    optimizer = build_optimizer(config, model, spread.weights())
    spread.share()
    numbers = []
    for step in range(STEPS):
        made, objective = list(batches(step, shape.vocab_size, cpu)), NextToken(deterministic=True)
        own = [batch.to(device) for place, batch in enumerate(made) if spread.owns(place, MICRO)]
        targets = sum(batch.n_targets for batch in made)
        result = spread_step(spread, optimizer, own, targets, learning_rate(config, step), objective)
        numbers.append((result.loss.item(), result.norm.item()))
    state = gathered(optimizer.state_dict(), spread.pieces, mesh.world)
    if rank == 0:
        raw = b"".join(state[key].contiguous().view(torch.uint8).numpy().tobytes() for key in sorted(state))
        out.write_text(json.dumps({"losses and norms": numbers, "state": hashlib.sha256(raw).hexdigest()}))
    leave()


def trained(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """What `train` found, made by as many processes as the plan has ranks; None where they failed."""
    out = folder / f"{name}.json"
    command = [sys.executable, __file__, "--device", options.device, "--train", name, "--out", str(out)]
    ranks = Plan.read(name.partition("@")[0]).ranks
    try:
        if ranks == 1:
            subprocess.run(command, check=True)
        else:
            run_ranks(command, ranks, print)
    except (subprocess.CalledProcessError, ChildProcessError) as error:
        print(f"{name}: {error}", flush=True)
        return None
    return json.loads(out.read_text())


def serve_alone(folder: Path, cpu: bool) -> list[list[Any]]:
    """Token ids and texts of one device with the slices of two."""
    llm = LLM(folder, slices=2, invariant=not cpu, **sizes(cpu, "kv_cache_bytes", 1 << 26))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    found = [llm.generate(prompt, params)[0].outputs[0] for prompt in PROMPTS]
    return [[list(one.token_ids), one.text] for one in found]


def serve_together(folder: Path, cpu: bool) -> list[list[Any]]:
    """The same of a server with two ranks."""
    words = [w for key, value in sizes(cpu, "kv_cache_gib", 0.0625).items() for w in (f"--{key.replace('_', '-')}", str(value))]
    more = ["--slices", "2", *words] if cpu else ["--invariant", *words]
    found = []
    with server_process("tilewright.cli", "serve", str(folder), "--tp", "2", "--port", "0", *more) as server:
        for prompt in PROMPTS:
            asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            status, _, body = server.post(**asked)[:3]
            if status != 200:
                raise RuntimeError(f"serve --tp 2 answered {status}: {body[:300]}")
            choice = json.loads(body)["choices"][0]
            found.append([choice["token_ids"], choice["text"]])
    return found


def sizes(cpu: bool, cache: str, amount: float) -> dict[str, Any]:
    """Options of both engines; the same steps in both, so that nothing else differs."""
    small = {"max_seqs": 4, "max_tokens_per_step": 128, "max_model_len": 512}
    return small | ({"device": "cpu", cache: amount} if cpu else {"memory_fraction": 0.3})


def main() -> int:
    """Compare all, and say what was found."""
    options = read()
    cpu = options.device == "cpu"
    if options.train:
        train(options.train, cpu, options.out)
        return 0
    if not cpu and torch.cuda.device_count() < 2:
        raise SystemExit(f"{torch.cuda.device_count()} GPUs are here, wanted 2; --device cpu compares over gloo")
    found: dict[str, Any] = {**provenance(card=not cpu), "plans": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.only != "serve":
            ones = {one: trained(one, options, folder) for one in dict.fromkeys(PLANS.values())}
            for plan, one in PLANS.items():
                got, want = trained(plan, options, folder), ones[one]
                same = {
                    key: got is not None and want is not None and got[key] == want[key] for key in ("losses and norms", "state")
                }
                found["plans"][plan] = same
                print(f"{plan}: " + ", ".join(f"{key} {'equal' if ok else 'DIFFER'}" for key, ok in same.items()), flush=True)
        if options.only != "train":
            shape = shape_of(False, True).limited(512) if cpu else SHAPES["qwen3-0.6b"].limited(2048)
            layers = shape.num_hidden_layers if cpu else 6
            shape = replace(shape, num_hidden_layers=layers, windows=(None,) * layers, vocab_size=4096)
            save_model(random_model(shape, device=options.device, dtype=torch.bfloat16), folder / "model", "bookworm")
            alone = serve_alone(folder / "model", cpu)
            together = serve_together(folder / "model", cpu)
            found["serve"] = {"token ids": [a[0] == b[0] for a, b in zip(alone, together)], "alone": alone, "tp=2": together}
            print(f"serve --tp 2: token ids equal for {sum(found['serve']['token ids'])} of {len(PROMPTS)} prompts")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    checks = [ok for same in found["plans"].values() for ok in same.values()] + found.get("serve", {}).get("token ids", [])
    return int(not all(checks))


def read() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=("train", "serve"), help="run only this part; default: both")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
