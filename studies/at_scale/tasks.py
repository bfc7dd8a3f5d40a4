"""Questions that take no download: made from the held-out text and a seed, the same for every model.

    cloze       an identifier has been seen earlier in the window, and stands there again: which token ends it? Four
                to choose from, the others end other identifiers of the window
    copying     random tokens, and the same again: what comes next? Any token may be the answer
    brackets    a line with brackets of three kinds, some closed: which closes next? Three to choose from

An answer is the choice with the largest logit. Chance is one in as many as there are choices. The standard error of
a share of n answers is at most half the root of 1/n.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from studies.at_scale.parts import Parts, ids

IDENTIFIER = re.compile(r"[A-Za-z_]\w{7,}")  # long ones take several tokens
CHOICES = 4
EARLIER = 64  # tokens at least between an identifier and where it stands again
COPIED = 24  # random tokens, all of which are there before the first that is asked for
PAIRS = {"(": ")", "[": "]", "{": "}"}
DEEP = 6  # brackets that are open at a time, at most
AT_ONCE = 16  # questions in a pass


@dataclass(frozen=True)
class Questions:
    """Questions of one task.

    Attributes:
        prompts: int64 tensors (tokens,): what the model has read.
        choices: int64 tensors (k,) for each: the tokens to choose from, the right one first; of none it is any.
        right: the right token of each.
    """

    prompts: list[Tensor]
    choices: list[Tensor]
    right: list[int]

    @property
    def chance(self) -> float:
        """Share of right answers of a model that guesses; with any token to choose from, 0."""
        return 1 / len(self.choices[0]) if self.choices and len(self.choices[0]) else 0.0


def questions(parts: Parts, sequence: int, count: int) -> dict[str, Questions]:
    """Every task's questions, at most so many each."""
    tokenizer = Tokenizer.from_str(parts.index["tokenizer"])
    return {
        "cloze": _cloze(ids(parts.validation()), tokenizer, sequence, count),
        "copying": _copying(parts.index["vocabulary"], sequence, count),
        "brackets": _brackets(tokenizer, sequence, count),
    }


def _cloze(tokens: Tensor, tokenizer: Tokenizer, sequence: int, count: int) -> Questions:
    found = Questions([], [], [])
    chance = random.Random(0)
    fitting = max(0, len(tokens) - 1) // sequence
    for number in range(min(fitting, 4 * count)):
        if len(found.prompts) == count:
            break
        at = number * fitting // min(fitting, 4 * count) * sequence
        window = tokens[at : at + sequence].tolist()
        ends = dict(_identifiers(window, tokenizer))
        again = [(first, last) for (first, last), name in ends.items() if _seen(name, first, ends)]
        if not again:
            continue
        first, last = chance.choice(again)
        others = {window[end] for (_, end), name in ends.items() if name != ends[first, last]} - {window[last]}
        if len(others) < CHOICES - 1:
            continue
        wrong = chance.sample(sorted(others), CHOICES - 1)
        found.prompts.append(torch.tensor(window[:last]))
        found.choices.append(torch.tensor([window[last], *wrong]))
        found.right.append(window[last])
    return found


def _identifiers(window: list[int], tokenizer: Tokenizer) -> Iterator[tuple[tuple[int, int], str]]:
    """First and last token of each identifier that several tokens make up and nothing else has a part in."""
    pieces = [tokenizer.decode([token]) for token in window]
    starts, length = {}, 0
    for place, piece in enumerate(pieces):
        starts[length + len(piece) - len(piece.lstrip())] = place
        length += len(piece)
    stops, length = {}, 0
    for place, piece in enumerate(pieces):
        length += len(piece)
        stops[length] = place
    for match in IDENTIFIER.finditer("".join(pieces)):
        first, last = starts.get(match.start()), stops.get(match.end())
        if first is not None and last is not None and last > first:
            yield (first, last), match[0]


def _seen(name: str, first: int, ends: dict[tuple[int, int], str]) -> bool:
    return any(other == name and last <= first - EARLIER for (_, last), other in ends.items())


def _copying(vocabulary: int, sequence: int, count: int) -> Questions:
    generator = torch.Generator().manual_seed(1)
    copied = min(COPIED, sequence // 2)
    found = Questions([], [], [])
    for _ in range(count):
        drawn = torch.randint(256, max(vocabulary, 257), (copied,), generator=generator)
        stop = int(torch.randint(copied // 2, copied, (), generator=generator))
        found.prompts.append(torch.cat([drawn, drawn[:stop]]))
        found.choices.append(torch.empty(0, dtype=torch.int64))
        found.right.append(int(drawn[stop]))
    return found


def _brackets(tokenizer: Tokenizer, sequence: int, count: int) -> Questions:
    chance = random.Random(2)
    closing = {sign: tokenizer.encode(f" {sign}").ids[-1] for sign in PAIRS.values()}
    found = Questions([], [], [])
    while len(found.prompts) < count:
        line, opened = ["x", "="], []
        for _ in range(chance.randint(DEEP, 4 * DEEP)):
            if len(opened) < DEEP and (not opened or chance.random() < 0.6):
                opened.append(chance.choice(sorted(PAIRS)))
                line += [opened[-1], chance.choice("abcdefgh")]
            else:
                line.append(PAIRS[opened.pop()])
        if not opened:
            continue
        right = PAIRS[opened[-1]]
        prompt = tokenizer.encode(" ".join(line)).ids[-sequence:]
        others = [token for sign, token in closing.items() if sign != right]
        found.prompts.append(torch.tensor(prompt))
        found.choices.append(torch.tensor([closing[right], *others]))
        found.right.append(closing[right])
    return found


@torch.no_grad()
def answered(model: nn.Module, parts: Parts, sequence: int, count: int, device: str) -> dict[str, dict[str, float]]:
    """By task: the share of right answers, that of chance, and how many questions there were."""
    found = {}
    for name, asked in questions(parts, sequence, count).items():
        if asked.prompts:
            right = [_right(model, asked, at, device) for at in range(0, len(asked.prompts), AT_ONCE)]
            share = sum(right) / len(asked.prompts)
            found[name] = {"right": share, "chance": asked.chance, "questions": len(asked.prompts)}
    return found


def _right(model: nn.Module, asked: Questions, at: int, device: str) -> int:
    """How many of some questions are answered right."""
    prompts = asked.prompts[at : at + AT_ONCE]
    # What stands behind a prompt is not seen from its end.
    padded = nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
    logits = model(input_ids=padded).logits
    count = 0
    for place, prompt in enumerate(prompts):
        scores, choices = logits[place, len(prompt) - 1].float(), asked.choices[at + place].to(device)
        answer = choices[scores[choices].argmax()] if len(choices) else scores.argmax()
        count += int(answer == asked.right[at + place])
    return count
