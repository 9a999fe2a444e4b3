"""Toy arithmetic tasks, and questions from a file.

A task is five functions: `problems` draws them, `prompt` asks one, `reward` judges a completion, `solution` is a worked
answer, `difficulty` is the level that tables group by.  Train and evaluation problems never overlap, whatever the seed:
a checksum of the prompt says which side a problem is on, here, in the pre-training of the models and in every run.
"""

import importlib
import json
import os
import random
import re
import sys
import zlib
from decimal import Decimal
from pathlib import Path

MODELS = Path(__file__).resolve().parent / "models"

# A sign belongs to a number only where no digit, letter, point or bracket stands before it: "10-4" ends in 4, not in -4.
# A comma belongs to a number only as a thousands mark: "1,000" is one number, "1,0" is two.
NUMBER = re.compile(r"(?:(?<![\w.)\]])[-+])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_number(text: str) -> Decimal | None:
    """The last number that `text` contains, exactly; None where there is none.  Nothing is evaluated."""
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def number_reward(completion: str, gold: Decimal) -> float:
    """1.0 where the completion's last number equals the gold answer ("12.0" and "012" equal 12), else 0.0."""
    return float(last_number(completion) == gold)


def held_out(prompt: str) -> bool:
    """One problem in four is for evaluation."""
    return zlib.crc32(prompt.encode()) % 4 == 0


class Task:
    """What the toy tasks share.  A subclass says how one problem is drawn, asked, solved and answered."""

    name: str
    levels: tuple[int, ...]

    def problems(self, split: str, count: int, seed: int, levels: tuple[int, ...] | None = None) -> list:
        """`count` distinct problems of `split` ("train" or "eval"), spread evenly over the levels.

        Fewer where a level has no more (200 draws in a row that bring nothing new); shuffled, the same for the same seed.
        """
        levels, found, rng = levels or self.levels, {}, random.Random(f"{self.name} {split} {seed}")
        for i, level in enumerate(levels):
            wanted, misses, here = count // len(levels) + (i < count % len(levels)), 0, {}
            while len(here) < wanted and misses < 200:
                problem = self.draw(rng, level)
                new = held_out(self.prompt(problem)) == (split == "eval") and problem not in here
                misses = 0 if new else misses + 1
                here |= {problem: None} if new else {}
            found |= here
        found = list(found)
        rng.shuffle(found)
        return found

    def where(self, problem) -> str:
        """How an error message names a problem."""
        return f"{self.name} {self.prompt(problem)!r}"

    def reward(self, problem, completion: str) -> float:
        return number_reward(completion, Decimal(self.answer(problem)))


class ChainSum(Task):
    """ "3 + 5 + 9 =" is answered by its running sums, "8 17".  A problem is its numbers; the level is how many."""

    name, levels = "chain_sum", (3, 4, 5, 6)

    def draw(self, rng: random.Random, level: int) -> tuple[int, ...]:
        return tuple(rng.randint(1, 9) for _ in range(level))

    def prompt(self, problem) -> str:
        return " + ".join(map(str, problem)) + " ="

    def answer(self, problem) -> int:
        return sum(problem)

    def solution(self, problem) -> str:
        return " ".join(str(sum(problem[:n])) for n in range(2, len(problem) + 1))

    def difficulty(self, problem) -> int:
        return len(problem)


class Addition(Task):
    """ "347 + 285 =" is answered column by column from the right, carry included, then whole: "12 13 6 632"."""

    name, levels = "addition", (3, 4, 5)

    def draw(self, rng: random.Random, level: int) -> tuple[int, int]:
        return tuple(rng.randrange(10 ** (level - 1), 10**level) for _ in range(2))

    def prompt(self, problem) -> str:
        return f"{problem[0]} + {problem[1]} ="

    def answer(self, problem) -> int:
        return sum(problem)

    def solution(self, problem) -> str:
        columns, carry = [], 0
        for a, b in zip(reversed(str(problem[0])), reversed(str(problem[1]))):
            columns.append(int(a) + int(b) + carry)
            carry = columns[-1] // 10
        return " ".join(map(str, [*columns, self.answer(problem)]))

    def difficulty(self, problem) -> int:
        return len(str(problem[0]))


def exact_reward(completion: str, answer: str) -> float:
    """1.0 where the completion is the answer, but for space around it."""
    return float(completion.strip() == answer.strip())


def reward_function(name: str):
    """function(completion, answer) -> float in [0, 1]: "last-number", "exact", or any "module:function" that imports from here.

    Raises ValueError, in one line, where there is none.
    """
    if name in ("last-number", "exact"):
        return exact_reward if name == "exact" else lambda completion, answer: number_reward(completion, last_number(answer))
    module, _, function = name.partition(":")
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        found = getattr(importlib.import_module(module), function)
        value = float(found("", "0"))
    except (Exception, SystemExit) as error:        # whatever a stranger's module does
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        if 0 <= value <= 1:
            return found
        reason = f"it gave {value:g} for an empty completion"
    raise ValueError(f"--reward {name}: {reason}; must be last-number, exact, or module:function, a function(completion, answer) "
                     "that gives a float in [0, 1] for any two strings")


class Questions(Task):
    """Questions from a JSON-lines file, one record a line, `solution` and `difficulty` beside them if you have them:

        {"prompt": "2 + 2 =", "answer": "4"}
        {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}
        {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "2 and 2 are 4."}]}

    A last message of the assistant is the solution, and the answer too where none is given.  A problem is a tuple (prompt, or the
    conversation as JSON; answer; solution; difficulty; line number).  Every fault is reported with its line.
    """

    levels = ()

    def __init__(self, path: str | Path, reward: str = "last-number"):
        self.name, self.asked, self.texts, self.reward_name = str(path), {}, {}, reward
        self.judge = reward_function(reward)
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut at a U+2028 in a string
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data {path}: cannot be read ({error}); it should be a JSON-lines file, one object a line") from None
        seen = {}
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = self._record(f"--data {path}, line {number}", line, number)
                first = seen.setdefault(row[0], row)
                if first[1] != row[1]:
                    raise ValueError(f"--data {path}, line {number}: asks what line {first[4]} asks, but with another answer")
        self.rows = list(seen.values())
        for split in ("train", "eval"):
            if not self.problems(split, 1, 0):
                raise ValueError(f"--data {path}: {len(self.rows)} questions leave none for {split}; one in four, chosen by a "
                                 "checksum of its prompt, is held out for evaluation, so give it 20 or more")

    def _record(self, where: str, line: str, number: int) -> tuple:
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', error)}, column {getattr(error, 'colno', 1)})") from None
        if not isinstance(record, dict):
            raise ValueError(f'{where}: got {type(record).__name__}, need an object such as {{"prompt": "2 + 2 =", "answer": "4"}}')
        prompt, answer, solution = record.get("prompt"), record.get("answer"), record.get("solution", "")
        if "messages" in record:
            prompt, solution = self._conversation(where, record["messages"], solution)
            answer = answer if "answer" in record else solution or None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{where}: prompt is {prompt!r}, need a non-empty string, or messages")
        if answer is None or isinstance(answer, (bool, list, dict)):
            raise ValueError(f"{where}: answer is {'missing' if answer is None else repr(answer)}, need a string or a number")
        answer = format(Decimal(str(answer)), "f") if isinstance(answer, float) else answer      # 1e3 is 1000, not the number 3
        if self.reward_name == "last-number" and last_number(str(answer)) is None:
            raise ValueError(f"{where}: answer is {str(answer)[:80]!r}, in which no number can be read; need one such as 4 or "
                             "\"#### 72\", or another --reward")
        return prompt, str(answer), str(solution), str(record.get("difficulty", "all")), number

    def _conversation(self, where: str, messages, solution: str) -> tuple[str, str]:
        """The messages before the answer, as JSON, and the assistant's last one."""
        fits = lambda m: isinstance(m, dict) and all(isinstance(m.get(k), str) and m[k].strip() for k in ("role", "content"))
        if not isinstance(messages, list) or not all(map(fits, messages)):
            raise ValueError(f'{where}: messages must be a list of objects such as {{"role": "user", "content": "2 + 2?"}}, '
                             "none of them empty")
        if messages and messages[-1]["role"] == "assistant":
            messages, solution = messages[:-1], messages[-1]["content"]
        if not messages or messages[-1]["role"] != "user":
            raise ValueError(f"{where}: messages hold no question; the last one, or the last before the assistant's answer, "
                             "must be of the user")
        key = json.dumps([{"role": m["role"], "content": m["content"]} for m in messages])
        self.asked[key] = json.loads(key)
        return key, solution

    def render(self, tokenizer, system: str = "") -> None:
        """Every question as the tokenizer's chat template writes it; a plain prompt becomes one message of the user.

        Without a template a prompt stays as it is.  Raises ValueError, naming the line, for a conversation or a system message
        without a template (joined by guesswork it would be a format that the model has never seen), or one that it refuses.
        """
        template = getattr(tokenizer, "chat_template", None)
        for prompt, *_, line in self.rows:
            messages = self.asked.get(prompt) or [{"role": "user", "content": prompt}]
            if system and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
            if template:
                try:
                    self.texts[prompt] = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                except Exception as error:          # jinja's, or the template's own complaint
                    reason = " ".join(str(error).split())[:200]
                    raise ValueError(f"--data {self.name}, line {line}: the chat template refuses it ({reason})") from None
            elif system or prompt in self.asked:
                what = "--system" if system else f"--data {self.name}, line {line}: a conversation"
                raise ValueError(f"{what}: the tokenizer of --student has no chat template to write it with; use an instruct "
                                 "model, or plain prompts")

    def problems(self, split: str, count: int, seed: int, levels=None) -> list:
        rows = [row for row in self.rows if held_out(row[0]) == (split == "eval")]
        random.Random(f"{split} {seed}").shuffle(rows)
        return rows[:count]

    def prompt(self, problem) -> str:
        return self.texts.get(problem[0], problem[0])

    def where(self, problem) -> str:
        return f"--data {self.name}, line {problem[4]}"

    def reward(self, problem, completion: str) -> float:
        try:
            return float(self.judge(completion, problem[1]))
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(f"--reward {self.reward_name}: {reason}, of the completion {completion[:80]!r} and the answer of "
                             f"line {problem[4]}") from error

    def solution(self, problem) -> str:
        return problem[2]

    def difficulty(self, problem) -> str:
        return problem[3]


TASKS = {task.name: task for task in (ChainSum(), Addition())}
