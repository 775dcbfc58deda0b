"""Our model for lm-evaluation-harness: its three request types. Tasks and metrics stay its own.

Sequences are padded to a few bucket lengths and always the same number of rows, so that few
programs are compiled. Importing this module imports lm_eval (about a second): jobs do it when
they need it.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tokenizers import Tokenizer

from olmo_core_jax.errors import UserError
from olmo_core_jax.evaluate.scoring import TokenScores, batches_of

log = logging.getLogger("olmo")

SHORTEST_BUCKET = 128
"""Shorter texts are padded to this: compiling another program costs more than padding does."""

Score = Callable[[np.ndarray, np.ndarray], TokenScores]
"""(tokens_BS, targets_BS), both int32 -> each target's log-probability, each most likely token."""

Pair = tuple[list[int], list[int]]
"""Context and continuation as token ids."""


@dataclass
class Truncation:
    """What did not fit. In the result, because an over-long prompt loses its first shots."""

    truncated_samples: int = 0
    tokens_cut: int = 0

    def cut(self, tokens: list[int], room: int) -> list[int]:
        """The right-most `room` tokens."""
        if len(tokens) > room:
            self.truncated_samples += 1
            self.tokens_cut += len(tokens) - room
        return tokens[max(0, len(tokens) - room) :]


class OlmoLM(TemplateLM):
    """score: the model; max_length: positions it may see at once; batch_size: rows of a call."""

    def __init__(
        self, score: Score, tokenizer: Tokenizer, *, eos_id: int, max_length: int, batch_size: int
    ):
        super().__init__()
        self._score, self._tokenizer = score, tokenizer
        self._eos_id, self.max_length, self.batch_size = eos_id, max_length, batch_size
        self.max_gen_toks = min(256, max_length // 2)
        self.truncation = Truncation()
        self.joined_tokens = 0

    # -- text and tokens --

    @property
    def eot_token_id(self) -> int:
        """An empty context is this one token; Olmo has no BOS and nothing precedes a prompt."""
        return self._eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        """Token ids of a text; nothing is added to them, whatever add_special_tokens says."""
        return self._tokenizer.encode(string, add_special_tokens=False).ids

    def _encode_pair(self, context: str, continuation: str) -> Pair:
        """The harness's rule, and where it fails: a token may join both sides and leave nothing.

        Then each side is encoded by itself. A context of spaces only, which move to the
        continuation, is an empty one.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if continuation and not continuation_ids:
            self.joined_tokens += 1
            log.warning(
                "one token joins %r and %r: encoded apart", context[-20:], continuation[:20]
            )
            spaces = len(context) - len(context.rstrip())
            kept = context[: len(context) - spaces]
            context_ids = self.tok_encode(kept)
            continuation_ids = self.tok_encode(context[len(kept) :] + continuation)
        return context_ids or [self.prefix_token_id], continuation_ids

    # -- requests --

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """The harness's own encoding of requests, without its progress bar in a job's log."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **kwargs
    ) -> list[tuple[float, bool]]:
        """Each continuation's log-probability, and whether greedy decoding would give it."""
        answers = self._score_pairs([(context, answer) for _, context, answer in requests])
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of whole texts.

        A text's first window follows one EOS, each other window the token before it.
        """
        windows, owners = [], []
        for i, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, 1
            )
            found = [utils.make_disjoint_window(w) for w in rolling]
            windows += found
            owners += [i] * len(found)
        totals = [0.0] * len(requests)
        for i, (logp, _) in zip(owners, self._score_pairs(windows), strict=True):
            totals[i] += logp
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to the first stop string (left out), EOS or max_gen_toks."""
        jobs = [self._generation(*request.args) for request in requests]
        order = sorted(range(len(jobs)), key=lambda i: (-len(jobs[i].tokens), i))
        for start in range(0, len(order), self.batch_size):
            self._decode([jobs[i] for i in order[start : start + self.batch_size]])
        texts = [self._text(job) for job in jobs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    # -- scoring --

    def _score_pairs(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        rows = [self._row(context, answer) for context, answer in pairs]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for length, members in self._by_bucket([len(row) - 1 for row in rows]):
            inputs = np.zeros((len(members), length + 1), np.int32)
            for place, i in enumerate(members):
                inputs[place, : len(rows[i])] = rows[i]
            for start, logp_BS, hit_BS in self._run(inputs):
                for place in range(len(logp_BS)):
                    i = members[start + place]
                    end = len(rows[i]) - 1
                    span = slice(end - len(pairs[i][1]), end)
                    logp = float(np.sum(logp_BS[place, span], dtype=np.float64))
                    answers[i] = logp, bool(hit_BS[place, span].all())
        return answers

    def _row(self, context: list[int], answer: list[int]) -> list[int]:
        if len(answer) > self.max_length:
            raise UserError(
                f"a continuation of {len(answer)} tokens does not fit into the model's "
                f"{self.max_length}: the task needs a longer context"
            )
        return self.truncation.cut(context + answer, self.max_length + 1)

    def _by_bucket(self, lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Bucket lengths, longest first, each with the indices of its members."""
        members = defaultdict(list)
        for i, n in enumerate(lengths):
            members[self.bucket(n)].append(i)
        yield from sorted(members.items(), reverse=True)

    def bucket(self, length: int) -> int:
        """The padded length of a sequence: a power of two from 128 on, at most max_length."""
        return min(self.max_length, max(SHORTEST_BUCKET, 1 << max(0, length - 1).bit_length()))

    def _run(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first row, logp, is the target the most likely token) of real rows; rows [N, S+1]."""
        start = 0
        for batch, real in batches_of(rows, self.batch_size):
            targets_BS = batch[:, 1:]
            logp_BS, best_BS = self._score(batch[:, :-1], targets_BS)
            yield start, np.asarray(logp_BS)[:real], (np.asarray(best_BS) == targets_BS)[:real]
            start += real

    # -- generation --

    def _generation(self, context: str, gen_kwargs: dict) -> "_Generation":
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)}
        if kwargs.get("do_sample"):
            raise UserError("a task asks for sampled text; only greedy decoding is offered")
        room = self.max_length - kwargs["max_gen_toks"]
        if room <= 0:
            raise UserError(
                f"a task asks for {kwargs['max_gen_toks']} new tokens; the model sees "
                f"{self.max_length} in all"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        stops = handle_stop_sequences(
            kwargs["until"], self._tokenizer.decode([self._eos_id], False)
        )
        return _Generation(self.truncation.cut(tokens, room), kwargs["max_gen_toks"], stops)

    def _decode(self, jobs: list["_Generation"]) -> None:
        """Extends all jobs by one token a pass. Every pass computes the whole sequences again."""
        while running := [job for job in jobs if not job.done]:
            length = self.bucket(max(len(job.sequence) for job in running))
            rows = np.zeros((len(running), length + 1), np.int32)
            for row, job in zip(rows, running, strict=True):
                row[: len(job.sequence)] = job.sequence
            (batch, _), *_ = batches_of(rows, self.batch_size)
            best_BS = np.asarray(self._score(batch[:, :-1], batch[:, 1:]).best_BS)
            for row, job in zip(best_BS, running, strict=False):
                token = int(row[len(job.sequence) - 1])
                job.new.append(token)
                text = self._tokenizer.decode(job.new, skip_special_tokens=False)
                stopped = token == self._eos_id or any(s and s in text for s in job.stops)
                job.done = stopped or len(job.new) == job.limit

    def _text(self, job: "_Generation") -> str:
        new = [t for t in job.new if t != self._eos_id]
        return postprocess_generated_text(self._tokenizer.decode(new), job.stops, None)


class _Generation:
    """One text under way. tokens: the prompt; limit: tokens to add at most."""

    def __init__(self, tokens: list[int], limit: int, stops: list[str]):
        self.tokens, self.limit, self.stops = tokens, limit, stops
        self.new: list[int] = []
        self.done = limit == 0

    @property
    def sequence(self) -> list[int]:
        return self.tokens + self.new
