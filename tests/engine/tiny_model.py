"""A small Llama with random weights, the requests it answers, and one greedy run of them in transformers' continuous batching."""

import contextlib
import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .adapter import installed
from .swap import Swap

BLOCK_TOKENS = 32
NEW_TOKENS = 120
#: The longest request has 300 + 120 tokens, 14 blocks: two such requests do not fit, so that requests are preempted all the time.
SMALL_POOL_BLOCKS = 24
#: 12 times 14 blocks, and some: nothing is ever preempted.
LARGE_POOL_BLOCKS = 200


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model and the identity of its weights."""

    model: Any
    weights: str


def make_model(directory: Path) -> TinyModel:
    """Write a model of half a million weights into `directory`, and load it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        # With the usual 0.02 attention hardly matters, and greedy decoding repeats one token.
        initializer_range=0.08,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(directory.glob("*.safetensors"))))
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
    return TinyModel(model.eval(), digest.hexdigest())


def make_prompts() -> list[list[int]]:
    """12 prompts of 100 to 300 tokens, always the same."""
    numbers = random.Random(7)
    return [[numbers.randrange(256) for _ in range(numbers.randint(100, 300))] for _ in range(12)]


def generate(tiny: TinyModel, prompts: list[list[int]], *, pool_blocks: int, swap: Swap | None = None) -> list[list[int]]:
    """The greedy tokens of each request. Raises what went wrong in `swap`."""
    with installed(swap, weights=tiny.weights) if swap is not None else contextlib.nullcontext():
        answers = tiny.model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=258),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=BLOCK_TOKENS,
                num_blocks=pool_blocks,
                # Prompts are computed in pieces, and no block is held in reserve: requests are preempted in the middle of their prompt, too, and
                # leave a partial tail. A decoding one always needs its next block, so that its last one is full.
                max_batch_tokens=100,
                safety_margin=0.0,
                use_async_batching=False,
            ),
            progress_bar=False,
        )
    if swap is not None and swap.failure is not None:
        raise swap.failure
    errors = [answer.error for answer in answers.values() if answer.error is not None]
    assert not errors and len(answers) == len(prompts), errors
    return [list(answer.generated_tokens) for answer in answers.values()]
