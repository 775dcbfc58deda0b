"""A small random model, tokenizers made by hand, and language models whose probabilities are
known exactly.
"""

import math

import numpy as np
from helpers import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from olmo_core_jax.evaluate.harness import OlmoLM
from olmo_core_jax.evaluate.scoring import TokenScores

CFG = tiny_model(vocab_size=91, padded_vocab_size=128, init_std=0.3)


def word_tokenizer(*words: str) -> Tokenizer:
    """One token a word; spaces between words are dropped."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def bpe_tokenizer() -> Tokenizer:
    """Letters of printable ASCII with merges that make `Answer` one token and `Ans` two; <eos> is
    the last id.
    """
    merges = [("A", "n"), ("e", "r"), ("w", "er"), ("s", "wer"), ("An", "swer")]
    letters = [chr(c) for c in range(32, 115)]  # space .. r
    letters += ["s", "w"]
    tokens = letters + ["".join(pair) for pair in merges]
    vocab = {token: i for i, token in enumerate(tokens)} | {"<eos>": len(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


BPE_EOS = 90


class Counting:
    """Vocabulary of 10 digits; P(next = current + 1) = .9, the nine others share .1. Remembers
    what it was given.
    """

    def __init__(self):
        self.inputs: list[np.ndarray] = []

    def __call__(self, tokens_BS, targets_BS) -> TokenScores:
        self.inputs.append(tokens_BS)
        best = (tokens_BS + 1) % 10
        return TokenScores(
            np.where(targets_BS == best, math.log(0.9), math.log(0.1 / 9)).astype(np.float32), best
        )


def counting_lm(max_length: int = 64, batch_size: int = 2) -> tuple[OlmoLM, Counting]:
    score = Counting()
    tokenizer = word_tokenizer(*"0123456789")
    return OlmoLM(score, tokenizer, eos_id=9, max_length=max_length, batch_size=batch_size), score
