"""A small lm-evaluation-harness task set out of the held-out documents."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

from . import settings

QUESTIONS_PER_DOMAIN = 20
DOCUMENTS_PER_DOMAIN = 6
CONTEXT_CHARS = (60, 160)
ANSWER_CHARS = (25, 90)
PLACEHOLDER = "{TASKS_DIR}"

CONTINUATION = """\
# Which of four pieces of text comes next? The others are from other documents of the same domain.
task: laptop_continuation
dataset_path: json
dataset_kwargs:
  data_files:
    test: "{TASKS_DIR}/continuation.jsonl"
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""

BITS = """\
# How many bits does a byte of unseen text cost?
task: laptop_bits
dataset_path: json
dataset_kwargs:
  data_files:
    test: "{TASKS_DIR}/bits.jsonl"
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
  - metric: word_perplexity
metadata:
  version: 1.0
"""


def build(out: Path) -> None:
    """Write tasks/ from heldout/documents.jsonl."""
    folder = out / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    lines = (out / "heldout/documents.jsonl").read_text().splitlines()
    by_domain: dict[str, list[str]] = {}
    for line in lines:
        document = json.loads(line)
        by_domain.setdefault(document["domain"], []).append(document["text"])
    questions, bits = [], []
    for domain, texts in by_domain.items():
        rng = random.Random(f"{settings.CORPUS_SEED}-tasks-{domain}")
        questions += _questions(domain, texts, rng)
        bits += [{"domain": domain, "text": text[:1500]} for text in texts[:DOCUMENTS_PER_DOMAIN]]
    _write_lines(folder / "continuation.jsonl", questions)
    _write_lines(folder / "bits.jsonl", bits)
    (folder / "laptop_continuation.yaml").write_text(CONTINUATION)
    (folder / "laptop_bits.yaml").write_text(BITS)


def render(folder: Path, target: Path) -> Path:
    """Copy the task files with the placeholder replaced by this checkout's folder."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.yaml"):
        text = path.read_text().replace(PLACEHOLDER, str(folder.resolve()))
        (target / path.name).write_text(text)
    return target


def _questions(domain: str, texts: list[str], rng: random.Random) -> list[dict]:
    """At most QUESTIONS_PER_DOMAIN questions, spread over the documents."""
    cut = [_context_and_answer(text, rng) for text in texts]
    pairs = [(i, *pair) for i, found in enumerate(cut) for pair in found]
    answers = sorted({(answer, i) for i, _, answer in pairs})
    rng.shuffle(pairs)
    questions = []
    for i, context, answer in pairs[:QUESTIONS_PER_DOMAIN]:
        others = [text for text, owner in answers if owner != i and text != answer]
        # Answers of like length: length alone must not give the right one away.
        others.sort(key=lambda text: (abs(len(text) - len(answer)), text))
        choices = [answer, *others[:3]]
        rng.shuffle(choices)
        questions.append(
            {
                "domain": domain,
                "context": context,
                "choices": choices,
                "answer": choices.index(answer),
            }
        )
    return questions


def _context_and_answer(text: str, rng: random.Random) -> list[tuple[str, str]]:
    """Up to four (context, next piece) pairs of one document."""
    pieces = re.findall(r"[^.!?;:\n]+[.!?;:\n]+", text)
    pairs = []
    for i in range(1, len(pieces)):
        context = "".join(pieces[:i])[-CONTEXT_CHARS[1] :]
        answer = pieces[i].rstrip()
        if len(context) >= CONTEXT_CHARS[0] and ANSWER_CHARS[0] <= len(answer) <= ANSWER_CHARS[1]:
            pairs.append((context, answer))
    return rng.sample(pairs, min(4, len(pairs)))


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
