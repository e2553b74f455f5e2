"""Says how many times as fast packed conversations are as padded ones, on a CPU.

    .venv/bin/python scripts/bench/packing.py [--turns 12]

A Llama of four layers and 256 columns takes micro-batches of 8 conversations, whose lengths are
drawn as those of chats are: log-normal, 120 tokens in the middle and at most 512. Forward and
backward passes of the same conversations take turns, padded and packed, on one thread; seconds are
those of the process, so that other work on the machine counts little. A row whose packed gradient
is not that of the padded one, to rounding for full in fp32 and to a cosine of 0.999 for the others,
has no speed. The script writes results/packing_cpu.json.
"""

import random
import time
from statistics import median
from types import SimpleNamespace

import torch
from machine import device_name
from pages import Row
from record import head, options, write
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import razorctl
from razorctl.config.job import Job
from razorctl.models.tokens import causal_inputs
from razorctl.step import losses_of

MOST, ROWS, VOCABULARY = 512, 8, 4096
MIDDLE, SPREAD = 4.8, 0.9  # of the logarithm of a length
JOB = Job("llama", "chats", task="causal-lm")
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
Batch = tuple[dict[str, Tensor], Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=MOST,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def conversations(draw: random.Random) -> dict[str, list[list[int]]]:
    """A micro-batch; the first third of a conversation is no answer."""
    lengths = [max(16, min(MOST, round(draw.lognormvariate(MIDDLE, SPREAD)))) for _ in range(ROWS)]
    ids = [[draw.randrange(1, VOCABULARY) for _ in range(length)] for length in lengths]
    labels = [[-100] * (len(own) // 3) + own[len(own) // 3 :] for own in ids]
    return {"input_ids": ids, "labels": labels}


def batch(rows: dict[str, list[list[int]]], packing: bool) -> Batch:
    made = causal_inputs(SimpleNamespace(pad_token_id=0), rows, tokens=MOST, packing=packing)
    inputs, labels = made["inputs"], made["labels"]
    return {name: torch.stack([own[name] for own in inputs]) for name in inputs[0]}, torch.stack(
        labels
    )


def passes(net: nn.Module, made: Batch, dtype: torch.dtype) -> tuple[float, Tensor]:
    """The seconds of a forward and a backward pass, and the gradient."""
    inputs, labels = made
    net.zero_grad()
    start = time.process_time()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = losses_of(net(**inputs).logits, labels, JOB, "sum") / (labels != -100).sum()
    loss.backward()
    seconds = time.process_time() - start
    return seconds, torch.cat(
        [p.grad.flatten().double() for p in net.parameters() if p.grad is not None]
    )


def row(method: str, precision: str, turns: int) -> Row:
    net, dtype, draw = model(), PRECISIONS[precision], random.Random(0)
    if method == "razor":
        razorctl.sparsify(net, razorctl.Recipe("razor", ratio=0.9))
    cosines, seconds = [], {False: [], True: []}
    read, computed = 0, {False: 0, True: 0}
    for turn in range(turns + 1):
        rows = conversations(draw)
        made = {packing: batch(rows, packing) for packing in (False, True)}
        gradients = {}
        for packing in (False, True) if turn % 2 else (True, False):
            passed, gradients[packing] = passes(net, made[packing], dtype)
            if turn:  # the first one warms up
                seconds[packing].append(passed)
                computed[packing] += made[packing][1].numel()
        cosines.append(torch.cosine_similarity(*gradients.values(), 0).item())
        read += sum(map(len, rows["input_ids"])) if turn else 0
    least = 0.999999 if method == "full" and precision == "fp32" else 0.999
    ratios = [padded / packed for padded, packed in zip(*seconds.values(), strict=True)]
    faithful = min(cosines) >= least
    return {
        "method": method,
        "precision": precision,
        "turns": turns,
        "tokens": read,
        "padded_tokens": computed[False],
        "packed_tokens": computed[True],
        "cosine": min(cosines),
        "times_as_fast": sum(seconds[False]) / sum(seconds[True]) if faithful else None,
        "median_of_turns": median(ratios) if faithful else None,
    }


def main() -> None:
    parser = options(__doc__, "packing_cpu")
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    document = head(device_name("cpu"), "torch", "transformers")
    rows = [row(m, p, given.turns) for p in PRECISIONS for m in ("full", "razor")]
    write(given.out, {**document, "threads": torch.get_num_threads(), "rows": rows})
    for each in rows:
        print(each)


if __name__ == "__main__":
    main()
