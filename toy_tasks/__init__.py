"""Toy arithmetic tasks, and questions from a file.

A task is five functions: `problems` draws them, `prompt` asks one, `reward` judges a completion, `solution` is a worked
answer, `difficulty` is the level that tables group by.  Train and evaluation problems never overlap, whatever the seed:
a checksum of the prompt says which side a problem is on, here, in the pre-training of the models and in every run.
"""

import json
import random
import re
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


class Questions(Task):
    """Questions from a JSON-lines file: `prompt` and `answer` on each line, `solution` and `difficulty` if you have them.

    A problem is its record as a tuple (prompt, answer, solution, difficulty).  Every fault is reported with its line.
    """

    levels = ()

    def __init__(self, path: str | Path):
        self.name, self.rows = str(path), []
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--data {path}: cannot be read ({error}); it should be a JSON-lines file, one object a line") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                self.rows.append(self._record(f"--data {path}, line {number}", line))
        for split in ("train", "eval"):
            if not self.problems(split, 1, 0):
                raise ValueError(f"--data {path}: {len(self.rows)} questions leave none for {split}; one in four, chosen by a "
                                 "checksum of its prompt, is held out for evaluation, so give it 20 or more")

    @staticmethod
    def _record(where: str, line: str) -> tuple:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(record, dict):
            raise ValueError(f'{where}: got {type(record).__name__}, need an object such as {{"prompt": "2 + 2 =", "answer": "4"}}')
        prompt, answer = record.get("prompt"), record.get("answer")
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{where}: prompt is {prompt!r}, need a non-empty string")
        if answer is None or isinstance(answer, bool) or last_number(str(answer)) is None:
            raise ValueError(f"{where}: answer is {answer!r}, in which no number can be read; need one such as 4 or \"#### 72\"")
        return prompt, str(answer), str(record.get("solution", "")), str(record.get("difficulty", "all"))

    def problems(self, split: str, count: int, seed: int, levels=None) -> list:
        rows = list(dict.fromkeys(row for row in self.rows if held_out(row[0]) == (split == "eval")))
        random.Random(f"{split} {seed}").shuffle(rows)
        return rows[:count]

    def prompt(self, problem) -> str:
        return problem[0]

    def reward(self, problem, completion: str) -> float:
        return number_reward(completion, last_number(problem[1]))

    def solution(self, problem) -> str:
        return problem[2]

    def difficulty(self, problem) -> str:
        return problem[3]


TASKS = {task.name: task for task in (ChainSum(), Addition())}
