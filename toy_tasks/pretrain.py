"""Rebuild the models that come with the toy: python -m toy_tasks.pretrain   (minutes on two cores)

`student` and `teacher-raw` are pre-trained on text that mixes two habits: *show the working*, which is nearly always
right, and *guess the answer at once*, which is nearly always wrong.  The skill is there, the habit is not; that is what
reinforcement learning can find.  `teacher` is teacher-raw after GRPO by hybrid_rl.py itself.  The student has never seen
the longer problems, so its groups there are all wrong: the place where a teacher has something to add.
"""

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import hybrid_rl
from toy_tasks import MODELS, TASKS, held_out

# name: hidden size, share of guesses, levels of each task seen in pre-training, steps of 64 problems
RECIPES = {
    "student": (64, 0.60, {"chain_sum": (2, 3, 4), "addition": (3,)}, 5000),
    "teacher-raw": (96, 0.40, {"chain_sum": (2, 3, 4, 5, 6), "addition": (3, 4, 5)}, 8000),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a number below 100, one a digit in longer numbers, which open with a digit that carries the space."""
    words = [f"▁{n}" for n in range(100)] + [str(n) for n in range(10)] + [f"▁{c}" for c in "+-*/=()"]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(prepend_scheme="always"),
        pre_tokenizers.Split(Regex(r"^▁[0-9]{1,2}$|▁?."), "isolated"),
    ])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                                   padding_side="left", model_max_length=128, clean_up_tokenization_spaces=False)


def text(rng: random.Random, levels: dict, guess_share: float) -> tuple[str, str]:
    """One training example: a problem that evaluation never asks, and a worked answer or a guess."""
    task = TASKS[rng.choices(list(levels), [3, 1])[0]]
    while held_out(task.prompt(problem := task.draw(rng, rng.choice(levels[task.name])))):
        pass
    if rng.random() < guess_share:      # a guess is drawn from the answers of such problems, so it is seldom right
        return task.prompt(problem), str(task.answer(task.draw(rng, task.difficulty(problem))))
    return task.prompt(problem), task.solution(problem)


def pretrain(name: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, batch: int = 64, lr: float = 3e-3):
    hidden, guess_share, levels, steps = RECIPES[name]
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=hidden // 4, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in (bar := tqdm(range(steps), desc=name, unit="step")):
        pairs = [text(rng, levels, guess_share) for _ in range(batch)]
        prompts = tokenizer([p for p, _ in pairs], return_tensors="pt", padding=True)
        answers = tokenizer([f"{a}<eos>" for _, a in pairs], return_tensors="pt", padding=True, padding_side="right")
        logp, _ = hybrid_rl.score(model, prompts.input_ids, prompts.attention_mask, answers.input_ids)
        loss = hybrid_rl.sft_loss(logp, answers.attention_mask.bool(), "token_mean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m toy_tasks.pretrain", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", choices=[*RECIPES, "teacher"], help="rebuild one model; teacher starts from teacher-raw")
    parser.add_argument("--out", type=Path, default=MODELS, help="folder to write to (default: the one the toy reads)")
    options = parser.parse_args()
    tokenizer = build_tokenizer()
    for name in RECIPES:
        if options.only in (None, name):
            pretrain(name, tokenizer).save_pretrained(options.out / name)
            tokenizer.save_pretrained(options.out / name)
    if options.only in (None, "teacher"):
        with tempfile.TemporaryDirectory() as scratch:
            hybrid_rl.train(hybrid_rl.Config(method="grpo", student=str(options.out / "teacher-raw"), steps=60, lr=5e-4,
                                             out=f"{scratch}/run", save_every=0, seed=0))
            shutil.copytree(f"{scratch}/run/final", options.out / "teacher", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
